"""Processes of this machine, known by pid and start time: pids are used again."""

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from shared.deadline import Deadline

_STATE, _START = 0, 19
"""Fields of /proc/PID/stat behind the name."""
LOOK_EVERY_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    start: int

    def state(self) -> str | None:
        """The kernel's letter; None when it is gone or only waits to be reaped."""
        fields = _stat(self.pid)
        if fields is None or int(fields[_START]) != self.start or fields[_STATE] in {"Z", "X"}:
            return None
        return fields[_STATE]

    def send(self, number: signal.Signals) -> None:
        """Signal it if it is still the one that was meant."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if self.state() is not None:
                signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            pass
        finally:
            os.close(handle)

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended; False when it has not in time. Blocks."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            if self.state() is not None:
                select.select([handle], [], [], timeout_s)
        finally:
            os.close(handle)
        return self.state() is None


def process(pid: int) -> Process | None:
    """The process that has `pid` now."""
    fields = _stat(pid)
    return None if fields is None else Process(pid, int(fields[_START]))


def _stat(pid: int) -> list[str] | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def every_process() -> Iterator[Process]:
    for name in os.listdir("/proc"):
        if name.isdigit() and (found := process(int(name))) is not None:
            yield found


def has_argument(one: Process, argument: bytes) -> bool:
    return argument in _read(one.pid, "cmdline").split(b"\0")


def has_variable(one: Process, entry: bytes) -> bool:
    return entry in _read(one.pid, "environ").split(b"\0")


def runs_as(one: Process, uid: int) -> bool:
    try:
        return os.stat(f"/proc/{one.pid}").st_uid == uid or b"\nUid:\t%d\t" % uid in _read(one.pid, "status")
    except FileNotFoundError:
        return False


def _read(pid: int, name: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:  # gone, or another user's
        return b""


def kill_all(find: Callable[[], list[Process]], timeout_s: float) -> bool:
    """Kill what `find` gives until it gives nothing; False when some live on. Blocks."""
    deadline = Deadline.after(timeout_s)
    while found := [one for one in find() if one.state() is not None]:
        if deadline.passed:
            return False
        for one in found:
            one.send(signal.SIGKILL)
        time.sleep(LOOK_EVERY_S)
    return True
