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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from services.launcher.children import KILL_AFTER_S, OnDeath, Supervisor
from services.launcher.fork import Child
from services.launcher.program import Program, keep
from services.launcher.signals import SignalInbox

# Whoever runs the tests may ignore it, as nohup does, and that is inherited.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ENGINE = [sys.executable, "-I", "-S", str(Path(__file__).with_name("engine.py"))]
GATE = os.dup(0)  # a child's own input is nothing


@dataclass(frozen=True)
class Plan:
    """What the launcher runs.

    `hold` names the child after whose fork the launcher waits for a byte on its input, or the engine after
    whose fork its keeper does; with `hold_young` every child does so before its first own step. `engines` are
    programs by the name of their keeper; see `program`. Stages are by name, 0 where none is given.
    """

    children: dict[str, str]
    on_death: OnDeath = "end"
    start_timeout_s: float = 20.0
    stop_times_s: tuple[float, ...] = (KILL_AFTER_S,)
    start_stages: dict[str, int] = field(default_factory=dict)
    stop_stages: dict[str, int] = field(default_factory=dict)
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
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


def takes_its_time(name: str, ready: Callable[[], None]) -> int:
    """Ends when the test says so, some time after the signal."""
    serve(name, ready)
    os.read(GATE, 1)
    tell(f"left {name}")
    return 0


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
    one.__name__: one for one in (serve, stubborn, mute, refuses, crashes, leaves_with_7, takes_its_time, has_a_worker)
}


def program(name: str, port: int, folder: str, *arguments: str, **fields: Any) -> Program:
    """A test's engine; `fields` take the place of the usual ones."""
    usual: dict[str, Any] = {
        "name": name,
        "command": [*ENGINE, "--port", str(port), *arguments],
        "environ": dict(os.environ),
        "ready_url": f"http://127.0.0.1:{port}/health",
        "ready_timeout_s": 20.0,
        "stop_grace_s": 1.0,
        "log_path": f"{folder}/{name}.log",
    }
    given = usual | fields
    return Program(**{**given, "log_path": Path(given["log_path"]), "command": tuple(given["command"])})


def kept(plan: Plan, name: str, ready: Callable[[], None]) -> int:
    tell(f"up {name} {os.getpid()}")
    given = dict(plan.engines[name])
    run = program(name, given.pop("port"), given.pop("folder"), *given.pop("arguments", ()), **given)
    return keep(run, ready, lambda sentence: tell(f"say {sentence}"), lambda: held(plan)(f"engine of {name}"))


def child(plan: Plan, name: str, behaviour: str) -> Child:
    stages = plan.start_stages.get(name, 0), plan.stop_stages.get(name, 0)
    return replace(bare_child(plan, name, behaviour), start_stage=stages[0], stop_stage=stages[1])


def bare_child(plan: Plan, name: str, behaviour: str) -> Child:
    if behaviour == "answers":
        listener = socket.create_server(("127.0.0.1", 0))
        tell(f"listening {name} {listener.getsockname()[1]}")
        return Child(name, lambda ready: answers(name, ready, listener), (listener,))
    if behaviour == "kept":
        return Child(name, lambda ready: kept(plan, name, ready))
    return Child(name, lambda ready: BEHAVIOURS[behaviour](name, ready))


def held(plan: Plan) -> Callable[[str], None]:
    """Hold whoever has just forked this, until the test sends a byte."""

    def after_fork(name: str) -> None:
        if name == plan.hold:
            tell(f"held {name}")
            os.read(GATE, 1)

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
    children = [child(plan, name, behaviour) for name, behaviour in plan.children.items()]
    with SignalInbox() as inbox:
        tell("taken")
        supervisor = Supervisor(
            children,
            inbox,
            say=lambda sentence: tell(f"say {sentence}"),
            on_ready=lambda: tell("ready"),
            on_death=plan.on_death,
            start_timeout_s=plan.start_timeout_s,
            stop_times_s=plan.stop_times_s,
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
