"""The whole mesh as one would run it in a cluster: three replicas of each service, the balancer, Redis, a model."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson

from shared.settings import Settings
from shared.store.redis import RedisStore
from tests import balancer
from tests.balancer import Balancer
from tests.chaos.journal import Journal
from tests.chaos.model import JUDGE, POLICY, Model, model_server
from tests.chaos.processes import Nursery, Service, nursery
from tests.mesh.processes import SERVICES, marked
from tests.serving import free_port
from tests.store.redis_server import RedisServer

REPLICAS = 3
LEASE_S = 2.0
DRAIN_LEAD_S = 1.5
STOP_GRACE_S = 6.0
STOP_S = DRAIN_LEAD_S + STOP_GRACE_S + 1.0
READY_S = 60.0
TERMINATED = 143
MESH_TOKEN = "the-mesh-token-of-the-fleet"
QUEUE_PLACES = 3
STRAY_S = 3.0


@dataclass
class Replica:
    """One of the replicas of a service; it keeps its port when it is started again."""

    service: str
    name: str
    port: int
    nursery: Nursery
    http: httpx.AsyncClient
    process: Service | None = None
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Whoever does something to it holds this."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.process = await self.nursery.start(self.service, self.port, self.name)

    async def get(self, path: str, **headers: str) -> httpx.Response:
        """Asked without the balancer."""
        return await self.http.get(self.url + path, headers=headers)

    async def instance(self) -> str | None:
        """The name that it has given itself; None while it is not ready."""
        with contextlib.suppress(httpx.TransportError):
            reply = await self.get("/readyz")
            return str(reply.json()["instance"]) if reply.status_code == 200 else None
        return None

    async def ready(self) -> str:
        assert self.process is not None
        end = time.monotonic() + READY_S
        while (instance := await self.instance()) is None:
            waits = self.process.lives and time.monotonic() < end
            assert waits, f"{self.name} is not ready.\n{self.process.log.read_text()[-2000:]}"
            await asyncio.sleep(0.05)
        return instance

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send(number)

    async def kill(self) -> None:
        assert self.process is not None
        self.process.send(signal.SIGKILL)
        await self.process.ended(STOP_S)

    async def terminate(self) -> int:
        """TERM, and its exit status.

        Raises:
            TimeoutError: it did not end within its bound.
        """
        assert self.process is not None
        self.process.send(signal.SIGTERM)
        return await self.process.ended(STOP_S)


@dataclass
class Fleet:
    redis: RedisServer
    store: RedisStore
    balancer: Balancer
    model: Model
    replicas: dict[str, list[Replica]]
    http: httpx.AsyncClient
    folder: Path
    journal: Journal

    @property
    def url(self) -> str:
        """Where clients find the environment."""
        return self.balancer.url("environment")

    @property
    def everyone(self) -> list[Replica]:
        return [replica for replicas in self.replicas.values() for replica in replicas]

    @property
    def servers(self) -> dict[str, list[str]]:
        return {service: [replica.url for replica in replicas] for service, replicas in self.replicas.items()}

    async def whole(self) -> None:
        """Until everyone serves, and the balancer knows it."""
        await asyncio.gather(*(replica.ready() for replica in self.everyone))
        for service, urls in self.servers.items():
            await asyncio.to_thread(self.balancer.wait_until_ready, service, urls, READY_S)

    def strays(self) -> list[str]:
        """What lives of the mesh although none of its services should, within a moment."""
        pool = self.everyone[0].nursery
        end = time.monotonic() + STRAY_S
        while left := [str(process) for process in marked(pool.mark) if process.pid != pool.pid]:
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        return left

    async def restart_balancer(self) -> None:
        """End it with all its connections; it comes back at the same address."""
        address = self.balancer.address
        await asyncio.to_thread(self.balancer.stop)
        self.balancer = await asyncio.to_thread(balancer.start, self.servers, address)

    def restart_redis(self) -> None:
        """Killed and started again. It has written down what it had acknowledged, since it syncs every write."""
        self.redis.signal(signal.SIGKILL)
        self.redis.stop()
        self.redis.start()


@asynccontextmanager
async def fleet(folder: Path) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        redis = await asyncio.to_thread(stack.enter_context, RedisServer(folder, "--appendfsync", "always"))
        journal = Journal(folder)
        stack.callback(journal.close)
        model = await stack.enter_async_context(model_server(journal))
        ports = {service: [free_port() for _ in range(REPLICAS)] for service in SERVICES}
        servers = {service: [f"http://127.0.0.1:{port}" for port in mine] for service, mine in ports.items()}
        front = await asyncio.to_thread(balancer.start, servers)
        stack.callback(front.stop)
        environ = _environ(folder, model, redis, front)
        pool = await stack.enter_async_context(nursery(folder, environ))
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=30.0, trust_env=False))
        store = RedisStore(redis.url)
        stack.push_async_callback(store.close)
        replicas = {
            service: [Replica(service, f"{service}-{number}", port, pool, http) for number, port in enumerate(mine)]
            for service, mine in ports.items()
        }
        started = Fleet(redis, store, front, model, replicas, http, folder, journal)
        await asyncio.gather(*(replica.start() for replica in started.everyone))
        await started.whole()
        yield started
        await asyncio.to_thread(started.balancer.stop)


def _environ(folder: Path, model: Model, redis: RedisServer, front: Balancer) -> dict[str, str]:
    config = folder / "paddock.json"
    settings = Settings.model_validate(_configuration(model.url))
    config.write_bytes(orjson.dumps(settings.model_dump(mode="json", exclude_unset=True)))
    addresses = {f"PADDOCK_{name.upper()}_URL": url for name, url in front.urls.items()}
    return {
        **addresses,
        "PADDOCK_CONFIG": str(config),
        "PADDOCK_STORE_URL": redis.url,
        "PADDOCK_STATE_DIR": str(folder / "state"),
        "PADDOCK_MESH_TOKEN": MESH_TOKEN,
    }


def _configuration(model_url: str) -> dict[str, Any]:
    resources = {"close_timeout_s": 10.0, "verify_timeout_s": 60.0}
    maths = {"verifier": "math", "children": 1, **resources}
    environment = {"agent": "tool_loop", "episode_timeout_s": 180.0, "cleanup_timeout_s": 40.0}
    return {
        "store": {"lease_s": LEASE_S},
        "serving": {"drain_lead_s": DRAIN_LEAD_S, "stop_grace_s": STOP_GRACE_S},
        "models": {
            "policy": {"upstream": "chat_completions", "base_url": model_url, "model": POLICY},
            "judge": {"upstream": "chat_completions", "base_url": model_url, "model": JUDGE},
        },
        "agents": {"tool_loop": {"harness": "tool_loop", "model": "policy", "close_timeout_s": 10.0}},
        "resources": {
            "math": maths,
            "judged": {**maths, "judge": "judge"},
            "weather": {"verifier": "tool_calls", "tools": ["weather"], "order": "exact", **resources},
        },
        "environments": {
            "math": {"resources": "math", **environment},
            "queued": {
                "resources": "math", "max_concurrent": QUEUE_PLACES, "queue_timeout_s": 120.0, **environment
            },
            "judged": {"resources": "judged", **environment},
            "weather": {"resources": "weather", "tools": ["direct_http"], **environment},
        },
    }  # fmt: skip
