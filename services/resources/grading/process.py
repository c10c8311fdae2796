"""One grading child as the server sees it: started, asked, killed.

What is asked of it and in which turn is the pool's affair.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from services.resources.grading.protocol import GOLD_READ, READY, Result
from shared.errors import VerifierError

START_TIMEOUT_S = 60.0
"""Importing the library takes a third of a second on an idle machine; this is for a very busy one."""
STARVED_FACTOR = 6
"""A child that got less than half of its limit as processor time is waited for up to this many times longer."""

_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class Request:
    """Two texts and the limits of their comparison."""

    gold: str
    answer: str
    timeout_s: float
    memory_mib: int


class OutOfTimeError(Exception):
    """The comparison did not end in time; `gold_read` tells whether its gold side had been read."""

    def __init__(self, *, gold_read: bool) -> None:
        super().__init__("the comparison did not end in time")
        self.gold_read = gold_read


class GraderUnavailableError(VerifierError):
    """This machine cannot grade at the moment; that says nothing about the answer, and another try may work."""

    terminal = False


class DiedError(Exception):
    """The child ended by itself, or something else ended it."""

    def __init__(self, returncode: int, *, gold_read: bool) -> None:
        super().__init__(f"the child ended with status {returncode}")
        self.returncode = returncode
        self.gold_read = gold_read


async def _made(spawning: asyncio.Future[Process]) -> None:
    """Wait for it whatever cancels this; it takes milliseconds."""
    while not spawning.done():
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await asyncio.shield(spawning)


class GradingChild:
    """A child process that is ready for one request at a time."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._gold_read = False
        self.pid = process.pid
        self.spent = False

    @property
    def gone(self) -> bool:
        return self._process.returncode is not None

    @classmethod
    async def start(cls, started: Callable[["GradingChild"], None]) -> None:
        """Start one, hand it to `started` before anything can fail, and wait until it is ready.

        Raises:
            GraderUnavailableError: it does not start, or cannot load the library.
        """
        # The children work on text that a model wrote: nothing of the server's environment goes along.
        # A fixed hash seed makes the order of the library's work, and so its verdicts, repeatable.
        environment = {"PYTHONPATH": str(_ROOT), "PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "PYTHONUTF8": "1"}
        command = (sys.executable, "-P", "-s", "-m", f"{__package__}.child", str(os.getpid()))
        spawning = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment, cwd="/", start_new_session=True
            )
        )
        try:
            process = await asyncio.shield(spawning)
        except OSError as error:
            raise GraderUnavailableError(f"A grading child cannot be started: {error}.") from error
        except asyncio.CancelledError:
            # CPython waits for ever where a process is given up before its pipes are joined (seen with 3.11):
            # it is made to the end, and whoever cancelled ends it.
            await _made(spawning)
            if spawning.exception() is None:
                started(cls(spawning.result()))
            raise
        child = cls(process)
        started(child)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                line = await child._line()
        except TimeoutError as error:
            raise GraderUnavailableError(f"A grading child was not ready within {START_TIMEOUT_S:g} s.") from error
        if line is None or line.word != READY:
            why = line.detail if line else "it ended by itself"
            raise GraderUnavailableError(f"A grading child cannot work: {why}. Is math-verify installed?")

    async def ask(self, request: Request) -> Result:
        """Send a request and wait for its result.

        Raises:
            OutOfTimeError, DiedError, GraderUnavailableError: see there. The child is of no use after any of them.
        """
        body = {"gold": request.gold, "answer": request.answer, "timeout_s": request.timeout_s}
        payload = json.dumps(body | {"memory_mib": request.memory_mib}).encode() + b"\n"
        self._gold_read = False
        reading = asyncio.ensure_future(self._converse(payload))
        began, cpu_before_s = monotonic(), self._cpu_s()
        try:
            await asyncio.wait({reading}, timeout=request.timeout_s)
            while not reading.done():
                self._check_time(request.timeout_s, monotonic() - began, self._cpu_s() - cpu_before_s)
                await asyncio.wait({reading}, timeout=request.timeout_s / 8)
            return reading.result()
        finally:
            reading.cancel()

    def _check_time(self, timeout_s: float, passed_s: float, cpu_s: float) -> None:
        if cpu_s >= timeout_s / 2:
            raise OutOfTimeError(gold_read=self._gold_read)
        if passed_s >= STARVED_FACTOR * timeout_s:
            raise GraderUnavailableError(
                f"A comparison got {cpu_s:.1f} s of processor time within {passed_s:.0f} s: the machine is overloaded."
            )

    async def _converse(self, payload: bytes) -> Result:
        assert self._process.stdin is not None
        # A dead child is told by the end of its output below.
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(payload)
            await self._process.stdin.drain()
        while line := await self._line():
            if line.word != GOLD_READ:
                return line
            self._gold_read = True
        returncode = await self._process.wait()
        if returncode == -signal.SIGPROF:
            raise OutOfTimeError(gold_read=self._gold_read)
        raise DiedError(returncode, gold_read=self._gold_read)

    async def _line(self) -> Result | None:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):
            return None
        message = json.loads(line)
        self.spent = message["spent"]
        return Result(message["word"], message["detail"])

    def _cpu_s(self) -> float:
        """Processor time that the child has used; time by the clock where the system does not tell it."""
        if sys.platform != "linux":
            return monotonic()
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0  # it has just ended
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def end(self) -> None:
        """Kill it and wait until it is gone; idempotent."""
        assert self._process.stdin is not None
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        self._process.stdin.close()
        await self._process.wait()
