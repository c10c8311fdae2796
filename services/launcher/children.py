"""Starts named children, waits until all are ready, watches them and stops them: one loop, one thread.

What a child does is not known here. There is no event loop and no thread, because a process forks safely
only while it has neither. The process belongs to the supervisor: it reaps whatever becomes its child.
"""

import contextlib
import math
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from services.launcher.fork import READY, Child, fork_child, told_end
from services.launcher.signals import SignalInbox

OnDeath = Literal["end", "restart"]

RESTART_PAUSES_S = (0.0, 1.0, 3.0)
RESTARTS = len(RESTART_PAUSES_S)
RESTART_WINDOW_S = 60.0
KILL_AFTER_S = 4.5
REAP_S = 0.4
_READ_BYTES = 4096


@dataclass(slots=True)
class _Running:
    child: Child
    pid: int
    report_fd: int
    ready_by: float
    ready: bool = False
    report_open: bool = True
    said: bytearray = field(default_factory=bytearray)

    def hear(self) -> None:
        """Take in what the child has reported: that it is ready, or why it fails."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.report_fd, _READ_BYTES):
                self.said += data
            self.report_open = False
        if READY in self.said:
            self.ready, self.said = True, self.said.replace(READY, b"")

    def kill(self) -> None:
        """End it and its own children with KILL; no error when they have ended."""
        for end in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                end(self.pid, signal.SIGKILL)

    def obituary(self, wait_status: int) -> str:
        """Who ended, how, and the reason that it gave."""
        when = "" if self.ready else " before it was ready"
        reason = self.said.decode(errors="replace").rstrip(".")
        return f"{self.child.name} (pid {self.pid}) {told_end(wait_status)}{when}" + (f": {reason}." if reason else ".")


class Supervisor:
    """Runs `children` until a stop signal, the end of the lifeline, or a death that ends the mesh.

    `say` gets one sentence per event. `on_death` decides about a child that ends after all were ready:
    end the mesh, or start the child again, three times within 60 s. `after_fork` runs with the child's name
    between its fork and its registration. `lifeline_fd` becomes readable when whoever wants the mesh is gone.
    `stop_times_s` holds for each stop stage when its time is over, counted from the beginning of the stop; at
    the last of them everything that is left is killed.
    """

    def __init__(
        self,
        children: Sequence[Child],
        inbox: SignalInbox,
        *,
        say: Callable[[str], None],
        on_ready: Callable[[], None],
        on_death: OnDeath,
        start_timeout_s: float = 60.0,
        stop_times_s: Sequence[float] = (KILL_AFTER_S,),
        lifeline_fd: int | None = None,
        after_fork: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._children = tuple(children)
        self._inbox = inbox
        self._say_to = say
        self._on_ready = on_ready
        self._on_death = on_death
        self._start_timeout_s = start_timeout_s
        self._stop_times_s = tuple(stop_times_s)
        self._lifeline_fd = lifeline_fd
        self._after_fork = after_fork
        self._running: dict[int, _Running] = {}
        self._later = sorted(children, key=lambda child: child.start_stage)
        self._due: list[tuple[float, Child]] = []
        self._deaths: dict[str, deque[float]] = {child.name: deque() for child in children}
        self._all_were_ready = False
        self._status: int | None = None

    def run(self) -> int:
        """The whole life of the mesh; every child is gone when it returns.

        Returns the exit status: 128 + the stop signal's number, or 1 when a child's death ended the mesh.
        """
        try:
            while (status := self._status) is None:
                self._open_next_stage()
                self._start_what_is_due()
                reports = [one.report_fd for one in self._running.values() if one.report_open and not one.ready]
                lifeline = [] if self._lifeline_fd is None else [self._lifeline_fd]
                if self._wait(self._next_deadline(), [*reports, *lifeline]).intersection(lifeline):
                    self._status = 128 + signal.SIGTERM
                self._look()
        finally:
            self._stop()
        return status

    def _open_next_stage(self) -> None:
        """The next ones are due when all before them are ready."""
        if self._later and not self._due and all(one.ready for one in self._running.values()):
            stage = self._later[0].start_stage
            self._due = [(0.0, child) for child in self._later if child.start_stage == stage]
            self._later = [child for child in self._later if child.start_stage > stage]

    def _start_what_is_due(self) -> None:
        for due in [due for due in self._due if due[0] <= time.monotonic()]:
            if self._noticed_stop():
                return
            self._due.remove(due)
            self._start(due[1])

    def _start(self, child: Child) -> None:
        def register(pid: int, report_fd: int) -> None:
            ready_by = time.monotonic() + self._time_to_start_s(child)
            self._running[pid] = _Running(child, pid, report_fd, ready_by)

        strange = [one for other in self._children for one in other.listeners if one not in child.listeners]
        fork_child(child, strange, register, lambda: self._after_fork(child.name))

    def _time_to_start_s(self, child: Child) -> float:
        return self._start_timeout_s if child.start_timeout_s is None else child.start_timeout_s

    def _next_deadline(self) -> float:
        deadlines = [at for at, _ in self._due] + [one.ready_by for one in self._running.values() if not one.ready]
        return min(deadlines, default=math.inf)

    def _wait(self, until: float, fds: Iterable[int] = ()) -> set[int]:
        """Sleep until a signal, something on `fds`, or `until`; which of `fds` it was."""
        poll = select.poll()
        for fd in (self._inbox.fileno(), *fds):
            poll.register(fd, select.POLLIN)
        events = poll.poll(None if until == math.inf else max(0.0, until - time.monotonic()) * 1000)
        self._inbox.drain()
        return {fd for fd, _ in events}

    def _noticed_stop(self) -> bool:
        if self._status is None and self._inbox.stop_signal is not None:
            self._status = 128 + self._inbox.stop_signal
        return self._status is not None

    def _look(self) -> None:
        """Act on what happened: a stop signal first, then reports, deaths and late starters."""
        if self._noticed_stop():
            return
        for one in self._running.values():
            if not one.ready:
                one.hear()
        for one, wait_status in self._reap():
            self._decide(one, one.obituary(wait_status))
        for one in self._running.values():
            if not one.ready and one.ready_by <= time.monotonic():
                self._give_up_on(one)
        if not self._all_were_ready and sum(one.ready for one in self._running.values()) == len(self._children):
            self._all_were_ready = True
            with contextlib.suppress(OSError):
                self._on_ready()

    def _decide(self, one: _Running, obituary: str) -> None:
        """End the mesh after a death, or plan the next start of that child."""
        if self._status is not None:
            self._say(obituary)
            return
        if not self._all_were_ready or self._on_death == "end":
            self._say(f"{obituary} The others are stopped.")
            self._status = 1
            return
        now = time.monotonic()
        recent = self._deaths[one.child.name]
        while recent and recent[0] < now - RESTART_WINDOW_S:
            recent.popleft()
        if len(recent) == RESTARTS:
            self._say(
                f"{obituary} It was the {RESTARTS + 1}th time within {RESTART_WINDOW_S:g} s. The others are stopped."
            )
            self._status = 1
            return
        self._due.append((now + RESTART_PAUSES_S[len(recent)], one.child))
        recent.append(now)
        self._say(f"{obituary} It is started again ({len(recent)} of {RESTARTS} within {RESTART_WINDOW_S:g} s).")

    def _give_up_on(self, one: _Running) -> None:
        """It was not ready in time: its end by KILL is then a death like any other."""
        one.said += f"not ready within {self._time_to_start_s(one.child):g} s.".encode()
        one.ready_by = math.inf
        one.kill()

    def _reap(self) -> list[tuple[_Running, int]]:
        """Children that ended. What they left in their process group is ended while their pid is still taken."""
        ended: list[tuple[_Running, int]] = []
        with contextlib.suppress(ChildProcessError):
            while info := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                one = self._running.pop(info.si_pid, None)
                if one is not None:
                    one.hear()
                    one.kill()
                _, wait_status = os.waitpid(info.si_pid, 0)
                if one is not None:
                    os.close(one.report_fd)
                    ended.append((one, wait_status))
        return ended

    def _stop(self) -> None:
        """One TERM to every child, stage by stage; KILL at the end. Further stop signals change nothing here."""
        for child in self._children:
            for listener in child.listeners:
                listener.close()
        began = time.monotonic()
        for stage, over_s in enumerate(self._stop_times_s):
            for one in self._running.values():
                if one.child.stop_stage == stage:
                    os.kill(one.pid, signal.SIGTERM)
            self._outwait(began + over_s, stage)
        kill_after_s = self._stop_times_s[-1]
        for one in self._running.values():
            self._say(f"{one.child.name} (pid {one.pid}) did not end within {kill_after_s:g} s and is killed.")
            one.kill()
        self._outwait(time.monotonic() + REAP_S, len(self._stop_times_s))
        for one in self._running.values():
            self._say(f"{one.child.name} (pid {one.pid}) could not be ended; the kernel holds it.")

    def _outwait(self, deadline: float, stage: int) -> None:
        """Reap until no child up to this stop stage is left, or the deadline has passed."""
        self._reap()
        while any(one.child.stop_stage <= stage for one in self._running.values()) and time.monotonic() < deadline:
            self._wait(deadline)
            self._reap()

    def _say(self, sentence: str) -> None:
        with contextlib.suppress(OSError):  # a closed terminal or pipe is no reason to end, or not to end, children
            self._say_to(sentence)
