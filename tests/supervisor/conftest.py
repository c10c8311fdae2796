"""The supervisor's program and the programs that test it, and proof that no test leaves a process behind."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.supervisor.build import MODE, PROGRAM, architecture_here, provide
from tests.supervisor.rig import Activation, carrying, eventually, kill, running, users

PROGRAMS = Path(__file__).parent / "programs"

MakeActivation = Callable[..., Activation]


@pytest.fixture(scope="session")
def ground() -> Iterator[Path]:
    """A folder that every user may enter, which pytest's own are not."""
    folder = Path(tempfile.mkdtemp(prefix="paddock-supervisor-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def program(ground: Path) -> Path:
    """A copy that every user may run, of a program that is compiled once for these sources."""
    cache = Path(os.environ.get("PADDOCK_CACHE") or Path.home() / ".cache" / "paddock") / "supervisor"
    target = ground / PROGRAM
    shutil.copyfile(provide(cache, architecture_here()), target)
    target.chmod(MODE)
    return target


def _compiled(ground: Path, name: str) -> Path:
    target = ground / name
    subprocess.run(
        [
            "cc",
            "-std=c11",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-O1",
            "-static",
            "-pthread",
            "-o",
            target,
            PROGRAMS / f"{name}.c",
        ],
        check=True,
    )
    return target


@pytest.fixture(scope="session")
def escapes(ground: Path) -> Path:
    """A harness that does what its argument says to outlive its supervisor."""
    return _compiled(ground, "escapes")


@pytest.fixture(scope="session")
def seccomped(ground: Path) -> Path:
    """Runs a command that may not make certain system calls, or is held at one."""
    return _compiled(ground, "seccomped")


@pytest.fixture(params=users(), ids=lambda uid: "root" if uid == 0 else f"uid {uid}")
def uid(request: pytest.FixtureRequest) -> int:
    """Each user that the supervisor's commands can run under here."""
    number: int = request.param
    return number


@pytest.fixture
def place(ground: Path) -> Iterator[Path]:
    """A folder of this test alone, in which every user may make files."""
    folder = Path(tempfile.mkdtemp(prefix="place-", dir=ground))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def activations(program: Path, place: Path) -> Iterator[MakeActivation]:
    """Makes activations; at the end none of their processes is left, and nothing of the supervisor's own."""
    made: list[Activation] = []

    def make(uid: int | None = None, **options: object) -> Activation:
        user = os.geteuid() if uid is None else uid
        folder = place / f"activation-{len(made)}"
        made.append(Activation(**{"program": program, "folder": folder, "uid": user, **options}))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for activation in made:
        activation.end()
    nonces = {nonce for activation in made for nonce in activation.nonces}
    kill(*carrying(nonces))  # survivors, where the policy keeps some
    gone = eventually(lambda: not carrying(nonces) and not running(program))
    left = {pid: Path(f"/proc/{pid}/stat").read_text() for pid in running(program)}
    kill(*left)
    assert gone, f"processes are left: {left}"


@pytest.fixture
def activation(activations: MakeActivation, uid: int) -> Activation:
    return activations(uid)


@pytest.fixture
def small_disk(place: Path) -> Iterator[Path]:
    """A file system of 600 KiB."""
    folder = place / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k,mode=1777", "small", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)
