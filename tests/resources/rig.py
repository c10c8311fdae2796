"""What the resources server's tests share: settings, request bodies, and a served application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI

from services.resources.app import create_app
from services.resources.entries import Plugins
from shared.clients.resources import ResourcesClient
from shared.contracts.resources import CloseResourcesRequest, SeedResourcesRequest
from shared.http.client import HttpClient
from shared.plugins import PluginFolder
from shared.ports.store import Store
from shared.settings import LoadedSettings, Settings
from tests.serving import serving

FAKES = Plugins(
    PluginFolder("tests.resources.plugins.verifiers", "verifier"),
    PluginFolder("tests.resources.plugins.toolsets", "toolset"),
)
PARAMS = {"input": [{"role": "user", "content": "Which one?"}]}


def loaded(resources: dict[str, Any], **sections: Any) -> LoadedSettings:
    return LoadedSettings(Settings.model_validate({"resources": resources, **sections}), {})


def answer(text: str, *before: dict[str, Any]) -> dict[str, Any]:
    """A response with one final message after the given items."""
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    return {"id": "resp_1", "object": "response", "status": "completed", "output": [*before, message]}


def seed_body(session: str, task_data: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "resources_session_id": session,
        "episode_id": {"rollout_id": session, "attempt": 0},
        "task_id": {"taskset": "tests", "task_id": "1"},
        "task_data": task_data,
        **changes,
    }


def close_body(session: str, **changes: Any) -> dict[str, Any]:
    return {"resources_session_id": session, "episode_id": {"rollout_id": session, "attempt": 0}, **changes}


def verify_body(task_data: dict[str, Any], text: str = "x", **changes: Any) -> dict[str, Any]:
    return {**task_data, "responses_create_params": PARAMS, "response": answer(text), **changes}


@dataclass(frozen=True)
class Served:
    """A running resources server. `http` keeps no cookies: each test says whose session it means."""

    app: FastAPI
    url: str
    http: httpx.AsyncClient

    async def post(
        self,
        path: str,
        body: Any = None,
        *,
        cookies: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        sent = dict(headers or {})
        if cookies:
            sent["cookie"] = "; ".join(f"{name}={value}" for name, value in cookies.items())
        return await self.http.post(f"{self.url}/{path}", json=body, headers=sent)

    async def seed(self, entry: str, session: str, task_data: dict[str, Any], **changes: Any) -> dict[str, str]:
        """Seed and return the session's cookies."""
        reply = await self.post(f"{entry}/seed_session", seed_body(session, task_data, **changes))
        assert reply.status_code == 200, reply.text
        name, _, value = reply.headers["set-cookie"].partition(";")[0].partition("=")
        return {name: value}


@asynccontextmanager
async def resources(
    settings: LoadedSettings,
    *,
    plugins: Plugins | None = None,
    store: Store | None = None,
    lease_s: float = 15.0,
    token: str | None = None,
) -> AsyncIterator[Served]:
    kept = settings.settings.store.model_copy(update={"lease_s": lease_s})
    leased = LoadedSettings(settings.settings.model_copy(update={"store": kept}), settings.sources)
    app = create_app(leased, plugins=plugins, store=store)
    headers = {"authorization": f"Bearer {token}"} if token is not None else {}
    async with (
        serving(app) as url,
        httpx.AsyncClient(timeout=20, headers=headers, trust_env=False) as http,
    ):
        yield Served(app, url, http)


@asynccontextmanager
async def mesh_client(url: str, entry: str) -> AsyncIterator[ResourcesClient]:
    """The client that the environment server uses."""
    http = HttpClient()
    try:
        yield ResourcesClient(http, url, entry)
    finally:
        await http.close()


ROLLOUT = {"rollout_id": "rollout-1", "attempt": 0}


def seed_request(session: str, task_data: dict[str, Any]) -> SeedResourcesRequest:
    return SeedResourcesRequest.model_validate(seed_body(session, task_data, episode_id=ROLLOUT))


def close_request(session: str) -> CloseResourcesRequest:
    return CloseResourcesRequest.model_validate(close_body(session, episode_id=ROLLOUT))
