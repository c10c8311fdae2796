"""Takes over the episodes that another server left behind, because it died, froze or was stopped.

An episode without a live lease on its record belongs to whoever claims it next. It is continued from the stage
in its record; the claim's fence keeps the earlier owner from writing, should it wake up.
"""

import asyncio
import logging
import random
from collections import deque
from contextlib import suppress
from typing import Final

from services.environment.budgets import record_ttl_s
from services.environment.ending import Ending
from services.environment.news import News, Word
from services.environment.page import DONE, OPEN, Page, cancel_key, episode_key, row_key
from services.environment.record import EpisodeRecord, decoded
from services.environment.rows import Row
from services.environment.runner import Runner
from services.environment.told import Told, cancelled_by_client
from shared.errors import FencedError, PaddockError, StoreUnavailableError
from shared.http.service import Mesh
from shared.ports.store import Lease, Record, Store

_log = logging.getLogger(__name__)

REMEMBERED_WORDS: Final = 1024


class Reaper:
    """One per process: looks through the open episodes now and then, and at once when another server says so."""

    def __init__(self, mesh: Mesh, store: Store, runner: Runner, ending: Ending, news: News) -> None:
        self._mesh = mesh
        self._store = store
        self._runner = runner
        self._ending = ending
        self._news = news
        self._lease_s = mesh.settings.store.lease_s
        self._cancelled: deque[str] = deque(maxlen=REMEMBERED_WORDS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._owners = 0

    def start(self) -> None:
        self._spawn(self._look_for_ever())
        self._spawn(self._news.hear(self._heard))

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def new_owner(self) -> str:
        """A fresh name for each claim, so that a claim of this very process is seen as taken, too."""
        self._owners += 1
        return f"{self._mesh.instance}.{self._owners}"

    def was_cancelled(self, key: str) -> bool:
        """Whether another server said so: it may have done so before this one had the episode."""
        return key in self._cancelled

    def page(self, record: EpisodeRecord, stored: Record, lease: Lease) -> Page:
        ttl_s = record_ttl_s(self._mesh.settings, record.environment)
        return Page(self._store, record, stored.version, lease, ttl_s=ttl_s, lease_s=self._lease_s)

    async def take_over(self, record: EpisodeRecord, found: Record, lease: Lease, row: Row) -> None:
        """Continue an episode under a lease that was just claimed; does nothing when another server was quicker."""
        key = record.key
        page = self.page(record.taken_over_by(lease.owner), found, lease)
        try:
            await page.turn(page.record)
            told = Told.continued(record.stage, record.body, page.record.takeovers)
            if await self._store.get(cancel_key(key)) is not None:
                told.failure = told.failure or cancelled_by_client()
        except (FencedError, StoreUnavailableError) as error:
            _log.warning("the episode '%s' was not taken over: %s", key, error.message)
            return
        self._mesh.metrics.taken_over.labels("environment").inc()
        _log.info("takes an episode over", extra={"key": key, "stage": record.stage})
        self._runner.launch(row, page, told)

    async def _look_for_ever(self) -> None:
        passes = self._mesh.metrics.reaper_passes
        while True:
            try:
                for key in await self._store.members(OPEN):
                    if self._runner.running(key) is None:
                        await self._examine(key)
                passes.labels("environment", "ok").inc()
            except StoreUnavailableError as error:
                passes.labels("environment", "failed").inc()
                _log.warning("cannot look for episodes that were left behind: %s", error.message)
            # Replicas that start together need not look together.
            await asyncio.sleep(self._lease_s / 3 * random.uniform(0.5, 1.0))

    async def _examine(self, key: str) -> None:
        """Continue the episode if nobody has it."""
        lease = await self._store.acquire(episode_key(key), self.new_owner(), ttl_s=self._lease_s)
        if lease is None:
            return
        found, row = await asyncio.gather(self._store.get(episode_key(key)), self._store.get(row_key(key)))
        record = None if found is None else decoded(found.value)
        if found is not None and record is not None and not record.ended:
            if row is not None:
                await self.take_over(record, found, lease, Row.decoded(row.value))
                return
            await self._refuse(record, found, lease)
        else:
            await asyncio.gather(self._store.remove_member(OPEN, key), self._store.delete(row_key(key)))
            if record is not None and record.state == "done":
                await self._store.add_member(DONE, key, ttl_s=self._mesh.settings.result_ttl_s)
        await self._store.release(lease)

    async def _refuse(self, record: EpisodeRecord, found: Record, lease: Lease) -> None:
        """Without its row an episode can only be sent again."""
        lost = StoreUnavailableError(
            f"The store lost the row of the episode '{record.key}'; send the row again.", retry_after_s=1.0
        )
        page = self.page(record.taken_over_by(lease.owner), found, lease)
        with suppress(FencedError):
            await page.turn(page.record)
            await self._ending.refuse(page, record.stage, lost)

    def _heard(self, word: Word) -> None:
        running = self._runner.running(word.key)
        if word.what == "cancelled":
            self._cancelled.append(word.key)
            if running is not None:
                running.cancel(cancelled_by_client())
        elif running is None:
            self._spawn(self._examine_soon(word.key))

    async def _examine_soon(self, key: str) -> None:
        """All replicas hear of it at once; a random pause spreads what one of them leaves behind over the others."""
        await asyncio.sleep(random.uniform(0.0, 0.1))
        try:
            await self._examine(key)
        except PaddockError as error:
            _log.warning("the episode '%s' was not taken over: %s", key, error.message)

    def _spawn(self, work: "asyncio._CoroutineLike[None]") -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
