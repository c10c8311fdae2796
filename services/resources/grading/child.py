"""The program of a grading child: reads requests from standard input, one at a time, until it ends.

It may be killed at any moment. It ends with its server in every case: idle, by the end of its input;
busy, by the kernel (Linux: the parent's death signal; elsewhere: a limit on processor time).
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO

from services.resources.grading.protocol import BROKEN, GOLD_MEMORY, GOLD_READ, READY, Outcome, Result

_PR_SET_PDEATHSIG = 1
_MIB = 1024 * 1024
_NICENESS = 5


def main() -> None:
    _end_with_parent(int(sys.argv[1]))
    # The server's loop goes first when processors are scarce.
    os.nice(_NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    # Whatever a library prints must not stand between the answers.
    os.dup2(2, 1)
    try:
        from services.resources.grading import comparison
    except Exception as error:  # noqa: BLE001 - told to the server, which raises it
        _say(answers, BROKEN, f"{type(error).__name__}: {error}")
        return
    _say(answers, READY)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        _limit(request)
        with _cpu_limit(request["timeout_s"]):
            word, detail, spent = _answer(comparison.compare, request, answers)
        _say(answers, word, detail, spent=spent)
        if spent:
            return


def _answer(compare: Any, request: dict[str, Any], answers: BinaryIO) -> tuple[str, str | None, bool]:
    """The result, and whether this process should not be used again."""
    gold_read = False

    def gold_was_read() -> None:
        nonlocal gold_read
        gold_read = True
        _say(answers, GOLD_READ)

    try:
        result: Result = compare(request["gold"], request["answer"], gold_was_read)
    except MemoryError:
        return (Outcome.MEMORY if gold_read else GOLD_MEMORY), None, True
    return result.word, result.detail, _peak_kib() > request["memory_mib"] * 1024 / 2


def _peak_kib() -> int:
    """The most memory that this program held; what `getrusage` tells begins with its parent's size on Linux."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(status.partition("VmHWM:")[2].split(maxsplit=1)[0])


def _say(answers: BinaryIO, word: str, detail: str | None = None, *, spent: bool = False) -> None:
    answers.write(json.dumps({"word": word, "detail": detail, "spent": spent}).encode() + b"\n")


def _limit(request: dict[str, Any]) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (request["memory_mib"] * _MIB, hard))


@contextlib.contextmanager
def _cpu_limit(timeout_s: float) -> Any:
    """A backstop for a server that cannot kill: the signal's default action ends the process, also inside C code."""
    signal.setitimer(signal.ITIMER_PROF, 2 * timeout_s + 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _end_with_parent(parent_pid: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        # The server died before the signal was armed.
        sys.exit(0)


if __name__ == "__main__":
    main()
