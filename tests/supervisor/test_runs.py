"""Ordinary runs: what is launched is what was asked for, and the receipt tells how it ended."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.needs import probe
from tests.supervisor.conftest import MakeActivation
from tests.supervisor.rig import OTHER_UID, Activation, eventually, memory_kib, ticks

FULL = probe("full") is None
QUICK = 500 if FULL else 100
SEVEN_HOURS_S = 7 * 3600.0

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may change the user of a harness")


@pytest.mark.behaviour("SB-23", "SB-24")
def test_the_receipt_tells_the_exit_code_and_who_ran(activation: Activation) -> None:
    answer = activation.launch("sh", "-c", "echo out; echo err >&2; exit 3")
    assert answer.state in {"running", "exited"}
    receipt = activation.receipt(activation.wait())
    assert (receipt.state, receipt.reason, receipt.exit_code, receipt.signal) == ("exited", "exit", 3, None)
    assert (receipt.timed_out, receipt.tree_empty, receipt.remaining, receipt.survivors) == (False, True, (), ())
    assert receipt.uid == activation.uid
    assert receipt.started_at is not None
    assert receipt.ended_at is not None
    assert receipt.started_at <= receipt.ended_at <= time.time()
    assert (activation.output("stdout"), activation.output("stderr")) == (b"out\n", b"err\n")
    assert receipt.stdout is not None
    assert (receipt.stdout.total, receipt.stdout.dropped) == (4, 0)


def test_a_harness_that_dies_of_a_signal_has_no_exit_code(activation: Activation) -> None:
    activation.launch("sh", "-c", "kill -SEGV $$")
    receipt = activation.receipt(activation.wait())
    assert (receipt.state, receipt.exit_code, receipt.signal) == ("exited", None, signal.SIGSEGV)


def test_the_harness_sees_its_own_environment_folder_and_input_and_nothing_of_the_supervisor(
    activation: Activation, place: Path
) -> None:
    activation.prepare()
    activation.call(activation.commands.put(f"{activation.folder}/stdin", mode=0o600, size=9), b"the input")
    script = "cat; echo; pwd; echo \"$PROBE-$GIVEN\"; ls -l /proc/self/fd | grep -c ' -> '; umask; cat /proc/self/stat"
    request = activation.request("sh", "-c", script, cwd=str(place), env={"GIVEN": "a b=c\n'\""})
    activation.run(request)
    activation.receipt(activation.wait())
    lines = activation.output().decode().splitlines()
    assert lines[:2] == ["the input", str(place)]
    assert "\n".join(lines[2:4]) == "inherited-a b=c\n'\""
    assert lines[4] == "4"  # its three streams, and the folder that ls reads
    assert lines[5] == "0022"
    pid, group, session = (lines[6].split()[index] for index in (0, 4, 5))
    assert group == session != pid


def test_the_environment_can_be_the_given_one_alone_and_always_holds_the_marker(activation: Activation) -> None:
    answer = activation.launch("/usr/bin/env", inherit_environment=False, env={"ONLY": "1"})
    activation.receipt(activation.wait())
    assert answer.detail is not None
    expected = {"ONLY=1", f"PADDOCK_SUPERVISOR={answer.detail.nonce}"}
    assert set(activation.output().decode().splitlines()) == expected


def test_without_an_input_file_the_harness_reads_an_end(activation: Activation) -> None:
    activation.launch("sh", "-c", "wc -c")
    assert activation.receipt(activation.wait()).exit_code == 0
    assert activation.output().split() == [b"0"]


def test_the_program_is_looked_for_in_the_path_of_the_harness(activation: Activation, place: Path) -> None:
    script = place / "own-program"
    script.write_text("#!/bin/sh\necho found\n")
    script.chmod(0o755)
    activation.launch("own-program", env={"PATH": f"/nowhere:{place}"})
    assert activation.receipt(activation.wait()).exit_code == 0
    assert activation.output() == b"found\n"


@pytest.mark.behaviour("SB-14", "SB-28")
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot execute {path}"),
        ("#!/no/such/interpreter -x\n", "cannot execute {path}: its interpreter /no/such/interpreter -x is missing"),
        ("\x7fELF", "cannot execute {path}"),
    ],
)
def test_a_program_that_cannot_start_is_named_with_the_reason(
    activation: Activation, place: Path, content: str | None, problem: str
) -> None:
    path = place / "program"
    if content is not None:
        path.write_text(content)
        path.chmod(0o755)
    answer = activation.launch(str(path))
    assert answer.state == "launch_failed"
    receipt = activation.receipt(answer)
    assert receipt.problem == problem.format(path=path)
    assert (receipt.exit_code, receipt.signal) == (None, None)
    assert receipt.errno in {2, 8}


def test_a_missing_working_folder_is_named(activation: Activation) -> None:
    answer = activation.launch("true", cwd="/nonesuch/folder")
    assert activation.receipt(answer).problem == "cannot enter the working directory /nonesuch/folder"


def test_a_harness_whose_folder_was_deleted_still_ends_with_a_receipt(activation: Activation, place: Path) -> None:
    work = place / "work"
    work.mkdir()
    work.chmod(0o777)
    activation.launch("sh", "-c", f"rmdir {work}; exit 5", cwd=str(work))
    assert activation.receipt(activation.wait()).exit_code == 5


@as_root
def test_root_runs_a_harness_as_another_user_with_its_groups(activations: MakeActivation) -> None:
    activation = activations(0)
    script = "id -u; id -g; id -G; echo to-the-device > /dev/stdout; kill -0 $PPID; ls $FOLDER"
    env = {"FOLDER": str(activation.folder)}
    activation.launch("sh", "-c", script, user=(OTHER_UID, 1234), groups=[1234, 55, 66], env=env)
    assert activation.receipt(activation.wait()).exit_code == 2
    assert activation.output().decode().splitlines() == ["1000", "1234", "1234 55 66", "to-the-device"]
    assert b"not permitted" in activation.output("stderr"), "the harness may signal its supervisor"
    assert b"Permission denied" in activation.output("stderr"), "the harness may look into the activation's folder"


def test_who_is_not_root_may_not_ask_for_another_user(activations: MakeActivation) -> None:
    activation = activations(OTHER_UID if os.geteuid() == 0 else os.geteuid())
    answer = activation.launch("true", user=(4321, 4321))
    assert activation.receipt(answer).problem == "cannot take the asked-for groups"


def test_new_privileges_can_be_ruled_out(activation: Activation) -> None:
    activation.launch("grep", "NoNewPrivs", "/proc/self/status", no_new_privileges=True)
    activation.receipt(activation.wait())
    assert activation.output().split() == [b"NoNewPrivs:", b"1"]


@pytest.mark.behaviour("SB-29")
def test_the_oom_score_is_raised_for_the_harness_and_not_for_its_supervisor(activation: Activation) -> None:
    script = "cat /proc/self/oom_score_adj; cat /proc/$PPID/oom_score_adj"
    activation.launch("sh", "-c", script, oom_score_adj=700)
    receipt = activation.receipt(activation.wait())
    assert receipt.oom_score_adj == 700
    assert activation.output().split() == [b"700", b"0"]


@pytest.mark.behaviour("SB-29")
def test_by_default_the_oom_score_is_left_alone(activation: Activation) -> None:
    activation.launch("cat", "/proc/self/oom_score_adj")
    assert activation.receipt(activation.wait()).oom_score_adj is None
    assert activation.output().split() == [b"0"]


@pytest.mark.behaviour("SB-29")
def test_an_oom_score_that_cannot_be_set_is_a_gap_and_no_failure(activations: MakeActivation) -> None:
    activation = activations(OTHER_UID if os.geteuid() == 0 else os.geteuid())
    activation.launch("sh", "-c", "exit 4", oom_score_adj=-500)
    receipt = activation.receipt(activation.wait())
    assert (receipt.exit_code, receipt.oom_score_adj) == (4, None)


@pytest.mark.behaviour("SB-21", "SB-22", "SB-23")
def test_the_deadline_ends_the_harness_without_any_client(activation: Activation) -> None:
    script = "trap 'echo terminated; exit 9' TERM; echo ready; while :; do sleep 0.01; done"
    activation.launch("sh", "-c", script, deadline_s=0.4)
    receipt = activation.receipt(activation.wait())
    assert (receipt.state, receipt.reason, receipt.timed_out) == ("deadline", "deadline", True)
    assert receipt.exit_code == 9
    assert activation.output() == b"ready\nterminated\n"


def test_a_harness_that_ignores_term_is_killed_after_its_grace(activation: Activation) -> None:
    activation.launch("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done", grace_s=0.5)
    assert eventually(lambda: activation.output() == b"ready\n")
    began = time.monotonic()
    receipt = activation.receipt(activation.stop())
    assert receipt.signal == signal.SIGKILL
    assert 0.5 <= time.monotonic() - began < 5


def test_a_deadline_of_many_hours_is_armed_in_full(activation: Activation) -> None:
    answer = activation.launch("sleep", "60", deadline_s=SEVEN_HOURS_S)
    assert answer.detail is not None
    assert answer.detail.supervisor is not None
    timers = Path(f"/proc/{answer.detail.supervisor.pid}/fdinfo")
    due = [
        int(found[1])
        for path in timers.iterdir()
        if (found := re.search(r"it_value: \((\d+), \d+\)", path.read_text()))
    ]
    assert len(due) == 1
    assert SEVEN_HOURS_S - 60 < due[0] <= SEVEN_HOURS_S
    assert activation.receipt(activation.stop()).state == "stopped"


@pytest.mark.behaviour("SB-21")
def test_the_supervisor_has_a_session_of_its_own_and_keeps_nothing_of_its_caller(activation: Activation) -> None:
    answer = activation.launch("sleep", "60")
    assert answer.detail is not None
    for process in (answer.detail.guardian, answer.detail.supervisor):
        assert process is not None
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        assert fields[2] == fields[3] == str(process.pid)
        if os.geteuid() == 0:
            streams = {Path(f"/proc/{process.pid}/fd/{number}").readlink() for number in range(3)}
            assert streams == {Path("/")}
            assert Path(f"/proc/{process.pid}/cwd").readlink() == Path("/")


def test_an_idle_supervisor_uses_next_to_nothing(activation: Activation) -> None:
    answer = activation.launch("sleep", "60")
    assert answer.detail is not None
    assert answer.detail.supervisor is not None
    assert answer.detail.guardian is not None
    pids = (answer.detail.supervisor.pid, answer.detail.guardian.pid)

    before = ticks(*pids)
    time.sleep(2)
    assert ticks(*pids) - before <= 2
    assert all(memory_kib(pid, "VmRSS") < 1500 for pid in pids)


def test_every_quick_command_has_its_own_exit_code(activations: MakeActivation) -> None:
    wrong = []
    for number in range(QUICK):
        activation = activations()
        activation.launch("sh", "-c", f"(sleep 0.01 &) ; exit {number % 7}")
        receipt = activation.receipt(activation.wait())
        if receipt.exit_code != number % 7:
            wrong.append((number, receipt))
    assert wrong == []


def test_incomplete_and_senseless_frames_launch_nothing(activation: Activation) -> None:
    activation.prepare()
    whole = activation.request("true").frame(activation.key)
    frames = {
        b"": "incomplete",
        whole[:-1]: "incomplete",
        whole[:40]: "incomplete",
        b"paddock-run=2\0arg=true\0\0": "of different releases",
        b"id=x\0arg=true\0\0": "stands where paddock-run=1 should",
        b"paddock-run=1\0\0": "names no program",
        b"paddock-run=1\0arg=\0\0": "names no program",
        b"paddock-run=1\0colour=red\0arg=true\0\0": "colour is unknown",
        b"paddock-run=1\0key=12\0arg=true\0\0": "64 hexadecimal digits",
        b"paddock-run=1\0survivors=some\0arg=true\0\0": "none of drain",
        b"paddock-run=1\0deadline_ms=-1\0arg=true\0\0": "no number",
        b"paddock-run=1\0deadline_ms=99999999999999999999\0arg=true\0\0": "too large",
        b"paddock-run=1\0user=root\0arg=true\0\0": "UID:GID",
        b"paddock-run=1\0env=NAME\0arg=true\0\0": "NAME=VALUE",
        b'paddock-run=1\0id="\0arg=true\0\0': "letters, digits",
    }
    for frame, sentence in frames.items():
        done = activation.call(activation.commands.run(), frame)
        assert (done.returncode, done.stdout) == (1, b""), frame
        assert sentence in done.stderr.decode()
    assert activation.status().state == "absent"
    assert activation.run(activation.request("true")).state in {"running", "exited"}


def test_long_arguments_and_many_variables_arrive_unchanged(activation: Activation) -> None:
    env = {f"VARIABLE_{number}": "v" * 200 for number in range(300)}
    argument = "ä\n\t" * 20_000
    activation.launch("sh", "-c", 'printf %s "$1"; env | grep -c ^VARIABLE_ >&2', "sh", argument, env=env)
    activation.receipt(activation.wait())
    assert activation.output().decode() == argument
    assert activation.output("stderr") == b"300\n"
