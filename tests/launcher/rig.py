"""Starts the driver and reads what it tells, with a bound on every wait."""

import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from tests.launcher.driver import Plan

REPOSITORY = Path(__file__).parents[2]
FOUR = ("environment", "agent", "model_proxy", "resources")
BOUND_S = 20.0


def four(behaviour: str, **others: str) -> dict[str, str]:
    """Four children of one behaviour, single ones replaced."""
    return {name: others.get(name, behaviour) for name in FOUR}


def gone(pid: int, bound_s: float = 0.0) -> bool:
    """Whether the process has ended, or does so within `bound_s`."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], bound_s)[0])
    finally:
        os.close(handle)


def free_ports(count: int) -> int:
    """The first of so many free ports in a row, where the system gives none to clients meanwhile."""
    while True:
        first = random.randrange(20_000, 32_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def wait_for_pending(pid: int, number: signal.Signals, bound_s: float = 5.0) -> None:
    """Until the signal waits in the kernel for the process to let it in."""
    deadline = time.monotonic() + bound_s
    while time.monotonic() < deadline:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        pending = next(int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd:"))
        if pending >> (number - 1) & 1:
            return
        time.sleep(0.005)  # the kernel has no event for this
    raise TimeoutError(f"{number.name} does not wait for {pid}")


def children_of(pid: int) -> list[int]:
    """The children of a process, in the order of their start."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def tree_of(pid: int) -> list[int]:
    """A process and all that descend from it."""
    return [pid, *(below for child in children_of(pid) for below in tree_of(child))]


def memory_kib(pid: int, kind: Literal["Rss", "Pss"]) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:"))


class Launched:
    """The driver with a plan, or Python with other arguments, in a session of its own as under a terminal."""

    def __init__(self, what: Plan | Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        driver = ["-m", "tests.launcher.driver"]
        arguments = [*driver, json.dumps(asdict(what))] if isinstance(what, Plan) else what
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=REPOSITORY,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self._fd = self.process.stdout.fileno()
        self._rest = b""
        self.lines: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        for name in self.named("up"):
            if not gone(pid := int(name.split()[1])):
                os.kill(pid, signal.SIGKILL)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self.process.wait(BOUND_S)

    @property
    def pid(self) -> int:
        return self.process.pid

    def named(self, word: str) -> list[str]:
        """What followed `word` in the lines so far."""
        return [line.removeprefix(f"{word} ") for line in self.lines if line.startswith(f"{word} ")]

    def pid_of(self, name: str) -> int:
        """The pid that a child told last."""
        return int([told for told in self.named("up") if told.startswith(f"{name} ")][-1].split()[1])

    def read_until(self, start: str, count: int = 1, bound_s: float = BOUND_S) -> str:
        """Read until `count` lines in all begin with `start`; the last of them."""
        deadline = time.monotonic() + bound_s
        while len(found := [line for line in self.lines if line.startswith(start)]) < count:
            if not self._read(deadline):
                error = self.process.stderr.read().decode() if self.process.stderr else ""
                raise AssertionError(f"ended without '{start}' × {count}: {self.lines}\n{error}")
        return found[-1]

    def read_to_the_end(self, bound_s: float = BOUND_S) -> int:
        """Read until no process holds the output any more; the launcher's exit status.

        Raises:
            TimeoutError: something still holds it after `bound_s`.
        """
        deadline = time.monotonic() + bound_s
        while self._read(deadline):
            pass
        return self.process.wait(max(0.1, deadline - time.monotonic()))

    def go_on(self, count: int = 1) -> None:
        """Release what is held: the launcher, or `count` children."""
        assert self.process.stdin is not None
        os.write(self.process.stdin.fileno(), b"g" * count)

    def _read(self, deadline: float) -> bool:
        readable, _, _ = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            raise TimeoutError(f"nothing within the bound; so far: {self.lines}")
        data = os.read(self._fd, 65536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.lines += [line.decode() for line in lines]
        return bool(data)
