"""The caller's connection, watched while the call is under way.

A server does not end a handler whose client has left: somebody has to listen. The watch cancels the task
that uses it, wherever it waits, and turns that cancellation into `ClientGoneError`; or into
`CutError` when it was not the caller who ended the call.
"""

import asyncio
from types import TracebackType
from typing import Self

from starlette.types import Receive

from services.model_proxy.failures import ClientGoneError, CutError, ModelCallError


class ClientWatch:
    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._task: asyncio.Task[object] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._ending: Exception | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if self._watcher is not None:
            self._watcher.cancel()
        if self._ending is None or task is None or kind is not asyncio.CancelledError:
            return
        if task.uncancel() == 0:
            raise self._ending from error

    def cut(self, error: ModelCallError) -> None:
        """End the call although its caller is still there; does nothing once the call is over."""
        self._end(CutError(error))

    def _end(self, ending: Exception) -> None:
        if self._ending is None and self._task is not None:
            self._ending = ending
            self._task.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._end(ClientGoneError())
