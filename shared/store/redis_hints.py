"""Waiting for messages of the Redis store: one subscriber per process, for all who wait.

A message is only a hint that reading again may pay. Whoever waits is also rung after every subscription, so what
changed while there was none is seen; and reads once a second anyway, so a lost message costs a second. Imports no
client: how one subscribes is given from outside.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Final, Protocol

from shared.errors import StoreUnavailableError

FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 1.0
"""Pauses before subscribing again grow between these."""


class Subscription(Protocol):
    """One connection that subscribes. All calls raise `StoreUnavailableError` when it is lost."""

    async def subscribe(self, channels: Sequence[str]) -> None: ...

    async def unsubscribe(self, channels: Sequence[str]) -> None: ...

    def heard(self) -> AsyncIterator[tuple[str, str]]:
        """Kind (`subscribe`, `unsubscribe`, `message`) and channel of what comes."""

    async def close(self) -> None: ...


class Hints:
    """Hands out bells: events that are set when something may have changed on a channel."""

    def __init__(self, connect: Callable[[], Awaitable[Subscription]]) -> None:
        self._connect = connect
        self._bells: dict[str, set[asyncio.Event]] = {}
        self._confirmed: set[str] = set()
        self._wanted = asyncio.Event()
        self._pause_s = FIRST_PAUSE_S
        self._listener: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def watch(self, channel: str) -> Iterator[asyncio.Event]:
        """A bell that is rung at every hint on `channel`, and once its subscription stands."""
        bell = asyncio.Event()
        self._bells.setdefault(channel, set()).add(bell)
        if channel in self._confirmed:
            bell.set()
        self._wanted.set()
        if self._listener is None:
            self._listener = asyncio.create_task(self._listen_for_ever(), name="store hints")
        try:
            yield bell
        finally:
            bells = self._bells[channel]
            bells.discard(bell)
            if not bells:
                del self._bells[channel]
                self._wanted.set()

    async def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)

    async def _listen_for_ever(self) -> None:
        while True:
            with contextlib.suppress(StoreUnavailableError):
                await self._listen(await self._connect())
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    async def _listen(self, subscription: Subscription) -> None:
        """Until the connection is lost: one task says what is wanted, the other hears."""
        tasks = [asyncio.create_task(work(subscription)) for work in (self._subscribe, self._hear)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._confirmed.clear()
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            await subscription.close()
        for end in ends:
            if isinstance(end, Exception):
                raise end

    async def _subscribe(self, subscription: Subscription) -> None:
        asked: set[str] = set()
        while True:
            self._wanted.clear()
            wanted = set(self._bells)
            if new := wanted - asked:
                await subscription.subscribe(sorted(new))
            if old := asked - wanted:
                await subscription.unsubscribe(sorted(old))
            asked = wanted
            await self._wanted.wait()

    async def _hear(self, subscription: Subscription) -> None:
        async for kind, channel in subscription.heard():
            self._pause_s = FIRST_PAUSE_S
            if kind == "unsubscribe":
                self._confirmed.discard(channel)
                continue
            if kind == "subscribe":
                self._confirmed.add(channel)
            for bell in self._bells.get(channel, ()):
                bell.set()


async def rung(bell: asyncio.Event, timeout_s: float) -> None:
    """Wait for a hint, but not for long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, timeout_s)):
            await bell.wait()
    bell.clear()
