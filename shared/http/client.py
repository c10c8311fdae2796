"""The one HTTP client for the hops between services.

Pooled, bounded, typed errors. A request is repeated only where nothing was sent (a refused connection),
or where the caller says that the peer joins or replays it by key (`replayable`): a server may close an
idle connection in the very moment in which it is used again.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shared.contracts.failure import FailureKind
from shared.deadline import Deadline
from shared.errors import TransportError
from shared.http import headers as names
from shared.http.problems import JSON_TYPE, read
from shared.http.wire import BrokenConnectionError, NotConnectedError, RawReply, Wire
from shared.telemetry import current_key, current_trace, new_traceparent

# Shorter than any server of ours keeps an idle connection open, so that we close first.
KEEP_ALIVE_S: Final = 15.0
CONNECT_TIMEOUT_S: Final = 5.0
ATTEMPTS: Final = 3
FIRST_PAUSE_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer. Header names are lower case; `cookies` are those that the peer set."""

    status: int
    headers: dict[str, str]
    cookies: dict[str, str]
    body: bytes


class HttpClient:
    """Calls services of the mesh; made once per process, closed by whoever made it."""

    def __init__(self, token: str | None = None) -> None:
        self._token = token
        self._wire = Wire(keep_alive_s=KEEP_ALIVE_S, connect_timeout_s=CONNECT_TIMEOUT_S)

    async def close(self) -> None:
        await self._wire.close()

    async def request(
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
    ) -> Reply:
        """Send and read the whole answer within `timeout_s`, repeats included.

        Raises:
            ServiceError: the peer answered with an error status.
            TransportError: it could not be reached, dropped the connection, or did not answer in time.
        """
        deadline = Deadline.after(timeout_s)
        sent_headers = self._headers(headers, cookies, body is not None, deadline)
        pause_s = FIRST_PAUSE_S
        for attempt in range(1, ATTEMPTS + 1):
            try:
                reply = await self._once(method, url, service, body, sent_headers, deadline)
            except TransportError as error:
                again = replayable or not error.sent
                timed_out = error.kind is FailureKind.TRANSPORT_TIMEOUT
                if not again or timed_out or attempt == ATTEMPTS or deadline.left_s <= pause_s:
                    raise
                await asyncio.sleep(pause_s)
                pause_s *= 4
                continue
            if reply.status >= 400:
                raise read(reply.status, reply.headers, reply.body, service=service)
            return reply
        raise AssertionError("the last attempt returns or raises")

    def _headers(
        self,
        given: Mapping[str, str] | None,
        cookies: Mapping[str, str] | None,
        has_body: bool,
        deadline: Deadline,
    ) -> dict[str, str]:
        sent = {
            names.TRACEPARENT: new_traceparent(current_trace.get()),
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
        try:
            async with asyncio.timeout(deadline.within(deadline.left_s)):
                reply = await self._wire.request(method, url, headers, body)
        except NotConnectedError as error:
            raise TransportError(
                f"{service} cannot be reached: {error}.",
                kind=FailureKind.TRANSPORT_UNREACHABLE,
                service=service,
                sent=False,
            ) from error
        except TimeoutError as error:
            raise TransportError(
                f"{service} did not answer in time.", kind=FailureKind.TRANSPORT_TIMEOUT, service=service, sent=True
            ) from error
        except BrokenConnectionError as error:
            raise TransportError(
                f"{service} dropped the connection: {error}.",
                kind=FailureKind.TRANSPORT_PEER_DROP,
                service=service,
                sent=True,
            ) from error
        return Reply(reply.status, reply.headers, _cookies_set_by(reply), reply.body)


def _cookies_set_by(reply: RawReply) -> dict[str, str]:
    """Names and values; what else a cookie says is for browsers."""
    if "set-cookie" not in reply.headers:
        return {}
    lines = [reply.headers["set-cookie"], *(value for name, value in reply.repeated if name == "set-cookie")]
    pairs = (line.partition(";")[0].partition("=") for line in lines)
    return {name.strip(): value.strip().strip('"') for name, _, value in pairs}
