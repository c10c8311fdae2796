"""The pure ASGI edge before every route: who may call, how large a body may be, context, metrics, errors.

It also carries a stop to callers: from its first moment every answer asks for its connection to be closed,
so that no later request meets a closing one, and a request that the end of the grace cuts is answered.
Which path needs which token, and which work is refused while draining, is decided elsewhere.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from fastapi import Response
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.contracts.failure import FailureKind
from shared.errors import PaddockError, TooLargeError
from shared.http import headers as names
from shared.http.bare_route import BareRoute
from shared.http.problems import bad_row, render
from shared.metric_families import OTHER, Count, Spread
from shared.telemetry import current_key
from shared.tracing import Span, current_trace, fresh_trace, recording, span, trace_of

if TYPE_CHECKING:
    from shared.http.service import Mesh

_log = logging.getLogger(__name__)

_KEY: Final = names.KEY.lower().encode()

Authorize = Callable[[Scope, Headers], None]


class _Answer:
    """Where an answer is sent; `status` is 0 before it has begun."""

    def __init__(self, send: Send, leaving: asyncio.Event) -> None:
        self.status = 0
        self._send = send
        self._leaving = leaving

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self._leaving.is_set():
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
        await self._send(message)


class Edge:
    """`app` behind the edge. Bare routes are looked up and called here; all else goes to `app`."""

    def __init__(self, app: ASGIApp, bare_routes: Sequence[BareRoute], mesh: "Mesh", authorize: Authorize) -> None:
        self._app = app
        self._bare_routes = bare_routes
        self._mesh = mesh
        self._authorize = authorize
        self._series: dict[tuple[str, int], tuple[Count, Spread]] = {}
        self._in_flight = mesh.metrics.requests_in_flight.labels()
        self._max_body_bytes = mesh.settings.serving.max_body_mib * 2**20

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._exchange(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _exchange(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = scope["headers"]
        given = dict(raw)
        key = given.get(_KEY)
        current_key.set(None if key is None else key.decode("latin-1"))
        current_trace.set(trace_of(raw, given) or fresh_trace())
        answer, began = _Answer(send, self._mesh.leaving), time.perf_counter()
        self._in_flight.value += 1
        try:
            self._authorize(scope, Headers(raw=raw))
            serve = self._recorded if recording() else self._routed
            await serve(scope, self._limited(given, receive), answer)
        except asyncio.CancelledError:
            if answer.status or not self._mesh.draining.is_set():
                raise
            # The grace is over. Nothing comes after this answer, so the cancellation need not go on.
            await _respond(self._mesh.stopping(), scope, receive, answer)
        except ClientDisconnect:
            _log.debug("the caller left before it had sent everything")
        except Exception as error:
            if answer.status:
                raise
            await _respond(as_paddock_error(error), scope, receive, answer)
        finally:
            self._in_flight.value -= 1
            self._count(_path_of(scope), answer.status, time.perf_counter() - began)

    async def _recorded(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        with span(scope["method"], "server") as hop:
            await self._routed(scope, receive, answer)
            _describe(hop, scope, answer.status)

    async def _routed(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = next((route for route in self._bare_routes if route.serves(scope)), None)
        await (self._app if route is None else route.app)(scope, receive, send)

    def _count(self, path: str, status: int, seconds: float) -> None:
        series = self._series.get((path, status))
        if series is None:
            metrics = self._mesh.metrics
            counted = metrics.requests.labels(path, str(status or "none")), metrics.request_seconds.labels(path)
            series = self._series[path, status] = counted
        series[0].inc()
        series[1].observe(seconds)

    def _limited(self, given: Mapping[bytes, bytes], receive: Receive) -> Receive:
        limit = self._max_body_bytes
        length = given.get(b"content-length", b"")
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


def _path_of(scope: Scope) -> str:
    """The route's template: a path itself may hold ids, of which there is no end."""
    path: str = getattr(scope.get("route"), "path", OTHER)
    return path


def _describe(hop: Span, scope: Scope, status: int) -> None:
    path = _path_of(scope)
    hop.rename(f"{scope['method']} {path}")
    hop.set("http.request.method", scope["method"])
    hop.set("http.route", path)
    hop.set("http.response.status_code", status)
    if (key := current_key.get()) is not None:
        hop.set("paddock.key", key)
    if status >= 500:
        hop.fail(str(status))


def _too_large(limit: int) -> TooLargeError:
    return TooLargeError(f"The body is larger than {limit // 2**20} MiB.")


def as_paddock_error(error: Exception) -> PaddockError:
    """What a caller is told of any error; one that is not ours is logged in full and told by type only."""
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
