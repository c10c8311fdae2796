"""A lean HTTP/1.1 client for the hottest hops: one pool of kept connections, raw bytes, httptools' parser.

It sends whole bodies and reads answers whole or piece by piece. It never repeats a request: `Http1Error`
says whether the server may have seen it. It knows no redirects, cookies, proxies or expectations.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final, Self, cast
from urllib.parse import urlsplit

import httptools

from shared.http.http1_reply import Http1Error, Http1Reply

# Copying a larger body costs more than a second write.
_ONE_WRITE_MAX_BYTES: Final = 65_536


@dataclass(frozen=True, slots=True)
class Target:
    """Where a request goes: `head` is its first line and all headers that stay the same."""

    host: str
    port: int
    tls: bool
    head: bytes

    @classmethod
    def of(cls, method: str, url: str, headers: dict[str, str]) -> Self:
        """
        Raises:
            ValueError: a header or the address holds what HTTP/1.1 cannot carry.
        """
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        lines = [f"{method} {path} HTTP/1.1", f"host: {parts.netloc.rpartition('@')[2]}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join(lines)
        if head.count("\r") != len(lines) - 1 or head.count("\n") != len(lines) - 1 or " " in path:
            raise ValueError("a header or address holds a line end or a blank where none may be")
        return cls(parts.hostname or "", parts.port or (443 if tls else 80), tls, head.encode("latin-1"))

    def with_headers(self, headers: Mapping[str, str]) -> Self:
        """The same with headers of one request; the caller knows that they are proper ones."""
        lines = "".join(f"\r\n{name}: {value}" for name, value in headers.items())
        return type(self)(self.host, self.port, self.tls, self.head + lines.encode("latin-1"))


class Http1Client:
    """A pool of connections. Times are in seconds: `silence_s` bounds each wait for bytes, `total_s` the whole."""

    def __init__(self, *, connect_timeout_s: float, keep_alive_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._keep_alive_s = keep_alive_s
        self._idle: dict[tuple[str, int, bool], deque[_Connection]] = {}
        self._open: set[_Connection] = set()

    async def send(
        self, target: Target, body: bytes, *, silence_s: float, total_s: float, fresh: bool = False
    ) -> "Http1Reply":
        """Send and wait for status and headers; `fresh` asks for a new connection.

        Raises:
            Http1Error, Http1TimeoutError: see their docstrings.
        """
        connection = None if fresh else self._kept(target)
        if connection is None:
            connection = await self._connected(target)
        reply = connection.begin(target, body, silence_s, total_s)
        try:
            await reply.head()
        except BaseException:
            reply.close()
            raise
        return reply

    def close(self) -> None:
        """End all connections; idempotent."""
        for connection in [*self._open]:
            connection.end()
        self._idle.clear()

    def keep(self, connection: "_Connection") -> None:
        """The answer was read to its end: the connection may be used again."""
        connection.idle_since = connection.loop.time()
        self._idle.setdefault(connection.origin, deque()).append(connection)
        if connection.expiry is None:
            connection.expiry = connection.loop.call_later(self._keep_alive_s, self._expire, connection)

    def forget(self, connection: "_Connection") -> None:
        self._open.discard(connection)
        kept = self._idle.get(connection.origin)
        if kept is not None and connection in kept:
            kept.remove(connection)

    def _kept(self, target: Target) -> "_Connection | None":
        kept = self._idle.get((target.host, target.port, target.tls))
        # The newest first: it is the least likely to be closed by the server.
        return kept.pop() if kept else None

    async def _connected(self, target: Target) -> "_Connection":
        loop = asyncio.get_running_loop()
        context = _tls_context() if target.tls else None
        connection = _Connection(self, (target.host, target.port, target.tls), loop)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await loop.create_connection(lambda: connection, target.host, target.port, ssl=context)
        except TimeoutError as error:
            raise Http1Error("no connection in time", connected=False) from error
        except OSError as error:
            raise Http1Error(str(error) or type(error).__name__, connected=False) from error
        self._open.add(connection)
        return connection

    def _expire(self, connection: "_Connection") -> None:
        """One timer per connection: it looks when the connection was last used rather than being set anew."""
        connection.expiry = None
        if connection not in self._idle.get(connection.origin, ()):
            return
        left_s = connection.idle_since + self._keep_alive_s - connection.loop.time()
        if left_s > 0:
            connection.expiry = connection.loop.call_later(left_s, self._expire, connection)
        else:
            connection.end()


class _Connection(asyncio.Protocol):
    """One connection and the parser of what comes in. At most one reply at a time reads from it."""

    def __init__(self, client: Http1Client, origin: tuple[str, int, bool], loop: asyncio.AbstractEventLoop) -> None:
        self.origin = origin
        self.loop = loop
        self.idle_since = 0.0
        self.expiry: asyncio.TimerHandle | None = None
        self.transport: asyncio.Transport | None = None
        self._client = client
        self._parser = httptools.HttpResponseParser(self)
        self._reply: Http1Reply | None = None
        self._used = False
        self._stray = False

    def begin(self, target: Target, body: bytes, silence_s: float, total_s: float) -> "Http1Reply":
        self._reply = reply = Http1Reply(self, self._used, silence_s, total_s)
        self._used = True
        assert self.transport is not None
        head = b"%b\r\ncontent-length: %d\r\n\r\n" % (target.head, len(body))
        if len(body) <= _ONE_WRITE_MAX_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))
        return reply

    def end(self) -> None:
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None
        self._client.forget(self)
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's own class has the same methods.
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._reply is None:
            # Nobody asked for anything.
            self.end()
            return
        self._reply.touch()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._reply is not None:
                self._reply.fail(Http1Error(f"the answer is no proper HTTP: {error.__context__ or error}"))
            self.end()
        if self._stray:
            self.end()

    def connection_lost(self, error: Exception | None) -> None:
        self._client.forget(self)
        if self.expiry is not None:
            self.expiry.cancel()
        if self._reply is not None:
            self._reply.lost(error)
            self._reply = None

    def on_message_begin(self) -> None:
        # A second answer: whatever it is, it must not be taken for that of the next request.
        self._stray = self._reply is None

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reply is not None:
            self._reply.take_header(name, value)

    def on_headers_complete(self) -> None:
        if self._reply is not None and (status := self._parser.get_status_code()) >= 200:
            self._reply.take_head(status)

    def on_body(self, data: bytes) -> None:
        if self._reply is not None:
            self._reply.take_body(data)

    def on_message_complete(self) -> None:
        reply = self._reply
        if reply is None or reply.status == 0:
            # An interim answer (1xx): the real one follows.
            if reply is not None:
                reply.headers.clear()
            return
        self._reply = None
        reply.complete()
        assert self.transport is not None
        if self._parser.should_keep_alive() and not self.transport.get_write_buffer_size():
            self._client.keep(self)
        else:
            self.end()


@cache
def _tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()
