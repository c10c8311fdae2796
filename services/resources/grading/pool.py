"""The grading children of this process: few, shared by all entries that grade mathematics, one spare kept warm.

Started at the first need, replaced when they had to be killed, ended with the last entry. The spare takes
over at once where a child was killed, so that one runaway answer does not hold up the next.
"""

import asyncio
import logging
import signal
from collections import deque

from services.resources.grading.process import (
    DiedError,
    GraderUnavailableError,
    GradingChild,
    OutOfTimeError,
    Request,
)
from services.resources.grading.protocol import GOLD_CRASHED, GOLD_TIMEOUT, Outcome, Result
from shared.cleanup import shielded
from shared.metrics import Metrics

_log = logging.getLogger(__name__)

_OWN_CRASHES = {-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGFPE, -signal.SIGILL}
_ATTEMPTS = 2


class GradingPool:
    """At most `size` comparisons at once, in at most `size + 1` children."""

    def __init__(self, metrics: Metrics | None = None) -> None:
        self._metrics = Metrics() if metrics is None else metrics
        self._size = 0
        self._turns = asyncio.Semaphore(0)
        self._working = 0
        self._busy = 0
        self._spawned: set[GradingChild] = set()
        self._idle: deque[GradingChild] = deque()
        self._starts: set[asyncio.Task[GraderUnavailableError | None]] = set()
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """The children that run."""
        return sorted(child.pid for child in self._spawned)

    def enlarge(self, size: int) -> None:
        """Allow at least `size` comparisons at once."""
        for _ in range(size - self._size):
            self._turns.release()
        self._size = max(self._size, size)

    async def warm(self) -> None:
        """Start all children and wait until they are ready.

        Raises:
            GraderUnavailableError: a child does not start.
        """
        self._start_missing(self._size + 1)
        for error in await asyncio.gather(*(asyncio.shield(start) for start in self._starts)):
            if error is not None:
                raise error

    async def compare(self, request: Request) -> Result:
        """Have a child compare; waiting for a turn does not count towards the time limit.

        Raises:
            GraderUnavailableError: no child could do it, for no fault of the two texts.
        """
        async with self._turns:
            self._working += 1
            try:
                return await self._attempts(request)
            finally:
                self._working -= 1

    async def close(self) -> None:
        """End all children, also busy ones; idempotent."""
        self._closed = True
        starts = list(self._starts)
        for start in starts:
            start.cancel()
        await asyncio.gather(*starts, return_exceptions=True)
        await asyncio.gather(*(self._end(child) for child in list(self._spawned)))
        self._idle.clear()
        while self._wake(None):
            pass

    async def _attempts(self, request: Request) -> Result:
        died: DiedError | None = None
        for _ in range(_ATTEMPTS):
            try:
                return await self._once(request)
            except OutOfTimeError as error:
                self._metrics.grading_killed.labels().inc()
                return Result(Outcome.TIMEOUT if error.gold_read else GOLD_TIMEOUT)
            except DiedError as error:
                self._metrics.grading_killed.labels().inc()
                died = error
        assert died is not None
        if died.returncode not in _OWN_CRASHES:
            raise GraderUnavailableError(
                f"Something ended two grading children in turn (status {died.returncode}); is memory short?"
            ) from died
        return Result(Outcome.CRASHED if died.gold_read else GOLD_CRASHED)

    async def _once(self, request: Request) -> Result:
        child = await self._take()
        reusable = False
        try:
            result = await child.ask(request)
            reusable = not child.spent and not self._closed
        finally:
            if reusable:
                self._count_busy(-1)
                self._give(child)
            else:
                await self._replace(child)
        return result

    async def _replace(self, child: GradingChild) -> None:
        try:
            await shielded(self._end(child))
        finally:
            self._count_busy(-1)
            self._start_missing(self._working + 1)

    async def _take(self) -> GradingChild:
        while True:
            if self._closed:
                raise GraderUnavailableError("The grading children were ended: the service is stopping.")
            await self._forget_dead()
            if self._idle:
                self._count_busy(1)
                child = self._idle.popleft()
                self._start_missing(self._working + 1)
                return child
            self._start_missing(self._working + 1)
            await self._wait_for_idle()

    async def _forget_dead(self) -> None:
        for child in [child for child in self._idle if child.gone]:
            self._idle.remove(child)
            await shielded(self._end(child))

    async def _wait_for_idle(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._wake(None)  # the child that this one was woken for goes to the next
            raise

    def _give(self, child: GradingChild) -> None:
        self._idle.append(child)
        self._wake(None)

    def _wake(self, error: GraderUnavailableError | None) -> bool:
        """Let the first waiter go on, or fail; False when none waits."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)
            return True
        return False

    def _start_missing(self, wanted: int) -> None:
        present = len(self._starts) + len(self._idle) + self._busy
        for _ in range(0 if self._closed else wanted - present):
            start = asyncio.ensure_future(self._start())
            self._starts.add(start)
            start.add_done_callback(self._starts.discard)

    async def _start(self) -> GraderUnavailableError | None:
        """Start one child; a failure is returned, and raised in whoever waits for a child."""
        spawned: list[GradingChild] = []

        def started(child: GradingChild) -> None:
            spawned.append(child)
            self._spawned.add(child)
            self._metrics.grading_children.labels().inc()

        failure: GraderUnavailableError | None = None
        try:
            await GradingChild.start(started)
        except GraderUnavailableError as error:
            failure = error
        except asyncio.CancelledError:
            await self._end_all(spawned)
            raise
        # Gone from the starts before it is counted as idle.
        self._starts -= {start for start in self._starts if start is asyncio.current_task()}
        if failure is None:
            self._give(spawned[0])
            return None
        await self._end_all(spawned)
        if not self._wake(failure):
            _log.warning("no spare for grading: %s", failure)
        return failure

    async def _end_all(self, children: list[GradingChild]) -> None:
        for child in children:
            await shielded(self._end(child))

    async def _end(self, child: GradingChild) -> None:
        await child.end()
        if child in self._spawned:
            self._spawned.remove(child)
            self._metrics.grading_children.labels().dec()

    def _count_busy(self, change: int) -> None:
        self._busy += change
        self._metrics.grading_busy.labels().inc(change)


class SharedPool:
    """The one pool of an event loop, alive while any user has joined it."""

    def __init__(self) -> None:
        self._metrics: Metrics | None = None
        self._pools: dict[asyncio.AbstractEventLoop, tuple[GradingPool, set[int]]] = {}

    def measure_with(self, metrics: Metrics) -> None:
        """Have the pools that begin from now on counted there."""
        self._metrics = metrics

    def join(self, user: object, size: int) -> GradingPool:
        """The running loop's pool, grown to `size`; joining again changes nothing."""
        pool, users = self._pools.setdefault(asyncio.get_running_loop(), (GradingPool(self._metrics), set()))
        users.add(id(user))
        pool.enlarge(size)
        return pool

    async def leave(self, user: object) -> None:
        """End the children when no user is left; does nothing for one that has not joined."""
        loop = asyncio.get_running_loop()
        if loop not in self._pools:
            return
        pool, users = self._pools[loop]
        users.discard(id(user))
        if not users:
            del self._pools[loop]
            await pool.close()


SHARED_POOL = SharedPool()
