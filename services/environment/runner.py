"""The episodes that run in this process, each a task of its own under a lease.

A task ends in one of two ways: its end is stored here, or the episode is given up to another server, which cleans
up, too. What is given up is not undone here: the agent may be at work for the next server already.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Final

from services.environment.admission import Admission
from services.environment.ending import Ending
from services.environment.episode import Episode
from services.environment.page import Page
from services.environment.parties import Parties, Sessions
from services.environment.reply import failure_of
from services.environment.rows import Row
from services.environment.told import Told
from shared.cleanup import shielded
from shared.deadline import Deadline
from shared.errors import (
    CancelledEpisodeError,
    DrainingError,
    FencedError,
    OverloadedError,
    PaddockError,
    StoreUnavailableError,
)
from shared.http.service import Mesh
from shared.ports.store import Lease, Store
from shared.store.leases import LeaseKeeper
from shared.telemetry import current_key
from shared.tracing import current_trace, span, trace_from

_log = logging.getLogger(__name__)

# Of the grace: how long episodes that still run may take to end or to be handed over. Peers may be stopping, too.
CLOSE_SHARE: Final = 0.3
# What a store that is away does not take back in this time will expire.
RELEASE_WITHIN_S: Final = 1.0


@dataclass(slots=True)
class Running:
    task: asyncio.Task[None]
    told: Told
    stopped: bool = False
    over: bool = False
    """Its claim is being given back, and is not claimed again."""
    reclaiming: asyncio.Task[None] | None = None

    def cancel(self, why: PaddockError) -> None:
        """End it as a failure. Once only: a second cancellation would interrupt the cleanup."""
        if not self.stopped:
            self.stopped = True
            self.told.failure = why
            self.task.cancel()

    def give_up(self) -> None:
        """Leave it to another server."""
        if not self.stopped:
            self.stopped = True
            self.told.given_up = True
            self.task.cancel()


class Runner:
    """One per process."""

    def __init__(self, mesh: Mesh, store: Store, parties: Mapping[str, Parties], ending: Ending) -> None:
        self._mesh = mesh
        self._store = store
        self._parties = parties
        self._ending = ending
        lease_s = mesh.settings.store.lease_s
        self._keeper = LeaseKeeper(store, ttl_s=lease_s, metrics=mesh.metrics)
        self._admission = Admission(store, self._keeper, lease_s, mesh.metrics)
        self._running: dict[str, Running] = {}

    def running(self, key: str) -> Running | None:
        return self._running.get(key)

    def launch(self, row: Row, page: Page, told: Told) -> None:
        """Run the episode of this page, whose lease the caller holds."""
        key = page.record.key
        context = copy_context()
        context.run(current_key.set, key)
        context.run(current_trace.set, trace_from(page.record.trace))
        task = asyncio.create_task(self._run(row, page, told), name=f"episode {key}", context=context)
        running = self._running[key] = Running(task, told)
        self._keep(row, page, running)
        task.add_done_callback(lambda _: self._running.pop(key, None))

    def _keep(self, row: Row, page: Page, running: Running) -> None:
        """Hold the claim; when it ran out while the store was away, take it again or give the episode up."""

        def lost() -> None:
            if not running.over:
                running.reclaiming = asyncio.create_task(self._reclaim(row, page, running))

        self._keeper.keep(page.lease, lost)

    async def _reclaim(self, row: Row, page: Page, running: Running) -> None:
        try:
            await page.reclaim()
            await page.open(row)
        except (FencedError, StoreUnavailableError):
            running.give_up()
        else:
            self._keep(row, page, running)

    async def close(self) -> list[str]:
        """End what runs here, in a short time; the keys of the episodes that wait for another server now.

        Where the state outlives this process every episode is handed over as it is; else it is cleaned up and
        ends as a failure.
        """
        keys = list(self._running)
        if self._store.outlives_process:
            self._mesh.metrics.handed_over.labels("environment").inc(len(keys))
        for running in list(self._running.values()):
            if self._store.outlives_process:
                running.give_up()
            else:
                running.cancel(DrainingError("The environment server was shut down while the episode ran."))
        tasks = [running.task for running in self._running.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_SHARE * self._mesh.settings.serving.stop_grace_s)
        await self._keeper.close()
        return keys if self._store.outlives_process else []

    async def _run(self, row: Row, page: Page, told: Told) -> None:
        """From admission to the stored answer; the place is given up only after the cleanup."""
        place: Lease | None = None
        gauge = self._mesh.metrics.running.labels("episodes")
        gauge.inc()
        try:
            with span("episode") as whole:
                whole.set("paddock.key", page.record.key)
                whole.set("paddock.environment", row.environment)
                with told.spans:
                    told.spans.enter("admission")
                    place = await self._enter(row, page, told)
                    if told.failure is None or told.takeovers:
                        await self._play(row, page, told)
                await shielded(self._ending.write(row, told, page))
                if whole.recorded and (failure := failure_of(told)) is not None:
                    whole.fail(str(failure["failure_kind"]))
        except (FencedError, StoreUnavailableError) as error:
            told.given_up = True
            _log.warning("the episode is left to the server that finds it: %s", error.message)
        except asyncio.CancelledError:
            if not told.given_up:
                raise
        finally:
            gauge.dec()
            await self._let_go(page, None if told.given_up else place)

    async def _let_go(self, page: Page, place: Lease | None) -> None:
        """The place of an episode that goes on elsewhere stays its own: the next server claims it anew."""
        running = self._running[page.record.key]
        running.over = True
        if running.reclaiming is not None:
            running.reclaiming.cancel()
            await asyncio.wait((running.reclaiming,))
        await self._give_back(self._admission.leave(place))
        await self._give_back(self._keeper.release(page.lease))

    @staticmethod
    async def _give_back(releasing: Coroutine[Any, Any, None]) -> None:
        try:
            async with asyncio.timeout(RELEASE_WITHIN_S):
                await releasing
        except (StoreUnavailableError, TimeoutError) as error:
            _log.warning("a claim was not given back and will expire: %s", error)

    async def _play(self, row: Row, page: Page, told: Told) -> None:
        """The episode itself; a cancellation ends as a failure that is told."""
        parties, record = self._parties[row.environment], page.record
        spent_s = time.time() - record.admitted_at if record.admitted_at else 0.0
        deadline = Deadline.after(parties.budgets.episode_s - spent_s)

        async def keep() -> None:
            now = page.record.at(told.stage, told.journal(), now=time.time())
            if now != page.record:
                await page.turn(now)

        sessions = Sessions(record.agent_session_id, record.resources_session_id)
        try:
            await Episode(row, sessions, parties, told, keep, deadline).run()
        except asyncio.CancelledError:
            if told.given_up:
                raise
            told.failure = told.failure or CancelledEpisodeError("The episode was cancelled.")

    async def _enter(self, row: Row, page: Page, told: Told) -> Lease | None:
        environment = self._parties[row.environment].environment
        try:
            # What was admitted before holds its sandbox already: it goes on even where its place is gone.
            admitted = page.record.admitted_at > 0
            return await self._admission.enter(row.environment, environment, page.record.key, admitted=admitted)
        except OverloadedError as error:
            told.failure = error
        except asyncio.CancelledError:
            if told.given_up:
                raise
            told.failure = told.failure or CancelledEpisodeError("The episode was cancelled while it was queued.")
        return None
