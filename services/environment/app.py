"""The environment server: takes prepared rows, runs their episodes, answers with results."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.types import Scope

from services.environment.budgets import Budgets
from services.environment.desk import Desk
from services.environment.ending import Ending
from services.environment.news import News
from services.environment.outcome import OutcomePolicy
from services.environment.parties import Parties
from services.environment.reaper import Reaper
from services.environment.routes import DeskHolder, add_routes
from services.environment.runner import Runner
from shared.clients.agent import AgentClient
from shared.clients.resources import ResourcesClient
from shared.http.service import Mesh, create_service, require_token
from shared.settings import LoadedSettings
from shared.store.observed import observed
from shared.store.open import open_store


def create_app(loaded: LoadedSettings) -> FastAPI:
    """The application.

    Raises:
        ConfigurationError: it cannot be configured like this.
    """
    holder = DeskHolder()
    store = open_store(loaded)

    @asynccontextmanager
    async def lifespan(mesh: Mesh) -> AsyncIterator[None]:
        measured = observed(store, mesh.metrics)
        parties = _parties(mesh)
        news = News(measured)
        ending = Ending(mesh, measured, parties)
        runner = Runner(mesh, measured, parties, ending)
        reaper = Reaper(mesh, measured, runner, ending, news)
        desk = Desk(mesh, measured, runner, reaper, news)
        holder.hold(desk)
        reaper.start()
        try:
            yield
        finally:
            await desk.close()
            await store.close()

    token = loaded.settings.security.client_token
    client_token = token.get_secret_value() if token is not None else None

    def authorize(_scope: Scope, headers: Headers) -> None:
        require_token(headers, client_token)

    app = create_service("environment", loaded, lifespan=lifespan, authorize=authorize, ready=store.ping)
    add_routes(app, app.state.mesh, holder)
    return app


def _parties(mesh: Mesh) -> dict[str, Parties]:
    settings = mesh.settings
    parties = {}
    for name, entry in settings.environments.items():
        agent, resources = settings.agents[entry.agent], settings.resources[entry.resources]
        parties[name] = Parties(
            environment=entry,
            agent=AgentClient(mesh.client, settings.services.url_of("agent"), entry.agent),
            resources=ResourcesClient(mesh.client, settings.services.url_of("resources"), entry.resources),
            budgets=Budgets.of(entry, agent, resources),
            policy=OutcomePolicy(entry.outcome_policy),
            agent_seed_s=agent.seed_timeout_s,
            resources_seed_s=resources.seed_timeout_s,
        )
    return parties
