"""One agent server, or several over one store, with its peers, all on real sockets."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from services.agent.app import HARNESSES, create_app
from shared.plugins import PluginFolder
from shared.ports.store import Store
from shared.settings import LoadedSettings, Settings
from shared.store.memory import MemoryStore
from tests.agent.peers import FakeProxy
from tests.serving import serving

BOUND_S = 20.0
_ids = itertools.count()


class Clock:
    """Time that moves only when told."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@dataclass
class Rig:
    """`urls` are the replicas; `app_states` their FastAPI applications, in the same order."""

    proxy: FakeProxy
    store: Store
    clock: Clock
    http: httpx.AsyncClient
    urls: list[str]
    apps: list[Any] = field(default_factory=list)

    def session(self, replica: int = 0, agent: str = "loop", **seed: Any) -> "Caller":
        return Caller(self, self.urls[replica], agent, {**seed_body(), **seed})


@dataclass
class Caller:
    """Someone who drives one session over one replica."""

    rig: Rig
    url: str
    agent: str
    seed_body: dict[str, Any]
    cookies: dict[str, str] = field(default_factory=dict)

    @property
    def session_id(self) -> str:
        return str(self.seed_body["agent_session_id"])

    @property
    def key(self) -> str:
        return str(self.seed_body["episode_id"]["rollout_id"])

    def over(self, replica: int) -> "Caller":
        """The same session over another replica."""
        return Caller(self.rig, self.rig.urls[replica], self.agent, self.seed_body, self.cookies)

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        cookie = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        sent = {"cookie": cookie, **headers} if cookie else headers
        return await self.rig.http.post(f"{self.url}/{self.agent}/{path}", json=body, headers=sent)

    async def seed(self, **changed: Any) -> httpx.Response:
        answer = await self.post("v1/agent_sessions", {**self.seed_body, **changed})
        self.cookies |= dict(answer.cookies)
        self.rig.http.cookies.clear()
        return answer

    async def activate(self, body: Any = None, **headers: str) -> httpx.Response:
        sent = {"X-Paddock-Key": self.key, **headers}
        return await self.post("v1/responses", {"input": "2+2?"} if body is None else body, **sent)

    async def close(self) -> httpx.Response:
        body = {"agent_session_id": self.session_id, "episode_id": self.seed_body["episode_id"]}
        return await self.post("v1/agent_sessions/close", body)


def seed_body() -> dict[str, Any]:
    number = next(_ids)
    return {
        "agent_session_id": f"agent-session-{number}",
        "episode_id": {"rollout_id": f"rollout-{number}", "attempt": 0},
        "task_id": {"taskset": "sums", "task_id": "1"},
    }


def settings(
    proxy_url: str, agents: dict[str, Any] | None = None, peers: dict[str, Any] | None = None, **sections: Any
) -> LoadedSettings:
    values = {
        "services": {"model_proxy": {"url": proxy_url}, **(peers or {})},
        "models": {"policy": {"upstream": "scripted"}},
        "agents": agents or {"loop": {"harness": "tool_loop"}},
        **sections,
    }
    return LoadedSettings(Settings.model_validate(values), {})


@contextlib.asynccontextmanager
async def running(
    *,
    replicas: int = 1,
    agents: dict[str, Any] | None = None,
    proxy: FakeProxy | None = None,
    store: Store | None = None,
    harnesses: PluginFolder = HARNESSES,
    lease_s: float = 15.0,
    **sections: Any,
) -> AsyncIterator[Rig]:
    """The replicas share one store; every wait in the block is bounded."""
    clock = Clock()
    kept = store if store is not None else MemoryStore(clock)
    fake = proxy or FakeProxy()
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(BOUND_S))
        proxy_url = await stack.enter_async_context(serving(fake.app()))
        # Once the agent servers are gone, so that none of their runs goes on.
        stack.callback(fake.gate.set)
        loaded = settings(proxy_url, agents, **{"store": {"lease_s": lease_s}, **sections})
        apps = [create_app(loaded, store=kept, clock=clock, harnesses=harnesses) for _ in range(replicas)]
        urls = [await stack.enter_async_context(serving(app)) for app in apps]
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=BOUND_S, trust_env=False))
        yield Rig(fake, kept, clock, http, urls, apps)
