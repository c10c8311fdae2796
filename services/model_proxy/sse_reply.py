"""A streamed answer on its way to the caller: the status goes out with the first bytes, silence is filled.

Nothing is compressed and nothing buffered, here or by proxies on the way.
"""

import asyncio
from collections.abc import Callable, Mapping

from starlette.types import Send

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class SseReply:
    def __init__(self, send: Send) -> None:
        self.committed = False
        self._send = send
        self._headers: list[tuple[bytes, bytes]] = []
        self._lock = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._last = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._beat: asyncio.Task[None] | None = None

    def open(self, headers: Mapping[str, str], heartbeat: Callable[[], bytes], period_s: float) -> None:
        """The upstream has accepted the call: from now on, `period_s` of silence is answered with `heartbeat()`."""
        self._headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        self._last = self._loop.time()
        self._timer = self._loop.call_later(period_s, self._check, heartbeat, period_s)

    async def write(self, data: bytes, *, more: bool = True) -> None:
        if not data and more:
            return
        async with self._lock:
            await self._put(data, more)

    def stop_heartbeats(self) -> None:
        """No heartbeat starts after this; one under way is a whole event and ends before the next `write`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _put(self, data: bytes, more: bool) -> None:
        if not self.committed:
            self.committed = True
            headers = [*_STREAM_HEADERS, *self._headers]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._last = self._loop.time()

    def _check(self, heartbeat: Callable[[], bytes], period_s: float) -> None:
        left_s = self._last + period_s - self._loop.time()
        if left_s <= 0:
            self._beat = self._loop.create_task(self._fill(heartbeat, period_s))
            left_s = period_s
        self._timer = self._loop.call_later(left_s, self._check, heartbeat, period_s)

    async def _fill(self, heartbeat: Callable[[], bytes], period_s: float) -> None:
        """The heartbeat is made under the lock: its number must be the next one that goes out."""
        async with self._lock:
            if self._timer is not None and self._last + period_s <= self._loop.time():
                await self._put(heartbeat(), more=True)
