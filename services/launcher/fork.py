"""One child process: what happens around `fork`, on both sides.

Stop signals are blocked from before the fork until the child is registered (launcher's side) or has shed
the launcher's handlers (child's side); a request that comes meanwhile waits in the kernel. When and why a
child is started or stopped is the supervisor's business.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NoReturn

from services.launcher.signals import STOP_SIGNALS

READY = b"\x06"
REASON_LIMIT = 2000
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded once, before any fork


@dataclass(frozen=True, slots=True)
class Child:
    """What runs in one child process."""

    name: str
    run: Callable[[Callable[[], None]], int]
    """Its work. Given a function to call once it can serve; returns the exit status. Raise `SystemExit`
    with a sentence for a failure that needs no traceback."""
    listeners: tuple[socket.socket, ...] = ()
    """Bound sockets that this child serves. The launcher keeps them open over restarts and closes its
    copies when a stop begins."""
    start_stage: int = 0
    """It is started once everything of the stages before is ready."""
    start_timeout_s: float | None = None
    """How long it may take to be ready, where that differs from the others."""
    stop_stage: int = 0
    """It is asked to stop once everything of the stages before has ended, or the time of those is over."""
    own_session: bool = True
    """Whether it leaves its parent's session and process group."""


def fork_child(
    child: Child, strange: Iterable[socket.socket], register: Callable[[int, int], None], after_fork: Callable[[], None]
) -> None:
    """Start `child` and register it with its pid and the readable end of its report.

    `strange` are sockets that it must not keep. `after_fork` runs in the launcher before the registration
    (tests hold the launcher there). To be called from the main thread: the kernel ends a child when the
    thread that forked it ends.
    """
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    _flush()
    launcher = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            _live(child, launcher, write_fd, strange)
        try:
            after_fork()
        finally:
            register(pid, read_fd)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(write_fd)


def told_end(wait_status: int) -> str:
    """How a process ended, as in `ended with exit status 0` or `was ended by SIGKILL`."""
    code = os.waitstatus_to_exitcode(wait_status)
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"was ended by signal {-code}"


def _live(child: Child, launcher: int, report_fd: int, strange: Iterable[socket.socket]) -> NoReturn:
    """The whole life of the child; nothing returns or raises into the launcher's code from here."""
    status = 1
    try:
        _leave_the_launcher(launcher, strange, own_session=child.own_session)
        status = child.run(lambda: _report(report_fd, READY))
    except SystemExit as leave:
        status = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
        if isinstance(leave.code, str):
            _report(report_fd, leave.code.encode()[:REASON_LIMIT])
    except BaseException as error:  # noqa: BLE001 - the child's edge: whatever it is, it is told and the process ends
        traceback.print_exc()
        _report(report_fd, f"{type(error).__name__}: {error}".encode()[:REASON_LIMIT])
    finally:
        _flush()
        os._exit(status if 0 <= status <= 255 else 1)


def signal_when_parent_ends(number: signal.Signals) -> None:
    """Have the kernel send `number` to this process when its parent ends; outlives an `exec`."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of all that descend from this process when their own parents end."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _leave_the_launcher(launcher: int, strange: Iterable[socket.socket], *, own_session: bool) -> None:
    """End with the launcher, leave its terminal, drop its handlers and sockets; then let signals in."""
    signal_when_parent_ends(signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)  # it died before the line above
    if own_session:
        os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (*STOP_SIGNALS, signal.SIGCHLD):
        if number in (signal.SIGINT, signal.SIGHUP):
            # A Ctrl-C that still met the launcher's group: the launcher passes it on as the one stop request.
            signal.signal(number, signal.SIG_IGN)
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for listener in strange:
        listener.close()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _flush() -> None:
    """What is buffered is written once, by the process that buffered it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed by whoever reads or owns it
            stream.flush()


def _report(report_fd: int, text: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(report_fd, text)
