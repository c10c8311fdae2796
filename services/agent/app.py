"""The agent server's application: harnesses from the configuration, sessions over the store, routes."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from fastapi import FastAPI

from services.agent.hosting import Agent, HarnessContext, Host
from services.agent.routes import Routes, add_routes, release_waits
from services.agent.sessions import Sessions
from shared.clients.model_proxy import ModelProxyClient
from shared.errors import ConfigurationError, ConfigurationProblem
from shared.http.service import Mesh, create_service, mesh_token_of, previous_mesh_token_of
from shared.plugins import PluginFolder
from shared.ports.harness import SettingUp
from shared.ports.store import Store
from shared.settings import LoadedSettings
from shared.store.observed import observed
from shared.store.open import open_store
from shared.tokens import Signer

# Of the grace: how long runs may go on after the listener has closed, before they are stopped.
LINGER_SHARE: Final = 0.25
HARNESSES: Final = PluginFolder("services.agent.harnesses", "harness")


def check(loaded: LoadedSettings, harnesses: PluginFolder = HARNESSES) -> list[ConfigurationProblem]:
    """What is wrong with the configured agents; empty when nothing is."""
    problems: list[ConfigurationProblem] = []
    for name, entry in loaded.settings.agents.items():
        key = f"agents.{name}"
        problems += harnesses.check(entry.harness, entry.options, source=loaded.source_of(key), key=key)
    return problems


def create_app(
    loaded: LoadedSettings,
    *,
    store: Store | None = None,
    clock: Callable[[], float] = time.time,
    harnesses: PluginFolder = HARNESSES,
) -> FastAPI:
    """The application.

    `store` replaces the configured one (for replicas in one process), `clock` the time, `harnesses` the
    folder of plug-ins.

    Raises:
        ConfigurationError: with everything that is wrong with the configured agents.
    """
    if problems := check(loaded, harnesses):
        raise ConfigurationError(problems)
    kept = store if store is not None else open_store(loaded)

    @asynccontextmanager
    async def lifespan(mesh: Mesh) -> AsyncIterator[None]:
        host.instance = mesh.instance
        leaving = asyncio.create_task(_release_waits_when_draining(mesh, host))
        try:
            yield
        finally:
            leaving.cancel()
            linger_s = LINGER_SHARE * loaded.settings.serving.stop_grace_s
            await asyncio.gather(*(agent.shut_down(linger_s) for agent in agents.values()))
            if store is None:
                await kept.close()

    app = create_service("agent", loaded, lifespan=lifespan, ready=kept.ping)
    mesh: Mesh = app.state.mesh
    secret, previous = mesh_token_of(loaded.settings) or "", previous_mesh_token_of(loaded.settings)
    proxy_url = loaded.settings.services.url_of("model_proxy")
    host = Host(
        store=observed(kept, mesh.metrics),
        proxy=ModelProxyClient(mesh.client, proxy_url),
        proxy_url=proxy_url,
        tokens=Signer(secret, "session-token", previous=previous),
        instance=mesh.instance,
        lease_s=loaded.settings.store.lease_s,
        metrics=mesh.metrics,
        clock=clock,
    )
    agents = {name: Sessions(host, agent) for name, agent in _agents(loaded, mesh, harnesses).items()}
    add_routes(app, Routes(mesh, host, Signer(secret, "agent-session", previous=previous), agents))
    return app


def _agents(loaded: LoadedSettings, mesh: Mesh, harnesses: PluginFolder) -> dict[str, Agent]:
    agents = {}
    for name, entry in loaded.settings.agents.items():
        options = harnesses.options(entry.harness, entry.options)
        context = HarnessContext(name, entry, loaded.settings, mesh.client)
        harness = harnesses.module(entry.harness).create(options, context)
        holding = harness if isinstance(harness, SettingUp) else None
        agents[name] = Agent(name, entry, harness, holding, asyncio.Semaphore(entry.concurrency))
    return agents


async def _release_waits_when_draining(mesh: Mesh, host: Host) -> None:
    await mesh.draining.wait()
    release_waits(host)
