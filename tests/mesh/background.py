"""An event loop in a thread of its own: servers of the tests answer while the test itself waits for a process."""

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Self, TypeVar

_T = TypeVar("_T")
BOUND_S = 30.0


class Background:
    """Use as a context manager; what was entered is left again, last first, at the end."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="servers of the tests", daemon=True)
        self._entered: list[AbstractAsyncContextManager[Any]] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            for manager in reversed(self._entered):
                self.run(manager.__aexit__(None, None, None))
            self.run(self._loop.shutdown_asyncgens())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(BOUND_S)
            self._loop.close()

    def run(self, work: Coroutine[Any, Any, _T], bound_s: float = BOUND_S) -> _T:
        """The result of `work`, done in the background loop.

        Raises:
            TimeoutError: it takes longer than `bound_s`.
        """
        return asyncio.run_coroutine_threadsafe(self._bounded(work, bound_s), self._loop).result(bound_s + 5.0)

    async def _bounded(self, work: Coroutine[Any, Any, _T], bound_s: float) -> _T:
        async with asyncio.timeout(bound_s):
            return await work

    def enter(self, manager: AbstractAsyncContextManager[_T]) -> _T:
        """What the manager gives; it is left when the loop ends."""
        entered = self.run(manager.__aenter__())
        self._entered.append(manager)
        return entered
