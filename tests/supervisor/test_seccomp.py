"""Where a sandbox's seccomp profile knows no pidfds, older calls do the same."""

from pathlib import Path

import pytest

from tests.supervisor.conftest import MakeActivation
from tests.supervisor.rig import bystanders, eventually, named

PIDFD_SEND_SIGNAL, PIDFD_OPEN, CLOSE_RANGE = 424, 434, 436
"""The same numbers on every architecture."""


@pytest.mark.parametrize("denied", [(PIDFD_OPEN,), (PIDFD_SEND_SIGNAL,), (PIDFD_OPEN, PIDFD_SEND_SIGNAL, CLOSE_RANGE)])
@pytest.mark.parametrize("way", ["everything", "fork_storm", "stopped", "clone_parent"])
def test_a_cleanup_is_proven_without_pidfds(
    activations: MakeActivation, uid: int, seccomped: Path, escapes: Path, denied: tuple[int, ...], way: str
) -> None:
    numbers = ",".join(str(number) for number in denied)
    activation = activations(uid, launcher=(str(seccomped), "deny", numbers))
    report = activation.folder.parent / "report"
    report.touch()
    report.chmod(0o666)
    with bystanders():
        activation.launch(str(escapes), way, "pdk-seccomp", str(report), "1", "stay")
        assert eventually(lambda: report.stat().st_size > 0)
        receipt = activation.receipt(activation.stop())
        assert named("pdk-seccomp") == []
    assert (receipt.state, receipt.tree_empty) == ("stopped", True)
