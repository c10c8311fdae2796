"""The wheel: built from the tree, installed alone, it runs the demo away from any checkout."""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

TREE = Path(__file__).parents[2]
SOURCES = ("shared", "services", "pyproject.toml", "README.md")
INSTALLED_LIMIT_MIB = 200
BESIDE = ("_failures", "_inputs")

pytestmark = [pytest.mark.index, pytest.mark.timeout(600)]


def _run(*command: str | Path, cwd: Path) -> str:
    # Nothing of the checkout may help: neither its path nor its settings.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PADDOCK_", "PYTHON"))}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=kept,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # From a copy: a build leaves folders behind, and an old one would leak into a new wheel.
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (TREE / name).is_dir():
            shutil.copytree(TREE / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(TREE / name, source / name)
    _run(sys.executable, "-m", "build", "--wheel", "--outdir", source / "dist", ".", cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


def test_the_wheel_holds_the_two_packages_with_their_data_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"services", "shared"}
    shipped = {str(path.relative_to(TREE)) for part in ("services", "shared") for path in (TREE / part).rglob("*")
               if path.suffix in {".py", ".yaml", ".jsonl"}}  # fmt: skip
    assert shipped - set(names) == set()


def test_the_demo_runs_from_the_wheel_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    before_bytes = _size_bytes(tmp_path / "venv")
    _run(python, "-m", "pip", "install", "--quiet", "--constraint", TREE / "constraints.txt", wheel, cwd=tmp_path)
    assert (_size_bytes(tmp_path / "venv") - before_bytes) / 2**20 <= INSTALLED_LIMIT_MIB
    away = tmp_path / "away"
    away.mkdir()
    printed = _run(python.with_name("paddock"), "demo", cwd=away)
    (results,) = [path for path in (away / "results").glob("demo-*.jsonl") if not path.stem.endswith(BESIDE)]
    rewards = [json.loads(line)["reward"] for line in results.read_text(encoding="utf-8").splitlines()]
    assert set(rewards) == {0.0, 1.0}, printed


def _size_bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
