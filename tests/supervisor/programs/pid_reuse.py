"""In a pid namespace of its own: kills supervisor and guardian, lets another process have the supervisor's pid, and
stops the activation. Exits 0 when the other process lives."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.supervisor.rig import Activation, eventually, kill


def taken_again(pid: int) -> subprocess.Popen[bytes]:
    """A process that has this very pid."""
    for _ in range(50):
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        process = subprocess.Popen(["sleep", "60"])
        if process.pid == pid:
            return process
        process.kill()
        process.wait()
    raise RuntimeError("the kernel gave other pids")


def main(program: str, folder: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    activation = Activation(program=Path(program), folder=Path(folder), uid=0)
    answer = activation.launch("sleep", "60")
    assert answer.detail is not None
    assert answer.detail.guardian is not None
    assert answer.detail.supervisor is not None
    pid = answer.detail.supervisor.pid
    os.kill(answer.detail.guardian.pid, signal.SIGSTOP)
    kill(answer.detail.guardian.pid, pid)
    # Their parent was the `run` that has ended: now it is this process, PID 1 of its namespace.
    assert eventually(lambda: reaped() or not Path(f"/proc/{pid}").exists())
    assert eventually(lambda: not Path(f"/proc/{pid}").exists() or reaped())
    time.sleep(0.05)  # so that the start time, in ticks of 10 ms, differs
    other = taken_again(pid)
    ended = activation.stop(sweep=True)
    assert ended.state == "lost", ended
    assert activation.left() == []
    assert other.poll() is None, "the new owner of the pid was killed"
    other.kill()
    other.wait()
    sys.stdout.write("the pid was used again and its new owner lives\n")


def reaped() -> bool:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


if __name__ == "__main__":
    main(*sys.argv[1:])
