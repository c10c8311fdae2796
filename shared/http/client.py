"""The one HTTP client for the hops between services.

Pooled, bounded, typed errors. A request is repeated only where nothing was sent (a refused connection),
or where the caller says that the peer joins or replays it by key (`replayable`): a server may die or close an
idle connection in the very moment in which it is used, and another replica then answers the repeated request.
"""

import asyncio
import errno
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final

from shared.contracts.failure import FailureKind
from shared.deadline import Deadline
from shared.errors import PaddockError, ServiceError, TransportError
from shared.http import headers as names
from shared.http.http1 import Http1Client, Target
from shared.http.http1_reply import Http1Error, Http1Reply, Http1TimeoutError
from shared.http.problems import JSON_TYPE, read
from shared.redaction import redact
from shared.telemetry import current_key
from shared.tracing import recording, span, trace_headers

# Shorter than any server of ours keeps an idle connection open, so that we close first.
KEEP_ALIVE_S: Final = 15.0
CONNECT_TIMEOUT_S: Final = 5.0
PATIENCE_S: Final = 0.5
FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 1.0
_BALANCER_STATUSES: Final = frozenset({502, 503, 504})
_BALANCER_HAS_NO_SERVER: Final = (503, FailureKind.TRANSPORT_UNREACHABLE)
_COME_AGAIN: Final = frozenset({FailureKind.SHUTDOWN, FailureKind.PERSISTENCE_FAILED})
"""A replica that stops, or whose store is away: the request was not begun, and will be served soon."""
_LOCAL_ERRNOS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer. Header names are lower case; `cookies` are those that the peer set."""

    status: int
    headers: dict[str, str]
    cookies: dict[str, str]
    body: bytes


class HttpClient:
    """Calls services of the mesh; made once per process, closed by whoever made it.

    `patience_s`: how long a request that may be repeated is repeated while its peer cannot be reached.
    """

    def __init__(self, token: str | None = None, *, patience_s: float = PATIENCE_S) -> None:
        self._token = token
        self._patience_s = patience_s
        self._http1 = Http1Client(keep_alive_s=KEEP_ALIVE_S, connect_timeout_s=CONNECT_TIMEOUT_S)

    async def close(self) -> None:
        self._http1.close()

    def request(
        self,
        method: str,
        url: str,
        *,
        service: str,
        timeout_s: float,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        cookies: Mapping[str, str] | None = None,
        replayable: bool = False,
    ) -> Coroutine[Any, Any, Reply]:
        """Send and read the whole answer within `timeout_s`, repeats included.

        Raises:
            ServiceError: the peer answered with an error status.
            TransportError: it could not be reached, dropped the connection, or did not answer in time.
        """
        sending = self._repeated(method, url, service, timeout_s, body, headers, cookies, replayable)
        return _recorded(sending, method, url, service) if recording() else sending

    async def _repeated(
        self,
        method: str,
        url: str,
        service: str,
        timeout_s: float,
        body: bytes | None,
        headers: Mapping[str, str] | None,
        cookies: Mapping[str, str] | None,
        replayable: bool,
    ) -> Reply:
        deadline = Deadline.after(timeout_s)
        sent_headers = self._headers(headers, cookies, body is not None, deadline)
        pause_s = FIRST_PAUSE_S
        patience: Deadline | None = None
        while True:
            try:
                reply = await self._once(method, url, service, body, sent_headers, deadline)
                if reply.status < 300:
                    return reply
                raise read(reply.status, reply.headers, reply.body, service=service)
            except (TransportError, ServiceError) as error:
                patience = patience or Deadline.after(self._patience_s)
                comes_again = replayable and error.kind in _COME_AGAIN
                left = deadline if comes_again else patience
                if not _may_repeat(error, replayable, service) or min(left.left_s, deadline.left_s) <= pause_s:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(4 * pause_s, LONGEST_PAUSE_S)

    def _headers(
        self,
        given: Mapping[str, str] | None,
        cookies: Mapping[str, str] | None,
        has_body: bool,
        deadline: Deadline,
    ) -> dict[str, str]:
        sent = {
            **trace_headers(),
            names.DEADLINE: f"{deadline.left_s:.3f}",
        }
        if self._token is not None:
            sent["Authorization"] = f"Bearer {self._token}"
        if has_body:
            sent["Content-Type"] = JSON_TYPE
        if (key := current_key.get()) is not None:
            sent[names.KEY] = key
        if cookies:
            sent["Cookie"] = "; ".join(f"{name}={value}" for name, value in cookies.items())
        return sent | dict(given or {})

    async def _once(
        self, method: str, url: str, service: str, body: bytes | None, headers: dict[str, str], deadline: Deadline
    ) -> Reply:
        target = Target.of(method, url, headers)
        left_s = deadline.within(deadline.left_s)
        try:
            reply = await self._http1.send(target, body or b"", silence_s=left_s, total_s=left_s)
            try:
                return Reply(reply.status, reply.headers, _cookies_set_by(reply), await reply.read())
            finally:
                reply.close()
        except Http1TimeoutError as error:
            raise TransportError(
                f"{service} did not answer in time.", kind=FailureKind.TRANSPORT_TIMEOUT, service=service, sent=True
            ) from error
        except Http1Error as error:
            if error.connected:
                kind, told = FailureKind.TRANSPORT_PEER_DROP, f"{service} dropped the connection: {error}."
            else:
                kind, told = _why_not_connected(error), f"{service} cannot be reached: {error}."
            raise TransportError(told, kind=kind, service=service, sent=error.connected) from error


async def _recorded(sending: Coroutine[Any, Any, Reply], method: str, url: str, service: str) -> Reply:
    with span(f"{method} {service}", "client") as hop:
        hop.set("http.request.method", method)
        hop.set("url.full", redact(url.partition("?")[0]))
        hop.set("peer.service", service)
        reply = await sending
        hop.set("http.response.status_code", reply.status)
    return reply


def _may_repeat(error: PaddockError, replayable: bool, service: str) -> bool:
    """Whether the request may reach a server that serves it when it is sent again."""
    if isinstance(error, TransportError):
        return (replayable or not error.sent) and error.kind is not FailureKind.TRANSPORT_TIMEOUT
    if not isinstance(error, ServiceError):
        return False
    if error.origin is not None and error.origin.service != service:
        return False  # the peer tells how its own call of another service ended, and will tell the same again
    if error.in_mesh_form and (error.status, error.kind) == _BALANCER_HAS_NO_SERVER:
        return True  # our balancer's word, and no service's: nothing was sent to any
    if not replayable:
        return False
    # What does not have our form is a balancer's word: it has no server, or has just lost it.
    return error.kind in _COME_AGAIN if error.in_mesh_form else error.status in _BALANCER_STATUSES


def _why_not_connected(error: Http1Error) -> FailureKind:
    """Whether the peer or this process is what keeps a connection from being made."""
    cause = error.__cause__
    ours = isinstance(cause, OSError) and cause.errno in _LOCAL_ERRNOS
    return FailureKind.TRANSPORT_LOCAL_RESOURCE if ours else FailureKind.TRANSPORT_UNREACHABLE


def _cookies_set_by(reply: Http1Reply) -> dict[str, str]:
    """Names and values; what else a cookie says is for browsers."""
    pairs = (line.partition(";")[0].partition("=") for line in reply.cookie_lines)
    return {name.strip(): value.strip().strip('"') for name, _, value in pairs}
