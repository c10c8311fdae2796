"""The resources server's application: owns tasks' verifiers, tools and sessions."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from services.resources.entries import Entry, Plugins, close_entries, create_entries, entry_problems
from services.resources.grading.pool import SHARED_POOL
from services.resources.judge import ProxyJudge
from services.resources.mcp_server import McpEndpoint
from services.resources.routes import Desk, add_routes
from services.resources.sessions import Sessions
from services.resources.verification import Verification
from shared.errors import ConfigurationProblem
from shared.http.service import Mesh, create_service, mesh_token_of, previous_mesh_token_of
from shared.ports.store import Store
from shared.ports.verifier import Judge
from shared.settings import LoadedSettings
from shared.store.observed import observed
from shared.store.open import open_store


def check(loaded: LoadedSettings) -> list[ConfigurationProblem]:
    """Everything that is wrong with the configured resources entries."""
    return entry_problems(loaded, Plugins())


def create_app(
    loaded: LoadedSettings,
    *,
    plugins: Plugins | None = None,
    store: Store | None = None,
) -> FastAPI:
    """The application; a given `store` stays the caller's to close.

    Raises:
        ConfigurationError: with everything that is wrong.
    """
    entries = create_entries(loaded, plugins or Plugins())
    opened = open_store(loaded) if store is None else store
    settings = loaded.settings

    @asynccontextmanager
    async def life(mesh: Mesh) -> AsyncIterator[None]:
        SHARED_POOL.measure_with(mesh.metrics)
        try:
            yield
        finally:
            await mcp.close()
            await verification.close()
            await close_entries(entries)
            if store is None:
                await opened.close()

    app = create_service("resources", loaded, lifespan=life, ready=opened.ping)
    mesh: Mesh = app.state.mesh
    store_in_use = observed(opened, mesh.metrics)
    sessions = Sessions(store_in_use, mesh.metrics, mesh_token_of(settings) or "", previous_mesh_token_of(settings))

    def judge_of(entry: Entry, key: str) -> Judge | None:
        if entry.settings.judge is None:
            return None
        proxy_url = settings.services.url_of("model_proxy")
        return ProxyJudge(mesh.client, proxy_url, entry.settings.judge, key, entry.settings.verify_timeout_s)

    verification = Verification(sessions, judge_of, claim_ttl_s=settings.store.lease_s)
    desk = Desk(entries, sessions, verification)
    mcp = McpEndpoint(desk)
    # Before the tools, whose path matches it.
    app.router.routes.append(mcp.route)
    add_routes(app, desk)
    return app
