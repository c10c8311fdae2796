"""The supervisor's program for an architecture: shipped, or compiled here from the sources that are shipped.

Either way it is put once into a cache folder under a name made of its content, so that it can be mounted or
copied from there. What is in the program and how it is spoken to is in `main.c` and `protocol.py`.
"""

import argparse
import asyncio
import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCES = Path(__file__).parent
PROGRAM = "paddock-supervisor"
ARCHITECTURES = ("x86_64", "aarch64")
FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-Os", "-static", "-s")
WARNINGS = ("-Wall", "-Wextra", "-Werror")
"""For programs that are shipped; a user's compiler may be newer, and know warnings that ours did not."""
COMPILE_TIMEOUT_S = 300.0
"""A first compilation with Zig also compiles its C library."""
MODE = 0o711
"""Not readable by others: a process whose program its user cannot read is closed to that user's debuggers from
its first instruction on, and the supervisor is sent a key."""


def architecture_here() -> str:
    """This machine's architecture by its kernel's name."""
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


async def supervisor_program(cache: Path, architecture: str | None = None) -> Path:
    """The program in `cache`, made when it is not there yet; `architecture` is this machine's when left out.

    Raises:
        FileNotFoundError: none is shipped for the architecture and no compiler for it is here.
        RuntimeError: the compiler failed; the message holds what it said.
    """
    return await asyncio.to_thread(provide, cache, architecture or architecture_here())


def provide(cache: Path, architecture: str) -> Path:
    """As `supervisor_program`, in the calling thread. Several processes may ask at once: one works, all get it."""
    shipped = shipped_program(architecture)
    compiler = None if shipped else _compiler(architecture)
    made_of = _digest(compiler.identity if compiler else "shipped")
    target = cache / f"supervisor-{architecture}-{made_of}" / PROGRAM
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / ".supervisor.lock"):
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=cache, prefix=".supervisor-") as folder:
                made = Path(folder) / PROGRAM
                if compiler:
                    compiler.compile(made)
                elif shipped:
                    shutil.copyfile(shipped, made)
                made.chmod(MODE)
                target.parent.mkdir(exist_ok=True)
                made.rename(target)
    return target


def shipped_program(architecture: str) -> Path | None:
    """The program that `make supervisor` left beside these very sources; one of other sources does not count."""
    path = _shipping_place(architecture)
    return path if path.exists() else None


def _shipping_place(architecture: str) -> Path:
    return SOURCES / f"{PROGRAM}-{architecture}-{_digest('')}"


def _digest(identity: str) -> str:
    """Of all that decides the program's content."""
    digest = hashlib.sha256("\0".join([identity, *FLAGS]).encode())
    for path in _source_files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _source_files() -> list[Path]:
    return sorted([*SOURCES.glob("*.c"), *SOURCES.glob("*.h")])


class Compiler:
    """A command that compiles C to a static program, and what tells it from others."""

    def __init__(self, command: tuple[str, ...], identity: str) -> None:
        self.identity = identity
        self._command = command

    def compile(self, target: Path, warnings: tuple[str, ...] = ()) -> None:
        """Raises RuntimeError with what the compiler said."""
        sources = [str(path) for path in _source_files() if path.suffix == ".c"]
        command = [*self._command, *FLAGS, *warnings, "-o", str(target), *sources]
        try:
            _run(command)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            said = (error.stdout or b"").decode(errors="replace").strip()[-2000:]
            raise RuntimeError(
                f"The supervisor could not be compiled with `{' '.join(self._command)}` ({said or error}). It needs "
                "a C compiler with a static C library: on Debian `apt-get install gcc libc6-dev`, elsewhere "
                "`pip install ziglang`."
            ) from error


def _compiler(architecture: str) -> Compiler:
    native = shutil.which("cc") or shutil.which("gcc")
    if native and architecture == architecture_here():
        version = _run([native, "--version"]).decode(errors="replace").partition("\n")[0]
        return Compiler((native,), version)
    if importlib.util.find_spec("ziglang"):
        return zig(architecture)
    raise FileNotFoundError(
        f"No supervisor for {architecture} is shipped with this installation and no C compiler for it is here. Get "
        "one: on Debian `apt-get install gcc libc6-dev` for this machine's own architecture, or `pip install ziglang` "
        "for any. The `local` sandbox with in-process harnesses works without."
    )


def zig(architecture: str) -> Compiler:
    """Zig's compiler from the `ziglang` package; it brings a static C library (musl) for every architecture."""
    command = (sys.executable, "-m", "ziglang", "cc", "-target", f"{architecture}-linux-musl")
    return Compiler(command, " ".join([*command[2:], _run([sys.executable, "-m", "ziglang", "version"]).decode()]))


def _run(command: list[str]) -> bytes:
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=COMPILE_TIMEOUT_S,
        check=True,
    ).stdout


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def ship(architectures: list[str]) -> list[Path]:
    """Compile for each architecture and leave the programs beside the sources, in place of older ones."""
    made = []
    for architecture in architectures:
        place = _shipping_place(architecture)
        if not place.exists():
            part = place.with_suffix(".part")
            zig(architecture).compile(part, WARNINGS)
            for old in SOURCES.glob(f"{PROGRAM}-{architecture}-*"):
                if old != part:
                    old.unlink()
            os.replace(part, place)
        made.append(place)
    return made


def main() -> None:
    """`python -m shared.supervisor.build`: what `make supervisor` runs."""
    parser = argparse.ArgumentParser(prog="python -m shared.supervisor.build", description=main.__doc__)
    parser.add_argument("architectures", nargs="*", default=list(ARCHITECTURES))
    for path in ship(parser.parse_args().architectures):
        sys.stdout.write(f"{path.relative_to(SOURCES.parents[1])}  {path.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
