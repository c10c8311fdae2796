"""A session that one process grades: claimed in the record, kept alive by writing it, ended by one last write."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from services.resources.entries import Entry
from services.resources.records import SessionRecord
from services.resources.sessions import Found, Sessions
from shared.errors import PaddockError

_log = logging.getLogger(__name__)

BEATS_PER_CLAIM: Final = 3


class Claim:
    """A claimed session. Its claim is kept alive by writing the record again, now and then."""

    def __init__(self, sessions: Sessions, entry: Entry, found: Found) -> None:
        self._sessions = sessions
        self._entry = entry
        self._found = found
        self._writing = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._beating: asyncio.Task[None] | None = None

    def keep_alive(self, every_s: float) -> None:
        """Beat until `put`. A timer first: most verifications end before the first beat and need no task."""
        self._timer = asyncio.get_running_loop().call_later(every_s, self._start_beating, every_s)

    def _start_beating(self, every_s: float) -> None:
        self._beating = asyncio.create_task(self._beat(every_s))

    async def _beat(self, every_s: float) -> None:
        while True:
            async with self._writing:
                record = self._found.record
                try:
                    changed = replace(record, beat=record.beat + 1)
                    self._found = await self._sessions.change(self._entry, self._found, changed)
                except PaddockError as error:
                    # The write that ends the verification meets the same and tells it.
                    self._sessions.metrics.lease_renew_failures.labels("resources").inc()
                    _log.warning("a verification's claim was not renewed: %s", error.message)
            await asyncio.sleep(every_s)

    async def put(self, changed: Callable[[SessionRecord], SessionRecord]) -> None:
        """End the claim with this change.

        Raises:
            VersionConflictError: the session was closed or taken over.
        """
        if self._timer is not None:
            self._timer.cancel()
        # With the lock no beat is being written, so that stopping it here leaves the version known.
        async with self._writing:
            if self._beating is not None:
                self._beating.cancel()
            self._found = await self._sessions.change(self._entry, self._found, changed(self._found.record))
