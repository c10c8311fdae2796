"""Where the program comes from: compiled once for all who ask, and a clear sentence where it cannot be had."""

import asyncio
import stat
import subprocess
from pathlib import Path

import pytest

from shared.supervisor import build


async def _asked_by_many(cache: Path) -> set[Path]:
    return set(await asyncio.gather(*[build.supervisor_program(cache) for _ in range(6)]))


@pytest.mark.behaviour("SB-28")
def test_many_who_ask_at_once_get_one_static_program(tmp_path: Path) -> None:
    (path,) = asyncio.run(_asked_by_many(tmp_path))
    assert path.name == build.PROGRAM
    assert stat.S_IMODE(path.stat().st_mode) == build.MODE
    assert [entry.name for entry in tmp_path.iterdir() if not entry.name.startswith(".")] == [path.parent.name]
    said = subprocess.run([path], capture_output=True, env={}, timeout=10, check=False)
    assert said.returncode == 2
    assert b"run FOLDER FENCE" in said.stderr
    assert b"INTERP" not in subprocess.run(["readelf", "-l", path], capture_output=True, check=True).stdout


def test_for_an_architecture_that_nobody_compiles_for_a_sentence_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises((FileNotFoundError, RuntimeError), match=r"pip install ziglang"):
        build.provide(tmp_path, "vax")
    assert not list(tmp_path.rglob(build.PROGRAM))


def test_a_compiler_that_fails_is_told_with_what_it_said(tmp_path: Path) -> None:
    failing = build.Compiler(("sh", "-c", "echo 'cannot find -lc'; exit 1", "cc"), "failing")
    with pytest.raises(RuntimeError, match=r"cannot find -lc.*static C library"):
        failing.compile(tmp_path / "program")


def test_our_compiler_has_nothing_to_warn_of(tmp_path: Path) -> None:
    build.Compiler(("cc",), "cc").compile(tmp_path / "program", build.WARNINGS)
