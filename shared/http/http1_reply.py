"""An answer of the lean HTTP/1.1 client while it arrives: its bytes, its bounds in time and memory, its end."""

import asyncio
import zlib
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

HEAD_MAX_BYTES: Final = 65_536
# More than this unread, and the server has to wait.
BUFFER_MAX_BYTES: Final = 2**18
# Either form of deflate, and gzip, told apart by their headers.
_ANY_WINDOW: Final = zlib.MAX_WBITS | 32
_PLAIN_ENCODINGS: Final = frozenset({"", "identity"})
_DEFLATED_ENCODINGS: Final = frozenset({"gzip", "x-gzip", "deflate"})


class Http1Error(Exception):
    """No answer, or not the whole of one.

    `connected`: false when no connection came about, so that nothing was sent. `stale`: the connection had
    been used before and ended before the first byte of an answer, which is what happens when a server
    closes an idle connection in the very moment in which it is used again.
    """

    def __init__(self, message: str, *, connected: bool = True, stale: bool = False) -> None:
        super().__init__(message)
        self.connected = connected
        self.stale = stale


class Http1TimeoutError(Http1Error):
    """Nothing came for too long, or the whole took too long."""


class Connection(Protocol):
    """What a reply needs of its connection."""

    transport: asyncio.Transport | None

    def end(self) -> None:
        """Close it at once; idempotent."""


class Http1Reply:
    """An answer on its way. Read it with `read`, or piece by piece with `next_piece` until that is empty."""

    def __init__(self, connection: Connection, reused: bool, silence_s: float, total_s: float) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.cookie_lines: list[str] = []
        self._connection: Connection | None = connection
        self._loop = asyncio.get_running_loop()
        self._reused = reused
        self._seen = False
        self._whole = False
        self._paused = False
        self._error: Http1Error | None = None
        self._head_bytes = 0
        self._pieces: list[bytes] = []
        self._buffered = 0
        self._inflate: Callable[[bytes], bytes] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._last = now = self._loop.time()
        self._silence_s = silence_s
        self._end = now + total_s
        self._timer = self._loop.call_at(min(now + silence_s, self._end), self._check)

    def head(self) -> Awaitable[None]:
        return self._until(lambda: self.status != 0)

    async def read(self) -> bytes:
        """The rest of the body.

        Raises:
            Http1Error, Http1TimeoutError: see their docstrings.
        """
        pieces = []
        while piece := await self.next_piece():
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def next_piece(self) -> bytes:
        """What has come since the last call, at least one byte; empty at the end. Raises as `read`."""
        if not self._pieces:
            await self._until(lambda: bool(self._pieces) or self._whole)
        piece = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._buffered = 0
        self._pause(False)
        return piece

    def close(self) -> None:
        """Give it up: a connection whose answer was not read to its end is closed. Idempotent."""
        self._timer.cancel()
        connection, self._connection = self._connection, None
        if connection is not None and not self._whole:
            connection.end()

    async def _until(self, met: Callable[[], bool]) -> None:
        while not met():
            if self._error is not None:
                raise self._error
            self._waiter = self._loop.create_future()
            await self._waiter

    def touch(self) -> None:
        self._seen = True
        self._last = self._loop.time()

    def take_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > HEAD_MAX_BYTES:
            raise ValueError(f"its headers are larger than {HEAD_MAX_BYTES // 1024} KiB")
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        if key == "set-cookie":
            self.cookie_lines.append(text)
        self.headers[key] = text

    def take_head(self, status: int) -> None:
        encoding = self.headers.get("content-encoding", "").lower()
        if encoding in _DEFLATED_ENCODINGS:
            self._inflate = zlib.decompressobj(_ANY_WINDOW).decompress
        elif encoding not in _PLAIN_ENCODINGS:
            raise ValueError(f"its content encoding is {encoding!r}, and plain bytes were asked for")
        self.status = status
        self._wake()

    def take_body(self, data: bytes) -> None:
        if self._inflate is not None:
            data = self._inflate(data)
        if data:
            self._pieces.append(data)
            self._buffered += len(data)
            self._pause(self._buffered > BUFFER_MAX_BYTES)
            self._wake()

    def complete(self) -> None:
        self._pause(False)
        self._whole = True
        self._timer.cancel()
        self._wake()

    def fail(self, error: Http1Error) -> None:
        if self._error is None and not self._whole:
            self._error = error
            self._timer.cancel()
            self._wake()

    def lost(self, error: Exception | None) -> None:
        """The connection ended: without a length of its own, that is how a body ends."""
        unbounded = not {"content-length", "transfer-encoding"} & self.headers.keys()
        if self.status and unbounded and error is None:
            self.complete()
        else:
            told = str(error) if error is not None else "the connection was closed"
            self.fail(Http1Error(told, stale=self._reused and not self._seen))

    def _pause(self, paused: bool) -> None:
        if paused != self._paused and self._connection is not None and self._connection.transport is not None:
            self._paused = paused
            if paused:
                self._connection.transport.pause_reading()
            else:
                # The server was kept waiting; its silence counts from now.
                self._last = self._loop.time()
                self._connection.transport.resume_reading()

    def _check(self) -> None:
        now = self._loop.time()
        # A server that we keep waiting is not silent.
        at = min((now if self._paused else self._last) + self._silence_s, self._end)
        if at > now:
            self._timer = self._loop.call_at(at, self._check)
            return
        self.fail(Http1TimeoutError("no byte came in time" if at < self._end else "the whole took too long"))
        if self._connection is not None:
            self._connection.end()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
