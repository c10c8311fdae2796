"""The model calls that this process has under way: a seal, by whichever replica, ends those of an episode.

A seal reaches this process in two ways: by its own route, or by the store, where calls that last long are
watched for it. The store is not asked for short ones: the seal waits for them longer than they are unwatched.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from services.model_proxy.access import Caller
from services.model_proxy.client_watch import ClientWatch
from services.model_proxy.failures import sealed
from shared.errors import StoreUnavailableError

_log = logging.getLogger(__name__)

STOP_WITHIN_S: Final = 2.0
# Well below the time that a seal waits for calls elsewhere.
_UNWATCHED_S: Final = 0.5
_WATCH_S: Final = 60.0
_RETRY_S: Final = 1.0

SealedWithin = Callable[[str, float], Awaitable[bool]]


@dataclass(slots=True)
class _Episode:
    """The agent's calls under one key; `timer` and `watching` look for its seal."""

    timer: asyncio.TimerHandle
    calls: set[ClientWatch] = field(default_factory=set)
    watching: asyncio.Task[None] | None = None

    def stop_watching(self) -> None:
        self.timer.cancel()
        if self.watching is not None:
            self.watching.cancel()


class UnderWay:
    """A call is under way from before its begin is written down until its last bytes are out.

    `sealed_within(key, timeout_s)` waits for a key's seal.
    """

    def __init__(self, sealed_within: SealedWithin) -> None:
        self._sealed_within = sealed_within
        self._calls: set[ClientWatch] = set()
        self._episodes: dict[str, _Episode] = {}
        self._none_left = asyncio.Event()

    def enter(self, caller: Caller, watch: ClientWatch) -> None:
        self._calls.add(watch)
        self._none_left.clear()
        if caller.phase != "agent":
            return
        episode = self._episodes.get(caller.key)
        if episode is None:
            timer = asyncio.get_running_loop().call_later(_UNWATCHED_S, self._watch, caller.key)
            episode = self._episodes[caller.key] = _Episode(timer)
        episode.calls.add(watch)

    def leave(self, caller: Caller, watch: ClientWatch) -> None:
        self._calls.discard(watch)
        if not self._calls:
            self._none_left.set()
        episode = self._episodes.get(caller.key)
        if episode is None:
            return
        episode.calls.discard(watch)
        if not episode.calls:
            episode.stop_watching()
            del self._episodes[caller.key]

    def cut(self, key: str) -> None:
        """End the episode's calls, not the mesh's own; they record themselves."""
        episode = self._episodes.get(key)
        for watch in episode.calls if episode is not None else ():
            watch.cut(sealed(key))

    async def ended(self) -> None:
        """Wait, for a bounded time, until there are none: the process is about to stop."""
        if not self._calls:
            return
        try:
            async with asyncio.timeout(STOP_WITHIN_S):
                await self._none_left.wait()
        except TimeoutError:
            _log.warning("model calls did not end in time", extra={"count": len(self._calls)})

    def _watch(self, key: str) -> None:
        self._episodes[key].watching = asyncio.create_task(self._cut_when_sealed(key), name=f"seal of {key}")

    async def _cut_when_sealed(self, key: str) -> None:
        while True:
            try:
                if await self._sealed_within(key, _WATCH_S):
                    self.cut(key)
                    return
            except StoreUnavailableError:
                await asyncio.sleep(_RETRY_S)
