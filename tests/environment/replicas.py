"""Several environment servers as processes over one Redis, before the two parties in the test's own loop."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson

from tests.environment.parties import Parties, settings_for
from tests.mesh.processes import Running, running
from tests.serving import free_port, serving
from tests.store.redis_server import RedisServer

LEASE_S = 1.0
SOON_S = 30.0


@dataclass
class Replica:
    process: Running
    http: httpx.AsyncClient

    async def run(self, body: dict[str, Any], **headers: str) -> httpx.Response:
        return await self.http.post("/run", json=body, headers=headers)

    async def outcome(self, key: str) -> dict[str, Any]:
        """The episode's answer, however long it takes within the bound."""
        async with asyncio.timeout(SOON_S):
            while (reply := await self.http.get(f"/episodes/{key}", headers={"Prefer": "wait=10"})).status_code == 202:
                pass
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    async def ready(self) -> None:
        async with asyncio.timeout(SOON_S):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if (await self.http.get("/readyz")).status_code == 200:
                        return
                assert self.process.process.poll() is None, self.process.err
                await asyncio.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()

    def freeze(self) -> None:
        self.process.send(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send(signal.SIGCONT)


@dataclass
class Replicas:
    parties: Parties
    redis: RedisServer
    folder: Path
    config: Path
    stack: contextlib.AsyncExitStack
    all: list[Replica] = field(default_factory=list)

    async def start(self) -> Replica:
        """One more replica, ready."""
        port = free_port()
        environ = {"PADDOCK_CONFIG": str(self.config), "PADDOCK_STORE_URL": self.redis.url}
        process = self.stack.enter_context(
            running(
                "serve", "environment", "--port", port, cwd=self.folder, environ=environ, name=f"replica{len(self.all)}"
            )
        )
        url = f"http://127.0.0.1:{port}"
        http = await self.stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=SOON_S, trust_env=False))
        self.all.append(Replica(process, http))
        await self.all[-1].ready()
        return self.all[-1]

    def keys_without_ttl(self) -> list[str]:
        return [key for key in self.redis.ask("KEYS", "*") if self.redis.ask("PTTL", key) == -1]


@contextlib.asynccontextmanager
async def replicas(
    folder: Path, count: int = 2, *, lease_s: float = LEASE_S, **environment: Any
) -> AsyncIterator[Replicas]:
    """`count` replicas whose episodes belong to another one soon after their own has died."""
    parties = Parties()
    async with contextlib.AsyncExitStack() as stack:
        redis = stack.enter_context(RedisServer(folder))
        url = await stack.enter_async_context(serving(parties.app()))
        settings = settings_for(url, environment, {"store": {"lease_s": lease_s}}).settings
        config = folder / "paddock.json"
        config.write_bytes(orjson.dumps(settings.model_dump(mode="json", exclude_unset=True)))
        started = Replicas(parties, redis, folder, config, stack)
        for _ in range(count):
            await started.start()
        yield started
