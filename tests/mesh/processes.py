"""The `paddock` command as real processes: one that ends by itself, `paddock up`, and one process per service.

No variable of the caller's configuration reaches them, and every process that is started here carries a
mark in its environment by which all that descends from it is found.
"""

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from tests.serving import free_port

REPOSITORY = Path(__file__).parents[2]
PADDOCK = (sys.executable, "-m", "services.cli")
SERVICES = ("environment", "agent", "model_proxy", "resources")
MARK = "PADDOCK_TEST_MARK"
START_S = 60.0
COMMAND_S = 90.0


def clean(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment without the caller's PADDOCK_ variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PADDOCK_")}
    return {**kept, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "160", **(environ or {})}


def new_mark() -> str:
    return f"mesh-test-{secrets.token_hex(8)}"


def marked(mark: str) -> list[psutil.Process]:
    """The living processes that carry the mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def wait_until_none(mark: str, bound_s: float, tree: Sequence[psutil.Process] = ()) -> list[psutil.Process]:
    """What still lives with this mark, or of this tree, after `bound_s`; empty as soon as nothing does.

    A zombie does not live: where the parent was killed, to reap it is the affair of the machine's init.
    """
    deadline = time.monotonic() + bound_s
    while left := [*marked(mark), *(process for process in tree if _lives(process))]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return left


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def tree_of(pid: int) -> list[psutil.Process]:
    """All that descends from a process, also those that were given an environment without the mark."""
    found: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    return found


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def told(self) -> str:
        return self.out + self.err


def paddock(
    *arguments: object, cwd: Path, environ: Mapping[str, str] | None = None, bound_s: float = COMMAND_S
) -> Done:
    """Run a command to its end."""
    done = subprocess.run(
        [*PADDOCK, *map(str, arguments)],
        cwd=cwd,
        env=clean({"PADDOCK_STATE_DIR": str(cwd / "state"), **(environ or {})}),
        capture_output=True,
        text=True,
        timeout=bound_s,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


@dataclass
class Running:
    """A process of ours that goes on; its output lies in files, so that nothing waits for a reader."""

    process: subprocess.Popen[bytes]
    out_path: Path
    err_path: Path
    mark: str

    @property
    def out(self) -> str:
        return self.out_path.read_text()

    @property
    def err(self) -> str:
        return self.err_path.read_text()

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait(10.0)

    def ended(self, bound_s: float) -> int:
        """Its exit status, negative for a signal.

        Raises:
            TimeoutExpired: it goes on.
        """
        return self.process.wait(bound_s)

    def wait_for_line(self, pattern: str, bound_s: float = START_S) -> re.Match[str]:
        """The first match in its standard output."""
        deadline = time.monotonic() + bound_s
        while (found := re.search(pattern, self.out, re.MULTILINE)) is None:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"'{pattern}' was not printed.\n{self.out}\n{self.err}")
            time.sleep(0.02)
        return found


@contextlib.contextmanager
def running(*arguments: object, cwd: Path, environ: Mapping[str, str], name: str = "command") -> Iterator[Running]:
    """A command in a session of its own; it and all that descends from it are gone afterwards."""
    mark = environ.get(MARK) or new_mark()
    out_path, err_path = cwd / f"{name}.out", cwd / f"{name}.err"
    with out_path.open("ab") as out, err_path.open("ab") as err:
        process = subprocess.Popen(
            [*PADDOCK, *map(str, arguments)],
            cwd=cwd,
            env=clean({"PADDOCK_STATE_DIR": str(cwd / "state"), **environ, MARK: mark}),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    try:
        yield Running(process, out_path, err_path, mark)
    finally:
        process.kill()
        process.wait(10.0)
        if not environ.get(MARK):
            for left in wait_until_none(mark, 3.0):
                left.kill()


FREE_PORTS = {f"PADDOCK_{name.upper()}_URL": "http://127.0.0.1:0" for name in SERVICES}


@dataclass
class UpMesh:
    """`paddock up`, ready."""

    running: Running
    urls: dict[str, str]

    @property
    def url(self) -> str:
        return self.urls["environment"]

    @property
    def told(self) -> str:
        return self.running.out + self.running.err


@contextlib.contextmanager
def up(*arguments: object, cwd: Path, environ: Mapping[str, str] | None = None, name: str = "up") -> Iterator[UpMesh]:
    """`paddock up` on free ports."""
    with running("up", *arguments, cwd=cwd, environ={**FREE_PORTS, **(environ or {})}, name=name) as launched:
        launched.wait_for_line("^All services are ready")
        urls = dict(re.findall(r"^(\w+) +(http://\S+)$", launched.out, re.MULTILINE))
        yield UpMesh(launched, urls)


@dataclass
class ServedMesh:
    """One `paddock serve` process per service, each of which can be killed and started again."""

    cwd: Path
    environ: dict[str, str]
    ports: dict[str, int]
    mark: str = field(default_factory=new_mark)
    services: dict[str, Running] = field(default_factory=dict)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def start(self, *names: str) -> None:
        """Start them at once and wait until all are ready."""
        for name in names:
            arguments = ("serve", name.replace("_", "-"), "--port", self.ports[name])
            environ = {**self.environ, MARK: self.mark}
            self.services[name] = self._stack.enter_context(
                running(*arguments, cwd=self.cwd, environ=environ, name=name)
            )
        for name in names:
            wait_ready(self.url(name), self.services[name])

    def close(self) -> None:
        self._stack.close()


def wait_ready(url: str, service: Running) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/readyz", trust_env=False).status_code == 200:
                return
        if service.process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"{url} did not become ready.\n{service.err}")
        time.sleep(0.05)


@contextlib.contextmanager
def served(
    *, cwd: Path, environ: Mapping[str, str], ports: Mapping[str, int] | None = None, **peers: str
) -> Iterator[ServedMesh]:
    """Four processes on free ports; `peers` are addresses that others use instead of a service's own."""
    ports = {name: free_port() for name in SERVICES} | dict(ports or {})
    urls = {name: peers.get(name, f"http://127.0.0.1:{port}") for name, port in ports.items()}
    addresses = {f"PADDOCK_{name.upper()}_URL": url for name, url in urls.items()}
    mesh = ServedMesh(cwd, {**addresses, **environ}, ports)
    try:
        mesh.start(*SERVICES)
        yield mesh
    finally:
        mesh.close()
