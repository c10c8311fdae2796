"""How every service meets the wire: one FastAPI application behind the edge, and the common routes.

The edge (`shared/http/edge.py`) does once what all routes need. Routes read raw bytes once and return bytes.
"""

import asyncio
import hmac
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from shared.errors import BadRowError, DrainingError, FieldProblem, NotFoundError, PaddockError, UnauthorizedError
from shared.http.bare_route import BareRoute, Endpoint
from shared.http.client import HttpClient
from shared.http.edge import Authorize, Edge, as_paddock_error
from shared.http.problems import JSON_TYPE, bad_row, render
from shared.http.worker_metrics import exposition
from shared.metrics import Metrics, Names
from shared.otel import exporting, exports_spans
from shared.redaction import hide
from shared.settings import LoadedSettings, ServiceName, Settings
from shared.telemetry import log_as

_Model = TypeVar("_Model", bound=BaseModel)

PUBLIC_PATHS = frozenset({"/healthz", "/readyz", "/metrics", "/version", "/docs", "/openapi.json"})
RETRY_AFTER_S = 2.0


def over_socket(scope: Scope) -> bool:
    """Whether the request came over a Unix socket: from a sandbox, for all that is known."""
    server = scope.get("server")
    return server is not None and server[1] is None


@dataclass(slots=True)
class Mesh:
    """What a service holds while it runs: settings, its client for peers, and how far its stop has come."""

    name: ServiceName
    loaded: LoadedSettings
    client: HttpClient
    metrics: Metrics = field(default_factory=Metrics)
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    """A stop was asked for: `readyz` says 503, and everything else goes on as before."""
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    """The lead is over: new work is refused, open waits and streams end now."""
    instance: str = field(default_factory=lambda: secrets.token_hex(6))

    @property
    def settings(self) -> Settings:
        return self.loaded.settings

    def refuse_when_leaving(self) -> None:
        if self.leaving.is_set() or self.draining.is_set():
            raise self.stopping()

    def refuse_when_draining(self) -> None:
        if self.draining.is_set():
            raise self.stopping()

    def stopping(self) -> DrainingError:
        return DrainingError(f"The {self.name} server is shutting down.", retry_after_s=RETRY_AFTER_S)


def package_version() -> str:
    try:
        return version("paddock-mesh")
    except PackageNotFoundError:
        return "unknown"


def mesh_token_of(settings: Settings) -> str | None:
    token = settings.security.mesh_token
    return None if token is None else token.get_secret_value()


def bearer(headers: Headers) -> str | None:
    """The bearer token of a request."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token else None


def previous_mesh_token_of(settings: Settings) -> str | None:
    token = settings.security.previous_mesh_token
    return None if token is None else token.get_secret_value()


def require_token(headers: Headers, expected: str | None, previous: str | None = None) -> None:
    """Pass when no token is configured or the request carries it, or the previous one.

    Raises:
        UnauthorizedError: it carries none, or another one.
    """
    if expected is None:
        return
    given = (bearer(headers) or "").encode()
    if not any([hmac.compare_digest(given, token.encode()) for token in (expected, previous) if token is not None]):
        raise UnauthorizedError("This request needs the mesh's bearer token in its Authorization header.")


async def _on_error(_request: Request, error: Exception) -> Response:
    problem = render(as_paddock_error(error))
    return Response(problem.body, problem.status, problem.headers)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    wrong = NotFoundError(f"{request.method} {request.url.path}: {error.detail}.")
    wrong.status = error.status_code
    return await _on_error(request, wrong)


async def _on_request_validation(request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    return await _on_error(
        request, BadRowError.of([FieldProblem(tuple(e["loc"]), e["msg"], e["type"]) for e in error.errors()])
    )


def _where_needed(authorize: Authorize) -> Authorize:
    """Public paths are open to all that reach the port; on a Unix socket nothing is."""

    def check(scope: Scope, headers: Headers) -> None:
        if scope["path"] not in PUBLIC_PATHS or over_socket(scope):
            authorize(scope, headers)

    return check


class Service(FastAPI):
    """A FastAPI application behind the mesh's edge."""

    def __init__(self, mesh: Mesh, authorize: Authorize, **options: Any) -> None:
        super().__init__(**options)
        self.state.mesh = mesh
        self._bare_routes: list[BareRoute] = []
        self._edge = Edge(super().__call__, self._bare_routes, mesh, _where_needed(authorize))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        await self._edge(scope, receive, send)

    def add_bare_route(
        self, method: str, path: str, endpoint: Endpoint, *, openapi_extra: dict[str, Any] | None = None
    ) -> None:
        """Add a route of a hot path; it is tried before all others, in the order of addition."""
        route = BareRoute(path, endpoint, methods=[method], openapi_extra=openapi_extra)
        self.router.routes.append(route)
        self._bare_routes.append(route)


Lifespan = Callable[[Mesh], AbstractAsyncContextManager[None]]
Ready = Callable[[], Awaitable[None]]


def create_service(
    name: ServiceName,
    loaded: LoadedSettings,
    *,
    lifespan: Lifespan,
    authorize: Authorize | None = None,
    ready: Ready | None = None,
) -> Service:
    """The application of one service; its `state.mesh` is the `Mesh`.

    `authorize` decides who may call (the mesh token by default), `ready` raises while a dependency is away.

    Raises:
        ConfigurationError: spans are to be exported, and cannot be.
    """
    exports_spans()
    settings = loaded.settings
    security = settings.security
    for token in (security.mesh_token, security.previous_mesh_token, security.client_token):
        hide(None if token is None else token.get_secret_value())
    client = HttpClient(mesh_token_of(settings), patience_s=settings.services.patience_s)
    mesh = Mesh(name, loaded, client, Metrics(Names.of(settings), name))
    mesh.metrics.build.labels(name, package_version()).set(1)

    @asynccontextmanager
    async def whole_life(_app: FastAPI) -> AsyncIterator[None]:
        log_as(mesh.instance)
        try:
            async with (
                exporting(name, mesh.instance, package_version()),
                mesh.metrics.handed_on(),
                lifespan(mesh),
            ):
                yield
        finally:
            await mesh.client.close()

    app = Service(
        mesh,
        authorize or _needs_mesh_token(loaded.settings),
        title=f"Paddock {name.replace('_', ' ')}",
        version=package_version(),
        lifespan=whole_life,
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.add_exception_handler(PaddockError, _on_error)
    app.add_exception_handler(ValidationError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_request_validation)
    _add_common_routes(app, mesh, ready)
    return app


def _needs_mesh_token(settings: Settings) -> Authorize:
    token, previous = mesh_token_of(settings), previous_mesh_token_of(settings)
    return lambda _scope, headers: require_token(headers, token, previous)


def _add_common_routes(app: FastAPI, mesh: Mesh, ready: Ready | None) -> None:
    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """The process is alive."""
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> dict[str, str]:
        """Dependencies are reachable and no stop was asked for."""
        mesh.refuse_when_leaving()
        if ready is not None:
            await ready()
        return {
            "status": "ready",
            "service": mesh.name,
            "instance": mesh.instance,
            "build": package_version(),
        }

    @app.get("/version")
    async def version_route() -> dict[str, str]:
        return {"service": mesh.name, "version": package_version()}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text format; with several workers the sum over all of them."""
        mesh.metrics.flush()
        return Response(exposition(mesh.metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def read_model(request: Request, model: type[_Model]) -> _Model:
    """The body as `model`, validated once from its bytes.

    Raises:
        BadRowError: with every wrong field's path.
    """
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        raise bad_row(error) from error


def json_reply(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer from bytes that are JSON already."""
    return Response(body, status, dict(headers or {}), media_type=JSON_TYPE)


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """What `/docs` shows for a route that reads its body raw (`openapi_extra`)."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    return {"requestBody": {"required": True, "content": {JSON_TYPE: {"schema": schema}}}}


async def disconnected(request: Request) -> None:
    """Return when the client has gone away. Call it only after the body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
