"""How a missing need is told: skipped with a reason, or, when it is required, a failed run with a sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import PROBES, required

TREE = Path(__file__).parent.parent
PROBED = """
import pytest

@pytest.mark.redis
def test_that_needs_redis():
    pass

def test_that_needs_nothing():
    pass
"""


def _pytest(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A run of pytest in its own process whose PATH holds no program, so that every need is missing."""
    (folder / "test_probed.py").write_text(PROBED, encoding="utf-8")
    options = ["-c", str(TREE / "pyproject.toml"), "--rootdir", str(folder), "-p", "tests.conftest", "-rs"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PADDOCK_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *arguments, str(folder)],
        env={**kept, "PATH": str(folder), "PYTHONPATH": str(TREE), **environ},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_test_whose_need_is_missing_is_skipped_with_the_reason_and_the_summary_tells(tmp_path: Path) -> None:
    run = _pytest(tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 passed, 1 skipped" in run.stdout
    assert "left out here" in run.stdout
    assert "redis: 1 test. There is no redis-server command." in run.stdout


@pytest.mark.parametrize("asked", ["all", "redis", "redis,all"])
def test_a_required_need_that_is_missing_fails_the_run_with_a_sentence(tmp_path: Path, asked: str) -> None:
    run = _pytest(tmp_path, PADDOCK_REQUIRE=asked)
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert "PADDOCK_REQUIRE asks for what is not here" in run.stderr
    assert "There is no redis-server command" in run.stderr


def test_a_need_of_deselected_tests_is_not_required(tmp_path: Path) -> None:
    run = _pytest(tmp_path, "-m", "not redis", PADDOCK_REQUIRE="all")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 passed, 1 deselected" in run.stdout


def test_an_unknown_need_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="names postgres; it knows all, balancer, bubblewrap"):
        required("postgres", frozenset())


def test_all_asks_for_what_the_tests_carry_but_not_for_the_full_run() -> None:
    assert required("all", frozenset({"docker", "full"})) == {"docker"}
    assert required("all,redis", frozenset({"docker"})) == {"docker", "redis"}
    assert required("", frozenset(PROBES)) == frozenset()
