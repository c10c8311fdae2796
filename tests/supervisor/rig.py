"""Runs the real supervisor in private folders of this machine, as root and as another user, and finds what is left."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from shared.supervisor.protocol import MARKER, Commands, ExitStatus, LaunchRequest, Survivors, new_key
from shared.supervisor.receipt import Answer, Proof, Receipt, proof_of

CALL_TIMEOUT_S = 60.0
WITHIN_S = 20.0
OTHER_UID = 1000
STOP_WAIT_S = 20.0


def users() -> list[int]:
    """Root and another user where this is root, else only who this is."""
    return [0, OTHER_UID] if os.geteuid() == 0 else [os.geteuid()]


def eventually(what: Callable[[], bool], within_s: float = WITHIN_S) -> bool:
    """Whether it comes true in time; /proc and files of other processes send no events."""
    deadline = time.monotonic() + within_s
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def alive(pid: int) -> bool:
    """A process whose first thread has ended counts while another thread lives."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return fields[0] not in "ZX" or int(fields[17]) > 1


def start_time(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def memory_kib(pid: int, what: str) -> int:
    """One of the sizes in `/proc/<pid>/status`, such as VmRSS or, at its highest, VmHWM."""
    return int(Path(f"/proc/{pid}/status").read_text().partition(f"{what}:")[2].split()[0])


def ticks(*pids: int) -> int:
    """Processor time that was used, in clock ticks."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats)


def named(name: str) -> list[int]:
    """Living processes of that name."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if (folder / "comm").read_text(errors="replace").strip() == name and alive(int(folder.name)):
                found.append(int(folder.name))
    return found


def carrying(nonces: Collection[str]) -> list[int]:
    """Living processes whose environment holds the marker with one of the nonces."""
    markers = {f"{MARKER}={nonce}".encode() for nonce in nonces}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if markers & set((folder / "environ").read_bytes().split(b"\0")):
                found.append(int(folder.name))
    return found


def running(program: Path) -> list[int]:
    """Processes of this very program."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (folder / "exe").readlink() == program:
                found.append(int(folder.name))
    return found


def kill(*pids: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@dataclass
class Activation:
    """One activation folder and who calls for it. `uid` is whose user the supervisor's commands run under."""

    program: Path
    folder: Path
    uid: int
    key: bytes = field(default_factory=new_key)
    fence: int = 1
    launcher: Sequence[str] = ()
    """What goes before each command line: `seccomped` and its arguments."""
    nonces: set[str] = field(default_factory=set)
    policy: Survivors = "drain"
    launch_seen: bool = False

    @property
    def commands(self) -> Commands:
        return Commands(str(self.program), str(self.folder), self.fence)

    def spawn(self, argv: Sequence[str], *, uid: int | None = None) -> subprocess.Popen[bytes]:
        user = self.uid if uid is None else uid
        as_root = os.geteuid() == 0
        return subprocess.Popen(
            [*self.launcher, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env={"PATH": os.defpath, "PROBE": "inherited"},
            user=user if as_root else None,
            group=user if as_root else None,
            extra_groups=[] if as_root else None,
        )

    def call(
        self, argv: Sequence[str], stdin: bytes = b"", *, uid: int | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """A command to its end. A daemon that kept our pipes would make this time out."""
        process = self.spawn(argv, uid=uid)
        try:
            out, err = process.communicate(stdin, CALL_TIMEOUT_S)
        finally:
            process.kill()
            process.wait()
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def ask(
        self,
        argv: Sequence[str],
        stdin: bytes = b"",
        *,
        uid: int | None = None,
        expect: Sequence[ExitStatus] = (ExitStatus.DONE, ExitStatus.UNPROVEN),
    ) -> Answer:
        done = self.call(argv, stdin, uid=uid)
        assert done.returncode in expect, (done.returncode, done.stdout, done.stderr)
        answer = Answer.read(done.stdout)
        if answer.detail:
            self.nonces.add(answer.detail.nonce)
        return answer

    def request(self, *command: str, **options: object) -> LaunchRequest:
        given = {"grace_s": 0.3, "survivors": self.policy, **options}
        return LaunchRequest.model_validate({"activation_id": "act-1", "command": command, **given})

    def prepare(self) -> None:
        self.ask(self.commands.prepare())

    def launch(self, *command: str, **options: object) -> Answer:
        """Prepare and run."""
        self.prepare()
        return self.run(self.request(*command, **options))

    def run(self, request: LaunchRequest) -> Answer:
        self.policy = request.survivors
        answer = self.ask(self.commands.run(), request.frame(self.key), expect=[ExitStatus.DONE])
        self.launch_seen |= answer.state == "running"
        return answer

    def wait(self, wait_s: float = WITHIN_S) -> Answer:
        return self.ask(self.commands.wait(wait_s))

    def stop(self, *, sweep: bool = False, uid: int | None = None) -> Answer:
        return self.ask(self.commands.stop(STOP_WAIT_S, sweep=sweep), uid=uid)

    def status(self) -> Answer:
        return self.ask(self.commands.status())

    def proof(self, answer: Answer) -> Proof:
        return proof_of(answer, activation_id="act-1", key=self.key, policy=self.policy, launch_seen=self.launch_seen)

    def receipt(self, answer: Answer) -> Receipt:
        """The receipt of an answer that proves a cleanup, without a gap."""
        proof = self.proof(answer)
        assert proof.confirmed, (proof.why, answer)
        assert proof.receipt is not None
        assert proof.receipt.gaps == ()
        return proof.receipt

    def output(self, name: str = "stdout") -> bytes:
        return (self.folder / name).read_bytes()

    def left(self) -> list[int]:
        return carrying(self.nonces)

    def end(self) -> None:
        """Whatever the test has left, whoever has the fence by now."""
        if self.folder.exists() and not (self.folder / "receipt.json").exists():
            self.launcher = ()
            self.fence = 2**64 - 1
            self.call(self.commands.stop(STOP_WAIT_S, sweep=True))


@contextmanager
def bystanders(count: int = 3) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that have nothing to do with it, in the user's ordinary ways: all are there at the end, too."""
    started = [subprocess.Popen(["sleep", "300"], start_new_session=bool(index % 2)) for index in range(count)]
    try:
        yield started
        assert [process.poll() for process in started] == [None] * count, "a bystander was killed"
    finally:
        for process in started:
            process.kill()
            process.wait()
