"""Whoever starts it stops it: registered before the start, tried within a budget, never forgotten.

A cleanup is idempotent: once it succeeded it is not run again; while it failed it stays active and the
unwind tries it again. What is still outstanding when the budget ends is named, not dropped.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from shared.contracts.failure import CleanupError, FailureKind
from shared.deadline import Deadline
from shared.errors import PaddockError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0


async def shielded(work: Awaitable[_T]) -> _T:
    """Finish `work` although the caller is cancelled; the cancellation is raised after it."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
        except Exception:  # noqa: BLE001 - the task keeps it; raised by result() below
            break
    if cancelled is not None:
        if not task.cancelled() and task.exception() is not None:
            _log.warning("work shielded from a cancellation failed: %r", task.exception())
        raise cancelled
    return task.result()


class Cleanup:
    """One thing to undo.

    `attempts` bounds how often it is tried in all; None means until the budget ends. `unwind_s` bounds its
    share of the unwind: where nothing depends on it any more, a peer that is gone should not hold up the answer.
    """

    def __init__(
        self, what: str, action: Callable[[float], Awaitable[None]], attempts: int | None, unwind_s: float
    ) -> None:
        self.what = what
        self.unwind_s = unwind_s
        self.error: CleanupError | None = None
        self.done = False
        self._action = action
        self._attempts_left = attempts
        self._lock = asyncio.Lock()

    async def run(self, budget_s: float) -> bool:
        """Try until it succeeds, its attempts are used up, or the budget ends; True when it is done.

        The action is given the seconds that it may take.
        """
        deadline = Deadline.after(budget_s)
        pause_s = FIRST_PAUSE_S
        async with self._lock:
            while not self.done and await self._try(deadline) and deadline.left_s > pause_s:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return self.done

    async def _try(self, deadline: Deadline) -> bool:
        """One attempt; True when another one is allowed."""
        if self._attempts_left == 0:
            return False
        if self._attempts_left is not None:
            self._attempts_left -= 1
        try:
            async with asyncio.timeout(deadline.within(deadline.left_s)):
                await self._action(deadline.left_s)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is kept and the next cleanup still runs
            self.error = CleanupError(what=self.what, type=type(error).__name__, message=str(error) or repr(error))
            _log.warning("cleanup '%s' failed: %s", self.what, self.error.message)
            if isinstance(error, PaddockError) and error.kind is FailureKind.SESSION_LOST:
                # Who is asked has forgotten what there was to undo: asking again brings nothing back.
                self._attempts_left = 0
            return True
        self.done, self.error = True, None
        return False


class CleanupStack:
    """Cleanups of one episode, undone last-registered first inside one total budget (seconds)."""

    def __init__(self, budget_s: float) -> None:
        self.budget_s = budget_s
        self._cleanups: list[Cleanup] = []

    def register(
        self,
        what: str,
        action: Callable[[float], Awaitable[None]],
        *,
        attempts: int | None = None,
        unwind_s: float = math.inf,
    ) -> Cleanup:
        cleanup = Cleanup(what, action, attempts, unwind_s)
        self._cleanups.append(cleanup)
        return cleanup

    async def unwind(self) -> None:
        """Run what is not done yet. Shielded: a cancellation is raised only after it."""
        await shielded(self._unwind())

    async def _unwind(self) -> None:
        deadline = Deadline.after(self.budget_s)
        for cleanup in reversed(self._cleanups):
            await cleanup.run(deadline.within(cleanup.unwind_s))

    @property
    def outstanding(self) -> tuple[CleanupError, ...]:
        """What could not be undone, with the last error of each."""
        return tuple(
            cleanup.error
            or CleanupError(what=cleanup.what, type="NotTried", message="the cleanup budget ended before its turn")
            for cleanup in self._cleanups
            if not cleanup.done
        )
