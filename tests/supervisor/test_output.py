"""The harness's output: kept whole while it is small, and bounded, with start and end, when it is not."""

import os
import time
from pathlib import Path

import pytest

from tests.needs import probe
from tests.supervisor.conftest import MakeActivation
from tests.supervisor.rig import Activation, memory_kib

FLOOD_BYTES = 2_000_000_000 if probe("full") is None else 300_000_000
HEAD_BYTES = 1 << 20
TAIL_BYTES = 64 << 10


def test_of_a_flood_start_and_end_are_kept_and_the_writer_never_waits(activation: Activation) -> None:
    script = f"echo HEAD-MARK; yes ABCDEFGH | head -c {FLOOD_BYTES}; echo TAIL-MARK"
    activation.launch("sh", "-c", script, head_bytes=HEAD_BYTES, tail_bytes=TAIL_BYTES, deadline_s=100.0)
    receipt = activation.receipt(activation.wait(100.0))
    assert (receipt.exit_code, receipt.timed_out) == (0, False)
    kept = activation.output()
    total = len("HEAD-MARK\n") + FLOOD_BYTES + len("TAIL-MARK\n")
    assert receipt.stdout is not None
    assert (receipt.stdout.total, receipt.stdout.head, receipt.stdout.tail) == (total, HEAD_BYTES, TAIL_BYTES)
    assert receipt.stdout.dropped == total - len(kept)
    assert kept.startswith(b"HEAD-MARK\nABCDEFGH\n")
    assert kept.endswith(b"TAIL-MARK\n")
    assert set(kept[HEAD_BYTES : -len("TAIL-MARK\n")].split(b"\n")[1:-1]) == {b"ABCDEFGH"}


def test_output_before_a_deadline_is_kept_and_the_supervisor_stays_small(activation: Activation) -> None:
    script = "echo HEAD-MARK; yes"
    answer = activation.launch("sh", "-c", script, head_bytes=HEAD_BYTES, tail_bytes=TAIL_BYTES, deadline_s=2.0)
    assert answer.detail is not None
    assert answer.detail.supervisor is not None
    time.sleep(1)
    assert memory_kib(answer.detail.supervisor.pid, "VmHWM") < 2048
    receipt = activation.receipt(activation.wait())
    assert receipt.timed_out is True
    assert receipt.stdout is not None
    assert receipt.stdout.dropped > 0
    assert activation.output().startswith(b"HEAD-MARK\ny\n")
    assert len(activation.output()) == HEAD_BYTES + TAIL_BYTES


@pytest.mark.parametrize(
    ("head_bytes", "tail_bytes", "kept"),
    [(4, 3, b"0123789"), (10, 3, b"0123456789"), (0, 4, b"6789"), (5, 0, b"01234"), (9, 5, b"0123456789"), (0, 0, b"")],
)
def test_head_and_tail_join_without_a_gap_or_an_overlap(
    activation: Activation, head_bytes: int, tail_bytes: int, kept: bytes
) -> None:
    script = "for digit in 0 1 2 3 4 5 6 7 8 9; do printf $digit; done"
    activation.launch("sh", "-c", script, head_bytes=head_bytes, tail_bytes=tail_bytes)
    receipt = activation.receipt(activation.wait())
    assert activation.output() == kept
    assert receipt.stdout is not None
    assert (receipt.stdout.total, receipt.stdout.dropped) == (10, 10 - len(kept))


def test_the_start_can_be_read_while_the_harness_runs(activation: Activation) -> None:
    activation.launch("sh", "-c", "echo first; sleep 60")
    deadline = time.monotonic() + 10
    while (done := activation.call(activation.commands.get(f"{activation.folder}/stdout"))).stdout != b"first\n":
        assert done.returncode == 0
        assert time.monotonic() < deadline
    assert activation.receipt(activation.stop()).stdout is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
def test_output_that_finds_no_room_on_the_disk_is_counted_and_the_writer_never_waits(
    activations: MakeActivation, small_disk: Path
) -> None:
    activation = activations(folder=small_disk / "activation")
    activation.launch("sh", "-c", "yes 12345678 | head -c 3000000", tail_bytes=1000)
    receipt = activation.receipt(activation.wait())
    assert receipt.exit_code == 0
    assert receipt.stdout is not None
    assert receipt.stdout.errno == 28  # ENOSPC
    assert receipt.stdout.total == 3_000_000
    assert len(activation.output()) == receipt.stdout.head + receipt.stdout.tail < 1_000_000
