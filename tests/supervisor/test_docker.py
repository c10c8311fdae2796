"""In containers: as PID 1 and by exec, in images with everything, with a shell only and with nothing at all."""

import io
import re
import subprocess
import tarfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shared.supervisor.build import PROGRAM
from shared.supervisor.protocol import Commands, LaunchRequest, new_key
from shared.supervisor.receipt import Answer, Receipt, proof_of

pytestmark = [pytest.mark.docker, pytest.mark.busybox, pytest.mark.timeout(300)]

INSIDE = f"/opt/{PROGRAM}"
BASE_IMAGE = "paddock/base:bookworm"


def docker(*arguments: str, stdin: bytes = b"", check: bool = True) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run(["docker", *arguments], input=stdin, capture_output=True, timeout=120, check=False)
    assert not check or done.returncode == 0, done.stderr.decode()
    return done


def _imported(files: dict[str, Path]) -> str:
    """An image of these files and one empty folder."""
    tree = io.BytesIO()
    with tarfile.open(fileobj=tree, mode="w") as tar:
        folder = tarfile.TarInfo("work")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o777
        tar.addfile(folder)
        for name, path in files.items():
            tar.add(path, name)
    name = f"paddock-test/{uuid.uuid4().hex[:12]}"
    docker("import", "-", name, stdin=tree.getvalue())
    return name


@pytest.fixture(scope="module")
def images() -> Iterator[dict[str, str]]:
    made = {"scratch": _imported({}), "busybox": _imported({"bin/sh": Path("/usr/bin/busybox")})}
    yield {**made, "debian": BASE_IMAGE}
    docker("rmi", "--force", *made.values())


@dataclass
class Container:
    name: str
    key: bytes = field(default_factory=new_key)
    commands: Commands = field(default_factory=lambda: Commands(INSIDE, "/run/paddock-state/activation", 1))

    def ask(self, argv: list[str], stdin: bytes = b"") -> Answer:
        done = docker("exec", "-i", self.name, *argv, stdin=stdin, check=False)
        assert done.returncode in {0, 4}, (done.returncode, done.stderr)
        return Answer.read(done.stdout)

    def launch(self, *command: str) -> Answer:
        self.ask(self.commands.prepare())
        request = LaunchRequest(activation_id="act-1", command=command, grace_s=0.3)
        return self.ask(self.commands.run(), request.frame(self.key))

    def receipt(self, answer: Answer) -> Receipt:
        proof = proof_of(answer, activation_id="act-1", key=self.key, policy="drain", launch_seen=True)
        assert proof.confirmed, (proof.why, answer)
        assert proof.receipt is not None
        return proof.receipt

    def processes(self) -> list[str]:
        return docker("top", self.name, "-eo", "pid,stat,comm").stdout.decode().splitlines()[1:]


Run = Callable[..., Container]


@pytest.fixture
def run(program: Path, escapes: Path, place: Path) -> Iterator[Run]:
    names: list[str] = []

    def start(image: str, *options: str, supervisor: str = "init") -> Container:
        state = place / f"state-{len(names)}"
        state.mkdir()
        state.chmod(0o777)
        names.append(f"paddock-test-{uuid.uuid4().hex[:12]}")
        binds = (f"{program}:{INSIDE}:ro", f"{escapes}:/opt/escapes:ro", f"{state}:/run/paddock-state")
        mounts = [word for bind in binds for word in ("-v", bind)]
        docker("run", "-d", "--name", names[-1], "--network", "none", "--pids-limit", "300", *mounts, *options,
               "--entrypoint", INSIDE, image, supervisor)  # fmt: skip
        return Container(names[-1])

    yield start
    if names:
        docker("rm", "--force", "--volumes", *names)


WAYS_TO_RUN = {
    "root": (),
    "uid 1000": ("--user", "1000:1000"),
    "read-only uid 1000": ("--user", "1000:1000", "--read-only"),
    "read-only root, no new privileges": ("--read-only", "--security-opt", "no-new-privileges"),
}


@pytest.mark.behaviour("SB-28")
@pytest.mark.parametrize("image", ["scratch", "busybox", "debian"])
@pytest.mark.parametrize("options", WAYS_TO_RUN.values(), ids=WAYS_TO_RUN)
def test_a_cleanup_is_proven_in_any_image(
    run: Run, images: dict[str, str], image: str, options: tuple[str, ...]
) -> None:
    container = run(images[image], *options)
    answer = container.launch("/opt/escapes", "everything", "pdk-docker", "/run/paddock-state/report", "1", "stay")
    assert answer.state == "running"
    receipt = container.receipt(container.ask(container.commands.stop(20)))
    assert (receipt.state, receipt.tree_empty, receipt.unaccounted) == ("stopped", True, ())
    assert len(container.processes()) == 1
    missing = Commands(INSIDE, "/run/paddock-state/other", 1)
    container.ask(missing.prepare())
    request = LaunchRequest(activation_id="act-1", command=("/bin/bash-that-is-not-there", "-lc", "true"))
    failed = container.receipt(container.ask(missing.run(), request.frame(container.key)))
    assert (failed.state, failed.problem) == ("launch_failed", "cannot execute /bin/bash-that-is-not-there")


def test_init_reaps_a_flood_of_orphans_and_obeys_term_at_once(run: Run, images: dict[str, str]) -> None:
    container = run(images["debian"])
    flood = "i=0; while [ $i -lt 1500 ]; do (sleep 0.05 &); i=$((i+1)); done"
    docker("exec", container.name, "sh", "-c", flood)
    deadline = time.monotonic() + 30
    while len(container.processes()) > 1:
        assert time.monotonic() < deadline, container.processes()[:5]
        time.sleep(0.1)
    began = time.monotonic()
    docker("stop", "-t", "20", container.name)
    assert time.monotonic() - began < 5  # it takes about 0.3 s on an idle machine; a signal ignored takes all 20


def test_an_out_of_memory_kill_is_counted_and_no_more_than_a_kill(run: Run, images: dict[str, str]) -> None:
    container = run(images["debian"], "--memory", "64m", "--memory-swap", "64m")
    container.launch("sh", "-c", "head -c 300m /dev/zero | tail; exit $?")
    receipt = container.receipt(container.ask(container.commands.wait(60)))
    assert receipt.exit_code == 137
    assert (receipt.oom_kill_delta or 0) >= 1


def test_in_a_container_not_even_its_root_reads_the_key(run: Run, images: dict[str, str]) -> None:
    container = run(images["debian"])
    answer = container.launch("sleep", "60")
    assert answer.detail is not None
    assert answer.detail.supervisor is not None
    said = docker("exec", container.name, "head", "-c", "1", f"/proc/{answer.detail.supervisor.pid}/mem", check=False)
    assert re.search(rb"Permission denied", said.stderr)
    container.receipt(container.ask(container.commands.stop(20)))
