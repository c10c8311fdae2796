"""Starts, joins, replays and cancels episodes. All that matters is in the store; here is only what runs now."""

import asyncio
import logging
import time
from collections.abc import Mapping
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Final
from uuid import uuid4

from services.environment.admission import Admission
from services.environment.episode import Parties, Sessions, cancelled_by_shutdown, run_episode
from services.environment.page import Page, episode_key, promise_key
from services.environment.record import EpisodeRecord, decoded
from services.environment.reply import failure_of, reply_of
from services.environment.rows import Row
from services.environment.told import Told
from shared.cleanup import shielded
from shared.contracts.failure import FailureKind, Stage
from shared.errors import (
    BadRowError,
    CancelledEpisodeError,
    ConflictError,
    FencedError,
    NotFoundError,
    OverloadedError,
    PaddockError,
    ServiceError,
    VersionConflictError,
)
from shared.http.problems import render
from shared.http.service import Mesh
from shared.ports.store import Lease, Record, Store
from shared.store.leases import LEASE_S, LeaseKeeper
from shared.telemetry import current_key

_log = logging.getLogger(__name__)

INDEX: Final = "episodes"
# How long an error answer stands for those who wait for it; then the id is free again.
REFUSAL_TTL_S: Final = 10.0
# Waiters look this often whether the server is draining.
TICK_S: Final = 1.0
# Of the grace: how long episodes that still run may take for their cleanup. Peers may be stopping, too.
CLOSE_SHARE: Final = 0.5


@dataclass(slots=True)
class _Running:
    task: asyncio.Task[None]
    told: Told
    cancelled: bool = False

    def cancel(self, why: PaddockError) -> None:
        """Once only: a second cancellation would interrupt the cleanup."""
        if not self.cancelled:
            self.cancelled = True
            self.told.failure = why
            self.task.cancel()


class Desk:
    """One per process."""

    def __init__(self, mesh: Mesh, store: Store, parties: Mapping[str, Parties]) -> None:
        self._mesh = mesh
        self._store = store
        self._parties = parties
        self._keeper = LeaseKeeper(store)
        self._admission = Admission(store, self._keeper)
        self._running: dict[str, _Running] = {}

    async def start(self, row: Row) -> None:
        """Start the episode, or join the one that has this id.

        Raises:
            ConflictError: the id belongs to another request.
        """
        key = row.episode_id.key
        record = EpisodeRecord(
            key=key,
            content_hash=row.content_hash,
            environment=row.environment,
            state="queued",
            stage=Stage.ADMISSION,
            agent_session_id=f"agent-session-{uuid4().hex}",
            resources_session_id=f"resources-session-{uuid4().hex}",
            started_at=time.time(),
        )
        ttl_s = self._ttl_s(row)
        stored = await self._store.create(episode_key(key), record.encoded(), ttl_s=ttl_s)
        if stored is None:
            stored = await self._join(record, ttl_s)
        if stored is not None:
            await self._store.add_member(INDEX, key, ttl_s=ttl_s)
            self._launch(row, record, stored)

    async def _join(self, record: EpisodeRecord, ttl_s: float) -> Record | None:
        """None when an episode of this id runs or has ended; a new version when a refusal made place for it."""
        found = await self._store.get(episode_key(record.key))
        if found is None:
            return await self._store.create(episode_key(record.key), record.encoded(), ttl_s=ttl_s)
        other = decoded(found.value)
        if other.state == "refused":
            return await self._store.replace(
                episode_key(record.key), record.encoded(), version=found.version, ttl_s=ttl_s
            )
        if other.content_hash != record.content_hash:
            raise ConflictError(
                f"The episode '{record.key}' was started with another request; send a new rollout id or attempt."
            )
        return None

    def _launch(self, row: Row, record: EpisodeRecord, stored: Record) -> None:
        context = copy_context()
        context.run(current_key.set, record.key)
        told = Told()
        task = asyncio.create_task(self._run(row, record, stored, told), name=f"episode {record.key}", context=context)
        self._running[record.key] = _Running(task, told)
        task.add_done_callback(lambda _: self._running.pop(record.key, None))

    async def _run(self, row: Row, record: EpisodeRecord, stored: Record, told: Told) -> None:
        """From admission to the stored answer; the place is given up only after the cleanup."""
        page = Page(self._store, record, stored, self._ttl_s(row))
        place: Lease | None = None
        gauge = self._mesh.metrics.running.labels("episodes")
        gauge.inc()
        try:
            place = await self._enter(row, record, told)
            if told.failure is None:
                await self._play(row, told, page)
            await shielded(self._end(row, told, page))
        except (FencedError, VersionConflictError) as error:
            _log.warning("another server has this episode now: %s", error.message)
        finally:
            gauge.dec()
            await self._admission.leave(place)
            if page.lease is not None:
                await self._keeper.release(page.lease)

    async def _play(self, row: Row, told: Told, page: "Page") -> None:
        """The episode itself, under this server's lease; a cancellation ends as a failure that is told."""
        record = page.record
        try:
            page.lease = await self._store.acquire(episode_key(record.key), self._mesh.instance, ttl_s=LEASE_S)
            if page.lease is None:
                raise FencedError(f"The episode '{record.key}' is run by another server.")
            lost = FencedError(f"The claim on the episode '{record.key}' was lost to another server.")
            self._keeper.keep(page.lease, partial(self._running[record.key].cancel, lost))

            async def enter(stage: Stage) -> None:
                told.enter(stage)
                await page.turn(page.record.at(stage))

            sessions = Sessions(record.agent_session_id, record.resources_session_id)
            await run_episode(row, sessions, self._parties[row.environment], told, enter)
        except asyncio.CancelledError:
            told.failure = told.failure or cancelled_by_shutdown()

    async def _enter(self, row: Row, record: EpisodeRecord, told: Told) -> Lease | None:
        environment = self._parties[row.environment].environment
        try:
            return await self._admission.enter(row.environment, environment, record.key)
        except PaddockError as error:
            told.failure = error
        except asyncio.CancelledError:
            told.failure = told.failure or CancelledEpisodeError("The episode was cancelled while it was queued.")
        return None

    async def _end(self, row: Row, told: Told, page: "Page") -> None:
        refusal = await self._refusal(row, told)
        self._count(row, told, refusal)
        if refusal is not None:
            problem = render(refusal)
            retry_after = problem.headers.get("retry-after")
            ended = replace(
                page.record,
                state="refused",
                stage=told.stage,
                http_status=problem.status,
                retry_after_s=int(retry_after) if retry_after else None,
                answer=problem.body,
            )
            await page.turn(ended, ttl_s=REFUSAL_TTL_S)
            await self._store.remove_member(INDEX, page.record.key)
            return
        answer = self._answer(row, told)
        ended = replace(page.record, state="done", stage=told.stage, answer=answer)
        await page.turn(ended, ttl_s=self._mesh.settings.result_ttl_s)

    def _answer(self, row: Row, told: Told) -> bytes:
        agent = self._parties[row.environment].environment.agent
        try:
            return reply_of(row, told, agent)
        except Exception as error:  # noqa: BLE001 - whoever waits is answered in any case
            _log.exception("the answer could not be put together")
            told.response, told.receipt = None, None
            told.failure = PaddockError(f"The answer could not be put together: {type(error).__name__}.")
            return reply_of(row, told, agent)

    async def _refusal(self, row: Row, told: Told) -> PaddockError | None:
        """What is an error of the request rather than an outcome of the episode."""
        error = told.failure
        if isinstance(error, OverloadedError) and told.stage is Stage.ADMISSION:
            promised = await self._store.get(promise_key(row.episode_id.key)) is not None
            return None if promised else error
        if told.stage is Stage.SEED and isinstance(error, ServiceError | BadRowError) and error.detail:
            return row.located(error.detail) if error.kind is FailureKind.BAD_ROW else None
        return None

    async def wait(self, key: str, longest_s: float) -> EpisodeRecord:
        """The record once the episode has ended, or as it is when the time is over or the server drains.

        Raises:
            NotFoundError: there is no such episode.
        """
        end = time.monotonic() + longest_s
        version = -1
        while True:
            left_s = max(0.0, min(TICK_S, end - time.monotonic()))
            running = self._running.get(key)
            if running is not None and left_s > 0:
                # It runs here: its end is all that matters, not each stage on the way.
                await asyncio.wait((running.task,), timeout=left_s)
                left_s = 0.0
            stored = await self._store.wait_for_change(episode_key(key), version=version, timeout_s=left_s)
            if stored is None:
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
        """Cancel an episode: cleanup runs, nothing is verified.

        Raises:
            NotFoundError: there is no such episode.
            ConflictError: it has ended.
        """
        record = await self.wait(key, 0.0)
        if record.ended:
            raise ConflictError(f"The episode '{key}' has ended; its outcome stands.")
        running = self._running.get(key)
        if running is not None:
            running.cancel(CancelledEpisodeError("The episode was cancelled by a client."))
        return record

    async def list(self, state: str | None, limit: int, after: str) -> list[EpisodeRecord]:
        """Episodes in the order of their keys, beginning after `after`."""
        found = []
        for key in sorted(key for key in await self._store.members(INDEX) if key > after):
            stored = await self._store.get(episode_key(key))
            if stored is None:
                await self._store.remove_member(INDEX, key)
                continue
            record = decoded(stored.value)
            if state is None or record.state == state:
                found.append(record)
            if len(found) == limit:
                break
        return found

    async def close(self) -> None:
        """End what runs here: each episode is cleaned up, within a short budget, and ends as a failure."""
        for running in list(self._running.values()):
            running.cancel(cancelled_by_shutdown())
        tasks = [running.task for running in self._running.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_SHARE * self._mesh.settings.serving.stop_grace_s)
        await self._keeper.close()

    def _ttl_s(self, row: Row) -> float:
        """Longer than the longest episode with its queue, its cleanup and the time that its outcome is kept."""
        entry = self._parties[row.environment].environment
        queue_s = entry.queue_timeout_s or 0.0
        return queue_s + entry.episode_timeout_s + 2 * entry.cleanup_timeout_s + self._mesh.settings.result_ttl_s

    def _count(self, row: Row, told: Told, refusal: PaddockError | None) -> None:
        failure = failure_of(told)
        kind = str(failure["failure_kind"]) if failure is not None else "none"
        outcome = "refused" if refusal is not None else "failure" if failure is not None else "result"
        metrics = self._mesh.metrics
        metrics.episodes.labels(row.environment, outcome, kind).inc()
        for stage, seconds in told.timings_s.items():
            metrics.stage_seconds.labels(row.environment, stage).observe(seconds)
        fields: dict[str, object] = {
            "environment": row.environment,
            "outcome": outcome,
            "failure_kind": kind,
            "stage": told.stage,
        }
        if told.verified is not None:
            fields["reward"] = told.verified.verdict.reward
        level = logging.INFO if outcome == "result" else logging.WARNING
        _log.log(level, "episode %s", outcome, extra=fields)
