"""Words between the replicas of this service: which episodes are to be cancelled, which wait for a new server.

A word only makes things quicker or reaches whoever runs an episode; what must hold is in the episode's own keys.
All words stand in one record, the newest last, so that one watch per process hears every one.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import orjson

from shared.errors import StoreUnavailableError, VersionConflictError
from shared.ports.store import Record, Store

NEWS: Final = "environment:news"
KEPT: Final = 1024
"""Words that stand in the record; more than this at once would push out some that were not heard."""
TTL_S: Final = 3600.0
WATCH_S: Final = 30.0
PAUSE_S: Final = 1.0

What = Literal["cancelled", "orphaned"]


@dataclass(frozen=True, slots=True)
class Word:
    number: int
    what: What
    key: str


class News:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def tell(self, what: What, keys: Sequence[str]) -> None:
        """Add words; other replicas hear them at once.

        Raises:
            StoreUnavailableError: they were perhaps not added.
        """
        while True:
            found = await self._store.get(NEWS)
            words = _words(found)
            last = words[-1].number if words else 0
            words += [Word(last + number, what, key) for number, key in enumerate(keys, 1)]
            value = orjson.dumps([[word.number, word.what, word.key] for word in words[-KEPT:]])
            try:
                if found is not None:
                    await self._store.replace(NEWS, value, version=found.version, ttl_s=TTL_S)
                    return
                if await self._store.create(NEWS, value, ttl_s=TTL_S) is not None:
                    return
            except VersionConflictError:
                continue

    async def hear(self, heard: Callable[[Word], None]) -> None:
        """Hand on every word from now on, for ever, in order."""
        version, last = -1, None
        while True:
            try:
                found = await self._store.wait_for_change(NEWS, version=version, timeout_s=WATCH_S)
            except StoreUnavailableError:
                await asyncio.sleep(PAUSE_S)
                continue
            words = _words(found)
            newest = words[-1].number if words else 0
            if last is None or newest < last:
                # The first look, or a store that lost some: what stands there may be old, which does no harm.
                last = 0
            for word in words:
                if word.number > last:
                    heard(word)
            version, last = found.version if found is not None else 0, newest


def _words(found: Record | None) -> list[Word]:
    if found is None:
        return []
    values: list[list[Any]] = orjson.loads(found.value)
    return [Word(*value) for value in values]
