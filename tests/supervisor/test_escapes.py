"""Whatever a harness does to outlive its supervisor: nothing of it is left, and nothing else is harmed."""

from pathlib import Path

import pytest

from tests.needs import probe
from tests.supervisor.rig import Activation, bystanders, eventually, named

TIMES = 5 if probe("full") is None else 1

WAYS = {
    "plain": 1,
    "setsid": 1,
    "double_fork": 1,
    "own_group": 1,
    "empty_environment": 1,
    "closed_files": 1,
    "everything": 1,
    "ignored_signals": 1,
    "clone_parent": 1,
    "nested_subreaper": 2,
    "stopped": 1,
    "threads": 1,
    "non_dumpable": 1,
    "vfork": 2,
    "zombies": 1,
    "fork_storm": 8,
    "relay": 1,
}
"""Each way out, and how many processes at least report that they took it."""


def _take(activation: Activation, escapes: Path, way: str, then: str) -> None:
    report = activation.folder.parent / f"report-{way}-{then}"
    report.touch()
    report.chmod(0o666)
    activation.launch(str(escapes), way, f"pdk-{way[:10]}", str(report), str(WAYS[way]), then)
    assert eventually(lambda: len(report.read_text().splitlines()) >= WAYS[way]), "the way out was not taken"


@pytest.mark.behaviour("SB-21", "SB-22", "SB-26", "SB-30")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("time", range(TIMES))
def test_nothing_survives_a_stop(activation: Activation, escapes: Path, way: str, time: int) -> None:
    with bystanders():
        _take(activation, escapes, way, "stay")
        receipt = activation.receipt(activation.stop())
        assert named(f"pdk-{way[:10]}") == []
    assert receipt.state == "stopped"
    assert receipt.tree_empty is True
    assert (receipt.killed or 0) + (receipt.reaped or 0) >= 1


@pytest.mark.behaviour("SB-21", "SB-22", "SB-27")
@pytest.mark.parametrize("way", WAYS)
def test_nothing_survives_a_natural_exit(activation: Activation, escapes: Path, way: str) -> None:
    with bystanders():
        _take(activation, escapes, way, "exit")
        receipt = activation.receipt(activation.wait())
        assert named(f"pdk-{way[:10]}") == []
    assert (receipt.state, receipt.exit_code) == ("exited", 7)
    assert receipt.tree_empty is True


@pytest.mark.behaviour("SB-21", "SB-23")
@pytest.mark.parametrize("way", ["everything", "fork_storm", "relay"])
def test_nothing_survives_a_deadline(activation: Activation, escapes: Path, way: str) -> None:
    report = activation.folder.parent / "report"
    report.touch()
    report.chmod(0o666)
    with bystanders():
        activation.launch(str(escapes), way, f"pdk-{way[:10]}", str(report), "0", "stay", deadline_s=0.5)
        receipt = activation.receipt(activation.wait())
        assert named(f"pdk-{way[:10]}") == []
    assert len(report.read_text().splitlines()) >= WAYS[way]
    assert (receipt.state, receipt.timed_out) == ("deadline", True)
