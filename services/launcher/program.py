"""A server program as a child of the launcher: a keeper starts it, asks until it answers, and ends all of it.

The supervisor watches the keeper. The keeper adopts what descends from the program, so that its stop is over
only when the kernel says that nothing of the program is left, also nothing that has left its process group,
and also when it was the launcher that was killed. What is started, and when, is not known here.
"""

import contextlib
import math
import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from services.launcher.fork import Child, adopt_orphans, fork_child, signal_when_parent_ends, told_end
from services.launcher.probe import READY, Probe
from services.launcher.signals import SignalInbox

FIRST_PROGRESS_S: Final = 5.0
LONGEST_PROGRESS_S: Final = 60.0
_KILL_AGAIN_S: Final = 0.2
_TAIL_BYTES: Final = 1200


@dataclass(frozen=True, slots=True)
class Program:
    """`environ` is the whole environment, `ready_url` what is asked until it answers with 2xx."""

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str]
    ready_url: str
    ready_timeout_s: float
    """0: it counts as ready at once."""
    stop_grace_s: float
    log_path: Path
    """Its output is appended here."""


def keep(
    program: Program,
    ready: Callable[[], None],
    say: Callable[[str], None],
    after_fork: Callable[[], None] = lambda: None,
) -> int:
    """Run the program until a stop signal; 0 when nothing of it is left.

    `say` gets a sentence at its start, now and then, and when it is ready. `after_fork` runs between its fork and its
    registration. To be called in a process of its own that leads a process group.

    Raises:
        SystemExit: with a sentence: it ended by itself, it cannot be reached, or it was not ready in time.
    """
    signal_when_parent_ends(signal.SIGTERM)
    adopt_orphans()
    program.log_path.parent.mkdir(parents=True, exist_ok=True)
    with SignalInbox() as inbox, program.log_path.open("ab") as log:
        return _Keeper(program, inbox, log.fileno(), say).run(ready, after_fork)


class _Keeper:
    def __init__(self, program: Program, inbox: SignalInbox, log_fd: int, say: Callable[[str], None]) -> None:
        self._program = program
        self._inbox = inbox
        self._log_fd = log_fd
        self._log_start = os.fstat(log_fd).st_size
        self._say = say
        self._began = time.monotonic()
        self._pid = 0
        self._report_fd = -1
        self._ended: int | None = None

    def run(self, ready: Callable[[], None], after_fork: Callable[[], None]) -> int:
        try:
            self._start(after_fork)
            self._say(f"{self._program.name} is started; its output goes to {self._program.log_path}.")
            if self._program.ready_timeout_s > 0:
                self._await_answer()
            if self._inbox.stop_signal is None:
                ready()
            while self._inbox.stop_signal is None:
                self._wait(math.inf)
        finally:
            self._end()
        return 0

    def _start(self, after_fork: Callable[[], None]) -> None:
        def register(pid: int, report_fd: int) -> None:
            self._pid, self._report_fd = pid, report_fd

        # In the keeper's own process group: where the keeper is killed, its group is killed with it.
        fork_child(Child(self._program.name, self._become, own_session=False), (), register, after_fork)

    def _become(self, _ready: Callable[[], None]) -> NoReturn:
        """In the new process: turn into the program."""
        for fd in (1, 2):
            os.dup2(self._log_fd, fd)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and that would be inherited
            signal.signal(number, signal.SIG_DFL)
        command = self._program.command
        try:
            os.execvpe(command[0], command, self._program.environ)
        except OSError as error:
            raise SystemExit(f"'{command[0]}' cannot be run: {error.strerror}.") from error

    def _await_answer(self) -> None:
        """Until the program answers or a stop signal comes."""
        probe = Probe(self._program.ready_url)
        probe.start()
        limit_s, told_s = self._program.ready_timeout_s, FIRST_PROGRESS_S
        while self._inbox.stop_signal is None:
            self._wait(self._began + min(told_s, limit_s), probe.fileno())
            if heard := probe.heard():
                if heard == READY:
                    self._say(f"{self._program.name} is ready after {time.monotonic() - self._began:.1f} s.")
                    return
                raise SystemExit(heard.decode())
            after_s = time.monotonic() - self._began
            if after_s >= limit_s:
                raise SystemExit(f"not ready within {limit_s:g} s: {probe.last}. {self._tail()}")
            if after_s >= told_s:
                self._say(f"{self._program.name} is not ready after {told_s:g} s: {probe.last}. {self._tail(lines=1)}")
                told_s += min(told_s, LONGEST_PROGRESS_S)

    def _wait(self, until: float, *fds: int) -> None:
        """Sleep until a signal, something on `fds`, or `until`.

        Raises:
            SystemExit: the program has ended although no stop was asked for.
        """
        self._sleep(until, *fds)
        self._reap()
        if self._ended is not None and self._inbox.stop_signal is None:
            reason = os.read(self._report_fd, _TAIL_BYTES).decode()
            raise SystemExit(reason or f"its program {told_end(self._ended)}. {self._tail()}")

    def _sleep(self, until: float, *fds: int) -> None:
        poll = select.poll()
        for fd in (self._inbox.fileno(), *fds):
            poll.register(fd, select.POLLIN)
        poll.poll(None if until == math.inf else max(0.0, until - time.monotonic()) * 1000)
        self._inbox.drain()

    def _reap(self) -> bool:
        """Take leave of what has ended; whether anything of the program is left."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if pid == self._pid:
                    self._ended = status
        return False

    def _end(self) -> None:
        """TERM to the whole process group; after the grace KILL, until the kernel has no descendant left."""
        if self._reap():
            os.killpg(os.getpgrp(), signal.SIGTERM)  # the keeper's own copy is only noted
        kill_at = time.monotonic() + (self._program.stop_grace_s if self._ended is None else 0.0)
        while self._reap():
            if time.monotonic() >= kill_at:
                for pid in _children():
                    os.kill(pid, signal.SIGKILL)  # not reaped yet, so it is still that process
                kill_at = time.monotonic() + _KILL_AGAIN_S
            self._sleep(kill_at)

    def _tail(self, lines: int = 12) -> str:
        """What the program wrote last, as the end of a message."""
        size = os.fstat(self._log_fd).st_size
        with self._program.log_path.open("rb") as log:
            log.seek(max(self._log_start, size - _TAIL_BYTES))
            written = log.read().decode(errors="replace").splitlines()
        if not written:
            return "It wrote nothing"
        return "\n  | ".join([f"The end of {self._program.log_path}:", *written[-lines:]])


def _children() -> list[int]:
    """The children of this process, adopted ones too."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return found
