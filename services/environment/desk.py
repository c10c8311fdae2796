"""What clients ask of episodes: start or join one, wait for it, cancel it, list them. All state is in the store."""

import asyncio
import heapq
import time
from contextlib import suppress
from typing import Final
from uuid import uuid4

from services.environment.budgets import record_ttl_s
from services.environment.news import News
from services.environment.page import DONE, OPEN, cancel_key, episode_key, open_episode, promise_key
from services.environment.reaper import Reaper
from services.environment.record import EpisodeRecord, decoded
from services.environment.rows import Row
from services.environment.runner import Runner
from services.environment.told import Told, cancelled_by_client
from shared.contracts.failure import Stage
from shared.errors import (
    ConflictError,
    NotFoundError,
    StoreUnavailableError,
    VersionConflictError,
)
from shared.http.service import Mesh
from shared.ports.store import Lease, Record, Store
from shared.tracing import trace_text

# Waiters look this often whether the server is draining.
TICK_S: Final = 1.0
# A server that stops waits so long for a store that is away.
TELL_WITHIN_S: Final = 1.0


class Desk:
    """One per process."""

    def __init__(self, mesh: Mesh, store: Store, runner: Runner, reaper: Reaper, news: News) -> None:
        self._mesh = mesh
        self._store = store
        self._runner = runner
        self._reaper = reaper
        self._news = news

    async def start(self, row: Row) -> bool:
        """Start the episode, or join the one that has this id; True when this request started it.

        Raises:
            ConflictError: the id belongs to another request.
        """
        key, owner = row.episode_id.key, self._reaper.new_owner()
        if self._runner.running(key) is not None:
            return await self._join(row)
        record = self._fresh(row, owner)
        ttl_s = record_ttl_s(self._mesh.settings, row.environment)
        lease, stored = await asyncio.gather(
            self._store.acquire(episode_key(key), owner, ttl_s=self._mesh.settings.store.lease_s),
            self._store.create(episode_key(key), record.encoded(), ttl_s=ttl_s),
        )
        if stored is None:
            return await self._join_or_claim(row, record, lease)
        await self._open(row)
        if lease is not None:
            self._launch(row, record, stored, lease)
        return True

    async def _open(self, row: Row) -> None:
        await open_episode(self._store, row, ttl_s=record_ttl_s(self._mesh.settings, row.environment))

    def _fresh(self, row: Row, owner: str) -> EpisodeRecord:
        limited = self._mesh.settings.environments[row.environment].max_concurrent is not None
        now = time.time()
        return EpisodeRecord(
            key=row.episode_id.key,
            content_hash=row.content_hash,
            environment=row.environment,
            state="queued" if limited else "running",
            stage=Stage.ADMISSION if limited else Stage.SEED,
            owner=owner,
            agent_session_id=f"agent-session-{uuid4().hex}",
            resources_session_id=f"resources-session-{uuid4().hex}",
            started_at=now,
            admitted_at=0.0 if limited else now,
            trace=trace_text(),
        )

    def _launch(self, row: Row, record: EpisodeRecord, stored: Record, lease: Lease) -> None:
        """Run an episode that other servers can find."""
        told = Told()
        if self._reaper.was_cancelled(record.key):
            told.failure = cancelled_by_client()
        page = self._reaper.page(record, stored, lease)
        self._runner.launch(row, page, told)

    async def _join(self, row: Row) -> bool:
        found = await self._store.get(episode_key(row.episode_id.key))
        if found is not None:
            _require_same(decoded(found.value), row)
        return False

    async def _join_or_claim(self, row: Row, record: EpisodeRecord, lease: Lease | None) -> bool:
        """There is such an episode: one that runs or has ended is joined, one without a server is taken over.

        A refusal makes place for a new start.
        """
        found = await self._store.get(episode_key(record.key))
        if found is None:
            return await self.start(row)  # it expired in between
        other = decoded(found.value)
        try:
            if other.state == "refused" and lease is not None:
                ttl_s = record_ttl_s(self._mesh.settings, row.environment)
                stored = await self._store.replace(
                    episode_key(record.key), record.encoded(), version=found.version, ttl_s=ttl_s
                )
                await self._open(row)
                self._launch(row, record, stored, lease)
                return True
            _require_same(other, row)
            if not other.ended:
                # Whoever began it may have died before others could find it.
                await self._open(row)
                if lease is not None:
                    await self._reaper.take_over(other, found, lease, row)
                    lease = None
        except VersionConflictError:
            return await self.start(row)
        finally:
            if lease is not None and self._runner.running(record.key) is None:
                await self._store.release(lease)
        return False

    async def wait(self, key: str, longest_s: float) -> EpisodeRecord:
        """The record once the episode has ended, or as it is when the time is over or the server drains.

        Raises:
            NotFoundError: there is no such episode.
        """
        end = time.monotonic() + longest_s
        version = -1
        while True:
            left_s = max(0.0, min(TICK_S, end - time.monotonic()))
            running = self._runner.running(key)
            if running is not None and left_s > 0:
                # It runs here: its end is all that matters, not each stage on the way.
                await asyncio.wait((running.task,), timeout=left_s)
                left_s = 0.0
            stored = await self._store.wait_for_change(episode_key(key), version=version, timeout_s=left_s)
            if stored is None:
                if running is not None:
                    continue  # the store lost it, and will be told of it anew
                raise NotFoundError(f"There is no episode '{key}'.")
            record = decoded(stored.value)
            if record.ended or time.monotonic() >= end or self._mesh.draining.is_set():
                return record
            version = stored.version

    async def next_change(self, record: EpisodeRecord) -> EpisodeRecord:
        """The record when it has changed, or as it is after a tick.

        Raises:
            NotFoundError: it is gone.
        """
        stored = await self._store.get(episode_key(record.key))
        if stored is not None and decoded(stored.value) == record:
            stored = await self._store.wait_for_change(
                episode_key(record.key), version=stored.version, timeout_s=TICK_S
            )
        if stored is None:
            raise NotFoundError(f"There is no episode '{record.key}'.")
        return decoded(stored.value)

    async def promise(self, key: str) -> None:
        """Someone was told that the episode goes on: it may not end as a refusal any more."""
        await self._store.create(promise_key(key), b"1", ttl_s=self._mesh.settings.result_ttl_s)

    async def cancel(self, key: str) -> EpisodeRecord:
        """Cancel an episode, whichever server runs it: cleanup runs, nothing is verified.

        Raises:
            NotFoundError: there is no such episode.
            ConflictError: it has ended.
        """
        record = await self.wait(key, 0.0)
        if record.ended:
            raise ConflictError(f"The episode '{key}' has ended; its outcome stands.")
        await self._store.create(cancel_key(key), b"1", ttl_s=self._mesh.settings.result_ttl_s)
        running = self._runner.running(key)
        if running is not None:
            running.cancel(cancelled_by_client())
        else:
            await self._news.tell("cancelled", [key])
        return record

    async def list(self, state: str | None, limit: int, after: str) -> list[EpisodeRecord]:
        """Episodes in the order of their keys, beginning after `after`."""
        indexes = [DONE] if state == "done" else [OPEN] if state is not None else [OPEN, DONE]
        keys = {key for index in indexes for key in await self._store.members(index) if key > after}
        found: list[EpisodeRecord] = []
        for key in heapq.nsmallest(len(keys), keys):
            stored = await self._store.get(episode_key(key))
            record = None if stored is None else decoded(stored.value)
            if record is not None and state in {None, record.state}:
                found.append(record)
            if len(found) == limit:
                break
        return found

    async def close(self) -> None:
        """Stop what runs here; what another server can continue is told to the others at once.

        Where the store is away they are not told, and find it when its claims have run out.
        """
        await self._reaper.close()
        if handed_over := await self._runner.close():
            with suppress(StoreUnavailableError, TimeoutError):
                async with asyncio.timeout(TELL_WITHIN_S):
                    await self._news.tell("orphaned", handed_over)


def _require_same(other: EpisodeRecord, row: Row) -> None:
    if other.content_hash != row.content_hash:
        raise ConflictError(
            f"The episode '{other.key}' was started with another request; send a new rollout id or attempt."
        )
