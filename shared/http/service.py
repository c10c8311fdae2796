"""How every service meets the wire: one FastAPI application, one pure ASGI edge, the common routes.

The edge does once what all routes need: who may call, how large a body may be, the episode's key and
trace, metrics, and errors in the mesh's shape. Routes read raw bytes once and return bytes.
"""

import asyncio
import hmac
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, Counter, generate_latest
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.contracts.failure import FailureKind
from shared.errors import (
    BadRowError,
    DrainingError,
    FieldProblem,
    NotFoundError,
    PaddockError,
    TooLargeError,
    UnauthorizedError,
)
from shared.http import headers as names
from shared.http.bare_route import BareRoute, Endpoint
from shared.http.client import HttpClient
from shared.http.problems import JSON_TYPE, bad_row, render
from shared.settings import LoadedSettings, ServiceName, Settings
from shared.telemetry import Metrics, current_key, current_trace

_log = logging.getLogger(__name__)
_Model = TypeVar("_Model", bound=BaseModel)

PUBLIC_PATHS = frozenset({"/healthz", "/readyz", "/metrics", "/version", "/docs", "/openapi.json"})
RETRY_AFTER_S = 2.0

Authorize = Callable[[Scope, Headers], None]


def over_socket(scope: Scope) -> bool:
    """Whether the request came over a Unix socket: from a sandbox, for all that is known."""
    server = scope.get("server")
    return server is not None and server[1] is None


@dataclass(slots=True)
class Mesh:
    """What a service holds while it runs: settings, its client for peers, and whether it is draining."""

    name: ServiceName
    loaded: LoadedSettings
    client: HttpClient
    metrics: Metrics = field(default_factory=Metrics)
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    instance: str = field(default_factory=lambda: secrets.token_hex(6))

    @property
    def settings(self) -> Settings:
        return self.loaded.settings

    def refuse_when_draining(self) -> None:
        if self.draining.is_set():
            raise DrainingError(f"The {self.name} server is shutting down.", retry_after_s=RETRY_AFTER_S)


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


class _Edge:
    """Pure ASGI: authorisation, body limit, context, metrics, errors; calls bare routes by itself."""

    def __init__(self, app: ASGIApp, bare_routes: Sequence[BareRoute], mesh: Mesh, authorize: Authorize) -> None:
        self._app = app
        self._bare_routes = bare_routes
        self._mesh = mesh
        self._authorize = authorize
        self._counters: dict[tuple[str, int], Counter] = {}
        self._max_body_bytes = mesh.settings.serving.max_body_mib * 2**20

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        current_key.set(headers.get(names.KEY))
        current_trace.set(headers.get(names.TRACEPARENT))
        status = 0

        async def counted_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if scope["path"] not in PUBLIC_PATHS or over_socket(scope):
                self._authorize(scope, headers)
            route = next((route for route in self._bare_routes if route.serves(scope)), None)
            app = self._app if route is None else route.app
            await app(scope, self._limited(headers, receive), counted_send)
        except Exception as error:
            if status:
                raise
            await _respond(_as_paddock_error(error), scope, receive, counted_send)
        finally:
            self._count(getattr(scope.get("route"), "path", "other"), status)

    def _count(self, path: str, status: int) -> None:
        counter = self._counters.get((path, status))
        if counter is None:
            counter = self._counters[path, status] = self._mesh.metrics.requests.labels(path, str(status))
        counter.inc()

    def _limited(self, headers: Headers, receive: Receive) -> Receive:
        limit = self._max_body_bytes
        length = headers.get("content-length", "")
        if length.isdigit():
            # The server hands on no more than it announced.
            if int(length) > limit:
                raise _too_large(limit)
            return receive
        seen = 0

        async def counted_receive() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > limit:
                raise _too_large(limit)
            return message

        return counted_receive


def _too_large(limit: int) -> TooLargeError:
    return TooLargeError(f"The body is larger than {limit // 2**20} MiB.")


def _as_paddock_error(error: Exception) -> PaddockError:
    if isinstance(error, PaddockError):
        return error
    if isinstance(error, ValidationError):
        return bad_row(error)
    _log.error("unexpected error", exc_info=error)
    unexpected = PaddockError(f"Unexpected {type(error).__name__}; the service's log has the details.")
    unexpected.kind = FailureKind.ENVIRONMENT_SERVER_FAILED
    return unexpected


async def _respond(error: PaddockError, scope: Scope, receive: Receive, send: Send) -> None:
    problem = render(error)
    await Response(problem.body, problem.status, problem.headers)(scope, receive, send)


async def _on_error(_request: Request, error: Exception) -> Response:
    problem = render(_as_paddock_error(error))
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


class Service(FastAPI):
    """A FastAPI application behind the mesh's edge."""

    def __init__(self, mesh: Mesh, authorize: Authorize, **options: Any) -> None:
        super().__init__(**options)
        self.state.mesh = mesh
        self._bare_routes: list[BareRoute] = []
        self._edge = _Edge(super().__call__, self._bare_routes, mesh, authorize)

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
    """
    mesh = Mesh(name, loaded, HttpClient(mesh_token_of(loaded.settings)))

    @asynccontextmanager
    async def whole_life(_app: FastAPI) -> AsyncIterator[None]:
        try:
            async with lifespan(mesh):
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
        """Dependencies are reachable and the service is not draining."""
        mesh.refuse_when_draining()
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
        """Prometheus text format."""
        return Response(generate_latest(mesh.metrics.registry), media_type=CONTENT_TYPE_LATEST)


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
