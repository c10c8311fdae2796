"""The fences: a launch and a stop in any order, callers who are late, and calls that are repeated."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from shared.supervisor.build import architecture_here
from shared.supervisor.protocol import ExitStatus
from tests.supervisor.conftest import MakeActivation
from tests.supervisor.rig import Activation, alive, bystanders, eventually, start_time

TIMERFD_CREATE = {"x86_64": 283, "aarch64": 85}[architecture_here()]
FORK = {"x86_64": 56, "aarch64": 220}[architecture_here()]
"""How glibc forks: clone."""
WORKER_FORK = 3
"""The command forks the guardian, that the supervisor, and that the harness."""


@dataclass
class Held:
    """A `run` whose supervisor is held at one system call."""

    process: subprocess.Popen[bytes]
    pid: int

    def let_go(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == b"goes on\n"


@contextmanager
def held_at(call: int, which: int, activation: Activation, seccomped: Path, *command: str) -> Iterator[Held]:
    activation.prepare()
    frame = activation.folder.parent / "frame"
    frame.write_bytes(activation.request(*command).frame(activation.key))
    frame.chmod(0o644)
    process = activation.spawn([str(seccomped), "pause", str(call), str(which), str(frame), *activation.commands.run()])
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        yield Held(process, int(process.stdout.readline().split()[1]))
    finally:
        process.kill()
        process.communicate()


@pytest.mark.behaviour("SB-16", "SB-20")
def test_after_a_stop_nothing_is_launched_and_the_exit_code_is_unknown(activation: Activation, place: Path) -> None:
    activation.prepare()
    receipt = activation.receipt(activation.stop())
    assert (receipt.state, receipt.exit_code, receipt.timed_out) == ("fenced", None, False)
    answer = activation.run(activation.request("touch", str(place / "launched")))
    assert answer.state == "fenced"
    assert activation.receipt(answer).exit_code is None
    assert not (place / "launched").exists()


@pytest.mark.behaviour("SB-20")
def test_a_stop_before_there_is_a_folder_fences_it_off_for_good(activation: Activation) -> None:
    assert activation.receipt(activation.stop()).state == "fenced"
    assert activation.launch("true").state == "fenced"


def test_an_uploaded_stop_file_is_enough_before_the_launch(activation: Activation) -> None:
    activation.prepare()
    (activation.folder / "stop").touch()
    answer = activation.run(activation.request("true"))
    assert activation.receipt(answer).state == "fenced"


def test_an_uploaded_stop_file_is_enough_while_it_runs(activation: Activation) -> None:
    activation.launch("sleep", "60")
    (activation.folder / "stop").touch()
    receipt = activation.receipt(activation.wait())
    assert (receipt.state, receipt.reason) == ("stopped", "stop")


@pytest.mark.behaviour("SB-23")
def test_a_stop_after_the_launch_is_a_stop_and_no_timeout(activation: Activation) -> None:
    activation.launch("sleep", "60")
    receipt = activation.receipt(activation.stop())
    assert (receipt.state, receipt.timed_out, receipt.signal) == ("stopped", False, signal.SIGTERM)


@pytest.mark.behaviour("SB-16")
def test_a_stop_after_the_receipt_gives_the_same_receipt_and_signals_nobody(activation: Activation) -> None:
    activation.launch("sh", "-c", "exit 6")
    first = activation.wait()
    with bystanders():
        again = activation.stop()
    assert again.receipt_line == first.receipt_line
    assert activation.receipt(again).exit_code == 6


@pytest.mark.behaviour("SB-15")
@pytest.mark.parametrize("how", ["stop", "file", "signal"])
def test_a_stop_between_the_claim_and_the_start_of_the_harness_is_not_lost(
    activation: Activation, seccomped: Path, place: Path, how: str
) -> None:
    with held_at(TIMERFD_CREATE, 1, activation, seccomped, "touch", str(place / "launched")) as held:
        assert activation.status().state == "starting"
        if how == "signal":
            os.kill(held.pid, signal.SIGTERM)
        elif how == "file":
            (activation.folder / "stop").touch()
        else:
            asked = activation.spawn(activation.commands.stop(20))
            assert eventually((activation.folder / "stop").exists)
        held.let_go()
        if how == "stop":
            assert asked.communicate(timeout=30)[0].startswith(b'{"v":1,"state":"fenced"')
    receipt = activation.receipt(activation.wait())
    assert (receipt.state, receipt.worker, receipt.exit_code) == ("fenced", None, None)
    assert not (place / "launched").exists()


@pytest.mark.behaviour("SB-15")
def test_a_stop_in_the_last_moment_before_the_start_ends_what_was_started(
    activation: Activation, seccomped: Path
) -> None:
    with held_at(FORK, WORKER_FORK, activation, seccomped, "sleep", "60") as held:
        (activation.folder / "stop").touch()
        held.let_go()
    receipt = activation.receipt(activation.wait())
    assert receipt.state == "stopped"
    assert receipt.worker is not None
    assert not alive(receipt.worker.pid)


@pytest.mark.behaviour("SB-18")
def test_a_stop_that_cannot_learn_the_outcome_in_time_is_no_proof_and_can_be_repeated(
    activation: Activation, seccomped: Path
) -> None:
    with held_at(TIMERFD_CREATE, 1, activation, seccomped, "sleep", "60") as held:
        answer = activation.ask(activation.commands.stop(0.2), expect=[ExitStatus.UNPROVEN])
        assert (answer.state, answer.receipt_line) == ("starting", None)
        assert activation.proof(answer).finding == "missing"
        held.let_go()
    assert activation.receipt(activation.stop()).state == "fenced"


@pytest.mark.behaviour("SB-13")
def test_a_repeated_launch_answers_how_it_stands_and_starts_nothing(activation: Activation, place: Path) -> None:
    count = place / "count"
    count.touch()
    count.chmod(0o666)
    first = activation.launch("sh", "-c", f"echo x >> {count}; sleep 60")
    again = activation.run(activation.request("sh", "-c", f"echo x >> {count}; sleep 60"))
    assert (first.state, again.state) == ("running", "running")
    assert again.detail == first.detail
    activation.receipt(activation.stop())
    after = activation.run(activation.request("sh", "-c", f"echo x >> {count}; sleep 60"))
    assert activation.receipt(after).state == "stopped"
    assert count.read_text() == "x\n"


@pytest.mark.behaviour("SB-13")
def test_of_many_launches_at_once_exactly_one_starts(activation: Activation, place: Path) -> None:
    count = place / "count"
    count.touch()
    count.chmod(0o666)
    activation.prepare()
    request = activation.request("sh", "-c", f"echo x >> {count}; sleep 60")
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(activation.run(request).state)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(answers) <= {"running", "starting"}
    assert len(answers) == 12
    assert eventually(lambda: count.read_text() == "x\n")
    assert activation.receipt(activation.stop()).state == "stopped"
    assert count.read_text() == "x\n"


@pytest.mark.behaviour("SB-13")
def test_a_launch_into_a_folder_that_is_not_there_or_was_removed_starts_nothing(
    activation: Activation, place: Path
) -> None:
    mark = place / "launched"
    assert activation.run(activation.request("touch", str(mark))).state == "absent"
    activation.launch("true")
    activation.receipt(activation.wait())
    assert activation.ask(activation.commands.remove(), expect=[ExitStatus.DONE]).state == "closed"
    assert not activation.folder.exists()
    assert activation.run(activation.request("touch", str(mark))).state == "closed"
    assert activation.ask(activation.commands.prepare()).state == "closed"
    assert activation.stop().state == "closed"
    assert not activation.folder.exists()
    assert not mark.exists()


def test_a_live_folder_is_not_removed_and_an_ended_one_with_all_that_is_in_it(activation: Activation) -> None:
    activation.launch("sleep", "60")
    done = activation.call(activation.commands.remove())
    assert done.returncode == ExitStatus.FAILED
    assert b"in use by a live supervisor" in done.stderr
    activation.receipt(activation.stop())
    deep = activation.folder / "files" / "deep"
    deep.mkdir(parents=True)
    (deep / "link").symlink_to("/etc")
    (deep / "file").write_text("x")
    if os.geteuid() == 0:
        for path in (deep.parent, deep, deep / "link", deep / "file"):
            os.chown(path, activation.uid, activation.uid, follow_symlinks=False)
    assert activation.ask(activation.commands.remove(), expect=[ExitStatus.DONE]).state == "closed"
    assert list(activation.folder.parent.glob("activation-0*")) == [Path(f"{activation.folder}.closed")]
    assert list(Path(f"{activation.folder}.closed").iterdir()) == []
    assert Path("/etc").is_dir()


def test_a_lower_fence_can_change_nothing_and_a_higher_one_takes_over(activation: Activation) -> None:
    activation.fence = 7
    activation.launch("sleep", "60")
    activation.fence = 6
    commands = activation.commands
    frame = activation.request("true").frame(activation.key)
    every = {
        "run": commands.run(), "status": commands.status(), "wait": commands.wait(1), "stop": commands.stop(1),
        "sweep": commands.sweep(), "verify": commands.verify(), "remove": commands.remove(),
        "prepare": commands.prepare(), "put": commands.put(f"{activation.folder}/x", mode=0o600, size=0),
        "get": commands.get(f"{activation.folder}/stdout"),
    }  # fmt: skip
    for name, argv in every.items():
        done = activation.call(argv, frame if name == "run" else b"")
        assert (done.returncode, done.stdout) == (ExitStatus.FENCED, b""), name
        assert b"fence 6 is refused: a newer owner with fence 7" in done.stderr
    assert not (activation.folder / "stop").exists()
    activation.fence = 2**63
    answer = activation.status()
    assert (answer.state, answer.fence) == ("running", 2**63)
    activation.fence = 7
    assert activation.call(activation.commands.stop(1)).returncode == ExitStatus.FENCED
    activation.fence = 2**63
    assert activation.receipt(activation.stop()).state == "stopped"


@pytest.mark.parametrize("content", [b"", b"12", b"\0" * 20, b"00000000000000000x05", b"9" * 30])
def test_a_damaged_fence_lets_nobody_in_but_the_highest(activation: Activation, content: bytes) -> None:
    activation.prepare()
    (activation.folder / "fence").write_bytes(content)
    activation.fence = 20
    expected = ExitStatus.DONE if content in {b"", b"12"} else ExitStatus.FENCED
    assert activation.call(activation.commands.status()).returncode == expected


def test_root_may_stop_what_another_user_launched(activations: MakeActivation) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may act for another user")
    activation = activations(1000)
    answer = activation.launch("sleep", "60")
    assert answer.detail is not None
    assert answer.detail.worker is not None
    assert start_time(answer.detail.worker.pid) == answer.detail.worker.start
    assert activation.receipt(activation.stop(uid=0)).state == "stopped"
