"""A program that forks `paddock` commands from one process which has imported all services already.

A dozen services then start in the time of one. Orders come on standard input, one JSON object a line:
`{"id": ID, "command": [WORD, …], "log": PATH}`. What happens goes to standard output in the same form:
`{"id": ID, "pid": PID}` for a start, `{"id": ID, "status": STATUS}` for an end, negative for a signal. All children
end with this process, and it ends with its standard input.
"""

import os
import select
import sys
from pathlib import Path
from typing import Any

import orjson

from services.cli import main
from services.launcher.fork import Child, fork_child
from services.launcher.signals import SignalInbox
from services.launcher.workers import preload
from shared.settings import SERVICE_NAMES


class Nursery:
    def __init__(self) -> None:
        self._children: dict[int, tuple[int, int]] = {}

    def run(self) -> None:
        preload(SERVICE_NAMES)
        with SignalInbox() as inbox:
            poll = select.poll()
            for fd in (0, inbox.fileno()):
                poll.register(fd, select.POLLIN)
            orders = b""
            while inbox.stop_signal is None:
                readable = {fd for fd, _ in poll.poll()}
                inbox.drain()
                self._reap()
                if 0 not in readable:
                    continue
                if not (read := os.read(0, 65_536)):
                    return
                *whole, orders = (orders + read).split(b"\n")
                for order in whole:
                    self._start(orjson.loads(order))

    def _start(self, order: dict[str, Any]) -> None:
        number = order["id"]

        def live(_ready: Any) -> int:
            log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            for fd in (1, 2):
                os.dup2(log, fd)
            return main(order["command"])

        def register(pid: int, report_fd: int) -> None:
            self._children[pid] = (number, report_fd)
            _tell(id=number, pid=pid)

        fork_child(Child(Path(order["log"]).stem, live), (), register, lambda: None)

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            number, report_fd = self._children.pop(pid)
            os.close(report_fd)
            _tell(id=number, status=os.waitstatus_to_exitcode(status))


def _tell(**said: int) -> None:
    os.write(1, orjson.dumps(said) + b"\n")


if __name__ == "__main__":
    Nursery().run()
    sys.exit(0)
