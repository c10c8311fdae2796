"""Services as processes that a test can kill, freeze, stop and start again within a fraction of a second."""

import asyncio
import itertools
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from tests.mesh.processes import MARK, clean, new_mark, wait_until_none

START_S = 60.0
END_S = 10.0


@dataclass
class Service:
    """One `paddock serve`. `end` becomes its exit status, negative for a signal."""

    pid: "asyncio.Future[int]"
    end: "asyncio.Future[int]"
    log: Path

    @property
    def lives(self) -> bool:
        return self.pid.done() and not self.end.done()

    def send(self, number: signal.Signals) -> None:
        """Does nothing when it has ended."""
        if self.lives:
            with suppress(ProcessLookupError):
                os.kill(self.pid.result(), number)

    async def ended(self, bound_s: float) -> int:
        """Its exit status.

        Raises:
            TimeoutError: it goes on.
        """
        async with asyncio.timeout(bound_s):
            return await asyncio.shield(self.end)


@dataclass
class Nursery:
    """Starts services by forking; see `nursery.py`."""

    mark: str
    _process: Process
    _folder: Path
    _services: dict[int, Service] = field(default_factory=dict)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def start(self, service: str, port: int, name: str) -> Service:
        """`paddock serve`; it need not be ready yet. What it says is added to the log of that name."""
        number, loop = next(self._numbers), asyncio.get_running_loop()
        log = self._folder / f"{name}.log"
        command = ["serve", service, "--port", str(port)]
        started = self._services[number] = Service(loop.create_future(), loop.create_future(), log)
        assert self._process.stdin is not None
        self._process.stdin.write(orjson.dumps({"id": number, "command": command, "log": str(log)}) + b"\n")
        async with asyncio.timeout(START_S):
            await asyncio.shield(started.pid)
        return started

    async def hear(self) -> None:
        """Take in what the nursery says, to its end."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            said = orjson.loads(line)
            service = self._services[said["id"]]
            if "pid" in said:
                service.pid.set_result(said["pid"])
            else:
                service.end.set_result(said["status"])


@asynccontextmanager
async def nursery(folder: Path, environ: Mapping[str, str]) -> AsyncIterator[Nursery]:
    """A nursery whose services have this environment; nothing that descends from it lives afterwards."""
    mark = new_mark()
    with (folder / "nursery.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.chaos.nursery",
            cwd=folder, env=clean({**environ, MARK: mark}), stdin=PIPE, stdout=PIPE, stderr=log,
        )  # fmt: skip
    started = Nursery(mark, process, folder)
    hearing = asyncio.create_task(started.hear())
    try:
        yield started
    finally:
        assert process.stdin is not None
        process.stdin.close()
        async with asyncio.timeout(END_S):
            await process.wait()
            await hearing
        for left in await asyncio.to_thread(wait_until_none, mark, END_S):
            left.kill()
