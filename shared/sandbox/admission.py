"""How many sandboxes an engine holds: those beyond wait in line, they do not fail.

Who else uses the engine is counted, too, by asking it; two processes may each let one in at the same moment, so the
number is a bound on load, not a promise.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from shared.deadline import Deadline
from shared.errors import ProviderQuotaError

ASK_EVERY_S: Final = 1.0


class Admission:
    """One line of waiters per process. `running` asks how many sandboxes there are, `capacity` how many may be."""

    def __init__(
        self, running: Callable[[], Awaitable[int]], capacity: Callable[[], Awaitable[int]], wait_s: float
    ) -> None:
        self._running = running
        self._capacity = capacity
        self._wait_s = wait_s
        self._line = asyncio.Lock()
        self._coming = 0
        self._room = asyncio.Event()

    @contextlib.asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Wait for room, then hold a place until the sandbox is made or has failed.

        Raises:
            ProviderQuotaError: there was none for `wait_s`.
        """
        try:
            async with asyncio.timeout(self._wait_s), self._line:
                await self._wait()
                self._coming += 1
        except TimeoutError as error:
            raise ProviderQuotaError(
                f"The engine had no room for another sandbox for {self._wait_s:g} s; it holds"
                f" {await self._capacity()}. Raise `max_sandboxes`, or run fewer episodes at once."
            ) from error
        try:
            yield
        finally:
            self._coming -= 1

    async def _wait(self) -> None:
        while await self._running() + self._coming >= await self._capacity():
            self._room.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(Deadline.after(ASK_EVERY_S).left_s):
                    await self._room.wait()

    def freed(self) -> None:
        """A sandbox of this process is gone: ask at once."""
        self._room.set()
