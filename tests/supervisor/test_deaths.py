"""What the harness, the kernel or the disk does to the supervisor, and what is known afterwards."""

import fcntl
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from shared.supervisor.protocol import ExitStatus
from shared.supervisor.receipt import Answer
from tests.needs import probe
from tests.supervisor.conftest import MakeActivation
from tests.supervisor.rig import Activation, alive, bystanders, eventually, kill, start_time

TIMES = 10 if probe("full") is None else 3
DAEMONS = "setsid sleep 300 & (setsid sleep 300 &) ; (trap '' TERM; sleep 300) & sleep 300"

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount, and may make pid namespaces")


def _pids(answer: Answer) -> tuple[int, int, int]:
    """Guardian, supervisor and harness."""
    assert answer.detail is not None
    assert answer.detail.guardian is not None
    assert answer.detail.supervisor is not None
    assert answer.detail.worker is not None
    return answer.detail.guardian.pid, answer.detail.supervisor.pid, answer.detail.worker.pid


def _launched(activation: Activation) -> Answer:
    answer = activation.launch("sh", "-c", DAEMONS)
    assert eventually(lambda: len(activation.left()) >= 5)
    return answer


@pytest.mark.behaviour("SB-33")
@pytest.mark.parametrize("time", range(TIMES))
def test_when_the_supervisor_is_killed_its_guardian_cleans_up_and_nothing_is_graded(
    activation: Activation, time: int
) -> None:
    with bystanders():
        answer = _launched(activation)
        kill(_pids(answer)[1])
        ended = activation.wait()
        assert activation.left() == []
    proof = activation.proof(ended)
    assert proof.finding == "negative"
    assert proof.receipt is not None
    assert (proof.receipt.state, proof.receipt.reason) == ("lost", "supervisor_killed")
    assert (proof.receipt.cleanup_confirmed, proof.receipt.tree_empty) == (False, True)
    assert proof.receipt.remaining == ()


@pytest.mark.parametrize("time", range(TIMES))
def test_when_the_guardian_is_killed_the_supervisor_still_proves_the_cleanup(activation: Activation, time: int) -> None:
    with bystanders():
        answer = _launched(activation)
        kill(_pids(answer)[0])
        receipt = activation.receipt(activation.stop())
        assert activation.left() == []
    assert receipt.tree_empty is True


@pytest.mark.parametrize("time", range(TIMES))
def test_when_both_are_killed_a_sweep_kills_what_is_left_and_claims_no_proof(activation: Activation, time: int) -> None:
    with bystanders():
        answer = _launched(activation)
        os.kill(_pids(answer)[0], signal.SIGSTOP)
        kill(*_pids(answer)[:2])
        assert eventually(lambda: activation.status().state == "lost")
        assert activation.proof(activation.status()).finding == "missing"
        plain = activation.stop()
        assert (plain.state, plain.receipt_line) == ("lost", None)
        assert activation.left() != []
        proof = activation.proof(activation.stop(sweep=True))
        assert activation.left() == []
    assert proof.finding == "negative"
    assert proof.receipt is not None
    assert (proof.receipt.state, proof.receipt.reason, proof.receipt.tree_empty) == ("lost", "sweep", None)
    assert (proof.receipt.marker_killed or 0) >= 5


def test_a_sweep_leaves_a_live_activation_alone(activation: Activation) -> None:
    answer = activation.launch("sleep", "60")
    swept = activation.ask(activation.commands.sweep())
    assert (swept.state, swept.receipt_line) == ("running", None)
    assert alive(_pids(answer)[2])
    assert activation.receipt(activation.stop()).state == "stopped"


def test_a_supervisor_that_is_stopped_by_its_harness_goes_on(activation: Activation) -> None:
    answer = activation.launch("sleep", "60", deadline_s=1.0)
    os.kill(_pids(answer)[1], signal.SIGSTOP)
    receipt = activation.receipt(activation.wait())
    assert receipt.state == "deadline"


def test_a_stop_makes_a_stopped_supervisor_and_guardian_go_on(activation: Activation) -> None:
    answer = activation.launch("sleep", "60")
    os.kill(_pids(answer)[0], signal.SIGSTOP)
    os.kill(_pids(answer)[1], signal.SIGSTOP)
    assert activation.receipt(activation.stop()).state == "stopped"


def test_work_handed_to_a_daemon_that_was_there_before_is_told_and_not_killed(
    activation: Activation, place: Path
) -> None:
    fifo = place / "orders"
    os.mkfifo(fifo)
    fifo.chmod(0o666)
    marks = place / "pid"
    daemon = subprocess.Popen(["sh", "-c", f"read order < {fifo}; sleep 300 & echo $! > {marks}; wait"])
    try:
        activation.launch("sh", "-c", f"echo go > {fifo}; until test -s {marks}; do sleep 0.01; done")
        receipt = activation.receipt(activation.wait())
        handed = int(marks.read_text())
        assert alive(handed)
        assert receipt.unaccounted is not None
        assert handed in {process.pid for process in receipt.unaccounted}
        kill(handed)
    finally:
        daemon.kill()
        daemon.wait()


@pytest.mark.behaviour("SB-16", "SB-30")
@pytest.mark.parametrize("wrong", ["start", "program"])
def test_a_stop_signals_nobody_who_is_not_the_supervisor(activations: MakeActivation, wrong: str) -> None:
    activation = activations()
    activation.prepare()
    (activation.folder / "started").touch()
    with bystanders(1) as (bystander,):
        start = start_time(bystander.pid) + (1 if wrong == "start" else 0)
        if wrong == "program" and os.geteuid() != 0:
            pytest.skip("the kernel keeps others from signalling what is not theirs")
        process = f'{{"pid":{bystander.pid},"start":{start}}}'
        state = f'{{"v":1,"state":"running","id":"act-1","nonce":"{"0" * 32}","guardian":{process},'
        state += f'"supervisor":{process},"worker":{process},"started_at":null}}\n'
        (activation.folder / "state.json").write_text(state)
        lock = (activation.folder / "live").open("w")
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            answer = activation.ask(activation.commands.stop(0.5))
        assert (answer.state, answer.receipt_line) == ("running", None)
        answer = activation.stop(sweep=True)
        assert answer.state == "lost"


@as_root
def test_a_pid_that_is_used_again_is_not_taken_for_the_supervisor(program: Path, place: Path) -> None:
    script = Path(__file__).parent / "programs" / "pid_reuse.py"
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, script, program, place / "activation"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the pid was used again and its new owner lives" in done.stdout


@pytest.mark.behaviour("SB-31")
@pytest.mark.parametrize("content", ["", "{", '{"v":1,"state":"runn', "\0\0\0", "null", "[]", '{"v":1,"state":7}'])
def test_a_half_written_state_is_as_good_as_none(activation: Activation, content: str) -> None:
    activation.launch("sleep", "60")
    (activation.folder / "state.json").write_text(content)
    answer = activation.status()
    assert (answer.state, answer.detail, answer.live) == ("starting", None, True)
    assert activation.receipt(activation.stop()).state == "stopped"


@pytest.mark.behaviour("SB-31")
@pytest.mark.parametrize(
    "content",
    ["", "{", '{"v":1,"state":"exited","cleanup_confi', '{"cleanup_confirmed":true}', "\0" * 100, '"v"\n"w"'],
)
def test_a_half_written_receipt_is_no_proof(activation: Activation, content: str) -> None:
    activation.launch("true")
    activation.receipt(activation.wait())
    eventually(lambda: not activation.status().live)
    (activation.folder / "receipt.json").write_text(content)
    answer = activation.status()
    assert answer.state == "lost"
    assert not activation.proof(answer).confirmed


@as_root
def test_a_disk_that_the_harness_fills_does_not_keep_the_receipt_from_being_written(
    activations: MakeActivation, small_disk: Path
) -> None:
    activation = activations(folder=small_disk / "activation")
    activation.launch("sh", "-c", f"cat /dev/zero > {small_disk}/full; echo x > {small_disk}/more || exit 8")
    receipt = activation.receipt(activation.wait())
    assert receipt.exit_code == 8
    assert activation.receipt(activation.status()) == receipt


@as_root
@pytest.mark.parametrize("then", ["run", "stop"])
def test_on_a_full_disk_the_answer_is_printed_although_it_cannot_be_saved(
    activations: MakeActivation, small_disk: Path, then: str
) -> None:
    activation = activations(folder=small_disk / "activation")
    activation.prepare()
    with (small_disk / "full").open("wb", buffering=0) as full, suppress(OSError):
        while True:
            full.write(b"\0" * 4096)
    if then == "stop":
        assert activation.receipt(activation.stop()).state == "fenced"
        return
    answer = activation.run(activation.request("true"))
    receipt = activation.receipt(answer)
    assert receipt.state == "launch_failed"
    assert receipt.errno == 28
    assert not (activation.folder / "receipt.json").exists()


def test_a_harness_that_deletes_the_activations_folder_is_ended_and_told(activation: Activation) -> None:
    activation.launch("sh", "-c", f"rm -rf {activation.folder}; setsid sleep 300 & sleep 300")
    with bystanders():
        assert eventually((activation.folder / "receipt.json").exists)
        receipt = activation.receipt(activation.status())
    assert (receipt.state, receipt.reason, receipt.tree_empty) == ("stopped", "folder_removed", True)
    assert activation.left() == []


def test_a_folder_that_cannot_be_used_is_named_with_the_reason(activation: Activation, place: Path) -> None:
    (place / "file").write_text("x")
    (place / "link").symlink_to(place)
    for folder, why in (
        ("/proc/nonesuch", "No such file"),
        (f"{place}/file", "Not a directory"),
        (f"{place}/link", ""),
    ):
        activation.folder = Path(folder)
        done = activation.call(activation.commands.prepare())
        assert done.returncode == ExitStatus.FAILED
        assert f"cannot use the folder {folder}: {why}".encode() in done.stderr
    activation.folder = place / "unused"


def test_wrong_command_lines_are_answered_with_the_right_ones(activation: Activation) -> None:
    program = str(activation.program)
    for argv, sentence in (
        ([program], "usage: one of these commands"),
        ([program, "dance"], "usage: one of these commands"),
        ([program, "run", "/tmp/x"], "usage: run FOLDER FENCE"),
        ([program, "run", "/tmp/x", "-1"], "usage: run FOLDER FENCE"),
        ([program, "stop", "/tmp/x", "1", "soon"], "usage: stop FOLDER FENCE WAIT_MS [sweep]"),
        ([program, "put", "/tmp/x", "0999", "1"], "usage: put PATH MODE SIZE [UID:GID]"),
    ):
        done = activation.call(argv, activation.request("true").frame(None))
        assert (done.returncode, done.stdout) == (ExitStatus.USAGE, b""), argv
        assert sentence in done.stderr.decode()
