"""The model proxy's application: the one place where its parts are put together."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from services.model_proxy.access import Access
from services.model_proxy.capture import RECORD_WITHIN_S, Captures
from services.model_proxy.exchange import Desk
from services.model_proxy.models import check_models, open_models
from services.model_proxy.routes import Calls, add_routes
from services.model_proxy.under_way import UnderWay
from shared.errors import ConfigurationError, ConfigurationProblem
from shared.http.service import Mesh, create_service
from shared.settings import LoadedSettings
from shared.store.observed import observed
from shared.store.open import open_store


def check(loaded: LoadedSettings) -> list[ConfigurationProblem]:
    """What is wrong with the configuration as far as it concerns this service; empty when nothing is."""
    return check_models(loaded)


def create_app(loaded: LoadedSettings, *, record_within_s: float = RECORD_WITHIN_S) -> FastAPI:
    """`record_within_s`: how long a call that has ended may wait for its record while the store is away.

    Raises:
        ConfigurationError: with everything that `check` finds, or an unknown kind of store.
    """
    if problems := check(loaded):
        raise ConfigurationError(problems)
    access = Access(loaded.settings)
    store = open_store(loaded)
    models = open_models(loaded)

    @asynccontextmanager
    async def lifespan(_mesh: Mesh) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await under_way.ended()
            await models.close()
            await store.close()

    app = create_service("model_proxy", loaded, lifespan=lifespan, authorize=access.authorize, ready=store.ping)
    mesh: Mesh = app.state.mesh
    captures = Captures(
        observed(store, mesh.metrics),
        ttl_s=loaded.settings.result_ttl_s,
        record_within_s=record_within_s,
        added=mesh.metrics.capture_bytes.labels().inc,
    )
    under_way = UnderWay(captures.sealed_within)
    add_routes(app, Calls(access, models, Desk(captures, mesh.metrics, under_way), mesh))
    return app
