"""The model calls that this process has under way: sealing ends those of an episode, a stop waits for all."""

import asyncio
from dataclasses import dataclass, field
from typing import Final

from services.model_proxy.access import Caller
from services.model_proxy.client_watch import ClientWatch

_WAIT_S: Final = 2.0


@dataclass(slots=True)
class _Call:
    caller: Caller
    waiting: list[asyncio.Future[None]] = field(default_factory=list)


class UnderWay:
    """A call is under way from before it is sent until it is recorded."""

    def __init__(self) -> None:
        self._calls: dict[ClientWatch, _Call] = {}

    def enter(self, caller: Caller, watch: ClientWatch) -> None:
        self._calls[watch] = _Call(caller)

    def leave(self, watch: ClientWatch) -> None:
        """Idempotent."""
        call = self._calls.pop(watch, None)
        for waiting in call.waiting if call is not None else ():
            if not waiting.done():
                waiting.set_result(None)

    async def cut(self, key: str) -> None:
        """End the episode's calls, not the mesh's own, and wait for a bounded time until they are recorded."""
        watches = [
            watch for watch, call in self._calls.items() if call.caller.key == key and call.caller.phase == "agent"
        ]
        for watch in watches:
            watch.cut()
        await self._ended(watches)

    async def ended(self) -> None:
        """Wait, for a bounded time, until all calls are recorded."""
        await self._ended([*self._calls])

    async def _ended(self, watches: list[ClientWatch]) -> None:
        waits = []
        for watch in watches:
            waits.append(asyncio.get_running_loop().create_future())
            self._calls[watch].waiting.append(waits[-1])
        if waits:
            await asyncio.wait(waits, timeout=_WAIT_S)
