"""The one HTTP client for the hops between services and to upstreams.

Pooled, bounded, typed errors. A request is repeated only where nothing was sent (a refused connection),
or where the caller says that the peer joins or replays it by key (`replayable`): a server may close an
idle connection in the very moment in which it is used again.
"""

import asyncio
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import aiohttp

from shared.contracts.failure import FailureKind
from shared.deadline import Deadline
from shared.errors import TransportError
from shared.http import headers as names
from shared.http.problems import JSON_TYPE, read
from shared.telemetry import current_key, current_trace, new_traceparent

# Shorter than any server of ours keeps an idle connection open, so that we close first.
KEEP_ALIVE_S: Final = 15.0
CONNECT_TIMEOUT_S: Final = 5.0
ATTEMPTS: Final = 3
FIRST_PAUSE_S: Final = 0.05
IN_PIECES_FROM_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer. Header names are lower case; `cookies` are those that the peer set."""

    status: int
    headers: dict[str, str]
    cookies: dict[str, str]
    body: bytes


class HttpClient:
    """Calls services of the mesh; made once per process, closed by whoever made it."""

    def __init__(self, token: str | None = None, *, connections: int = 4096) -> None:
        self._token = token
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=KEEP_ALIVE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S),
                auto_decompress=True,
                max_line_size=65_536,
                max_field_size=65_536,
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

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
        self,
        method: str,
        url: str,
        service: str,
        body: bytes | None,
        headers: dict[str, str],
        deadline: Deadline,
    ) -> Reply:
        try:
            async with asyncio.timeout(deadline.within(deadline.left_s)):
                async with self._opened().request(
                    method, url, data=_payload(body), headers=headers, allow_redirects=False
                ) as response:
                    return Reply(
                        response.status,
                        {name.lower(): value for name, value in response.headers.items()},
                        {name: morsel.value for name, morsel in response.cookies.items()},
                        await response.read(),
                    )
        except aiohttp.ClientConnectorError as error:
            raise TransportError(
                f"{service} cannot be reached: {error.strerror or error}.",
                kind=FailureKind.TRANSPORT_UNREACHABLE,
                service=service,
                sent=False,
            ) from error
        except TimeoutError as error:
            raise TransportError(
                f"{service} did not answer in time.",
                kind=FailureKind.TRANSPORT_TIMEOUT,
                service=service,
                sent=True,
            ) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise TransportError(
                f"{service} dropped the connection: {str(error) or type(error).__name__}.",
                kind=FailureKind.TRANSPORT_PEER_DROP,
                service=service,
                sent=True,
            ) from error
        except OSError as error:
            raise TransportError(
                f"{service} cannot be called: {error}.",
                kind=FailureKind.TRANSPORT_LOCAL_RESOURCE,
                service=service,
                sent=False,
            ) from error


def _payload(body: bytes | None) -> bytes | io.BytesIO | None:
    """A large body is written in pieces, so that the loop goes on meanwhile."""
    return io.BytesIO(body) if body is not None and len(body) > IN_PIECES_FROM_BYTES else body
