"""A launcher with tiny children, run as a process of its own: `python -m tests.launcher.driver PLAN`.

Everything that happens is a line on standard output, which the children share: the end of that stream
means that no process of the launcher is left.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from services.launcher.children import OnDeath, Supervisor
from services.launcher.fork import Child
from services.launcher.signals import SignalInbox

# Whoever runs the tests may ignore it, as nohup does, and that is inherited.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Plan:
    """What the launcher runs.

    `hold` names the child after whose fork the launcher waits for a byte on its input; with `hold_young`
    every child does so before its first own step.
    """

    children: dict[str, str]
    on_death: OnDeath = "end"
    start_timeout_s: float = 20.0
    kill_after_s: float = 4.5
    hold: str | None = None
    naive: bool = False
    terminal: str | None = None
    lifeline: bool = False
    hold_young: bool = False


def tell(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def serve(name: str, ready: Callable[[], None], *, stubborn: bool = False) -> int:
    """Tell every signal; end at the first one unless stubborn."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    tell(f"up {name} {os.getpid()}")
    ready()
    while True:
        number = signal.sigwait(HEARD)
        tell(f"signal {name} {signal.Signals(number).name}")
        if not stubborn:
            return 0


def stubborn(name: str, ready: Callable[[], None]) -> int:
    return serve(name, ready, stubborn=True)


def mute(name: str, ready: Callable[[], None]) -> int:
    """Never ready."""
    return serve(name, lambda: None)


def refuses(name: str, ready: Callable[[], None]) -> int:
    raise SystemExit(f"the key of {name} is missing")


def crashes(name: str, ready: Callable[[], None]) -> int:
    raise ValueError(f"{name} met a bug")


def leaves_with_7(name: str, ready: Callable[[], None]) -> int:
    """Like `serve`, but with another status at its end."""
    serve(name, ready)
    return 7


def has_a_worker(name: str, ready: Callable[[], None]) -> int:
    """Has a process of its own that holds the shared output and heeds no stop request."""
    worker = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32)); signal.sigwait({signal.SIGUSR1})"
    with subprocess.Popen([sys.executable, "-S", "-c", worker], stdout=1) as process:
        tell(f"worker {name} {process.pid}")
        status = serve(name, ready)
        os._exit(status)


def answers(name: str, ready: Callable[[], None], listener: socket.socket) -> int:
    """Answers every connection with its pid, until TERM."""
    tell(f"up {name} {os.getpid()}")
    ready()
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(str(os.getpid()).encode())


BEHAVIOURS: dict[str, Callable[[str, Callable[[], None]], int]] = {
    one.__name__: one for one in (serve, stubborn, mute, refuses, crashes, leaves_with_7, has_a_worker)
}


def child(name: str, behaviour: str) -> Child:
    if behaviour == "answers":
        listener = socket.create_server(("127.0.0.1", 0))
        tell(f"listening {name} {listener.getsockname()[1]}")
        return Child(name, lambda ready: answers(name, ready, listener), (listener,))
    return Child(name, lambda ready: BEHAVIOURS[behaviour](name, ready))


def held(plan: Plan) -> Callable[[str], None]:
    """Hold the launcher after the fork of one child, until the test sends a byte."""

    def after_fork(name: str) -> None:
        if name == plan.hold:
            tell(f"held {name}")
            os.read(0, 1)

    return after_fork


def hold_when_young() -> None:
    tell(f"young {os.getpid()}")
    os.read(0, 1)


def run_naive(plan: Plan) -> int:
    """The launcher as one writes it first: the handler raises, and a child is noted after its start."""
    pids: list[int] = []

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    tell("taken")
    try:
        for name, behaviour in plan.children.items():
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os._exit(BEHAVIOURS[behaviour](name, lambda: None))
            held(plan)(name)
            pids.append(pid)
        signal.pause()
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)
    return 0


def run(plan: Plan) -> int:
    children = [child(name, behaviour) for name, behaviour in plan.children.items()]
    with SignalInbox() as inbox:
        tell("taken")
        supervisor = Supervisor(
            children,
            inbox,
            say=lambda sentence: tell(f"say {sentence}"),
            on_ready=lambda: tell("ready"),
            on_death=plan.on_death,
            start_timeout_s=plan.start_timeout_s,
            kill_after_s=plan.kill_after_s,
            lifeline_fd=0 if plan.lifeline else None,
            after_fork=held(plan),
        )
        status = supervisor.run()
    tell("stopped")
    return status


def main() -> int:
    plan = Plan(**json.loads(sys.argv[1]))
    if plan.terminal is not None:
        os.open(plan.terminal, os.O_RDWR)  # the first terminal that a session leader opens controls it
    if plan.hold_young:
        os.register_at_fork(after_in_child=hold_when_young)
    return run_naive(plan) if plan.naive else run(plan)


if __name__ == "__main__":
    sys.exit(main())
