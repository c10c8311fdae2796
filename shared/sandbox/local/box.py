"""One local sandbox in use."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared.errors import ProviderError, SandboxRefusedError
from shared.ports.sandbox import SandboxState, SandboxStatus, StopReceipt
from shared.sandbox.box import Box
from shared.sandbox.command import CommandStream
from shared.sandbox.identity import Accident, BoxDescriptor
from shared.sandbox.local.folder import BoxFolder
from shared.sandbox.local.processes import Process
from shared.sandbox.local.removal import remove_box
from shared.sandbox.local.stream import LocalStream


class LocalDescriptor(BoxDescriptor):
    """`pid` and `start` are the keeper's; `boot` is what it calls itself."""

    kind_of_box = "local sandbox"

    directory: str
    pid: int
    start: int


def state_of(folder: BoxFolder, keeper: Process | None) -> SandboxState:
    if not folder.path.exists():
        return "gone"
    letter = keeper.state() if keeper is not None else None
    if letter is None:
        return "stopped"
    return "paused" if letter in {"T", "t"} else "running"


class LocalBox(Box):
    """`freed` is called when its place is free again."""

    def __init__(self, descriptor: LocalDescriptor, freed: Callable[[], None]) -> None:
        super().__init__(descriptor.identity("local"))
        self._told = descriptor
        self._freed = freed
        self._folder = BoxFolder(Path(descriptor.directory), descriptor.id)
        self._keeper = Process(descriptor.pid, descriptor.start)

    def _descriptor(self) -> dict[str, Any]:
        return self._told.model_dump()

    async def _open(self, user: str | None) -> CommandStream:
        if user not in {None, str(self.place.uid), f"{self.place.uid}:{self.place.gid}"}:
            raise SandboxRefusedError(
                f"A local sandbox has one user, {self.place.uid}; it cannot run a command as '{user}'."
            )
        state = state_of(self._folder, self._keeper)
        if state == "paused":
            raise ProviderError(f"The sandbox {self.id} is paused.")
        try:
            return await LocalStream.open(self._folder.control)
        except OSError as error:
            raise await self._lost() from error

    async def status(self) -> SandboxStatus:
        state = await asyncio.to_thread(state_of, self._folder, self._keeper)
        return SandboxStatus(state, detail=self._folder.said(200) if state == "stopped" else "")

    async def interfere(self, accident: Accident) -> None:
        numbers = {"pause": signal.SIGSTOP, "resume": signal.SIGCONT, "kill": signal.SIGKILL}
        self._keeper.send(numbers[accident])

    async def _remove(self) -> StopReceipt:
        receipt = await asyncio.to_thread(remove_box, self._folder.path.parent, self.id)
        self._freed()
        return receipt
