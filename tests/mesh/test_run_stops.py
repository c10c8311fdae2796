"""Ctrl-C in `paddock run`: once, twice, with and without services of its own."""

import signal
import time

import httpx
import pytest

from services.collector.options import RunOptions
from tests.mesh.chat import Gate, hangs, says
from tests.mesh.processes import Running, running, wait_until_none
from tests.mesh.run_rig import BOUND_S, RIGHT, RunRig, wait_for_note

ROWS = 6
STOP_WAIT_S = RunOptions(rows=()).stop_wait_s


def _interrupt(run: Running) -> float:
    """One Ctrl-C; when it was."""
    run.send(signal.SIGINT)
    return time.monotonic()


@pytest.mark.behaviour("CO-2", "CO-3", "CO-5")
def test_one_interrupt_stops_the_sending_and_the_episodes_go_on(rig: RunRig) -> None:
    gate = Gate()
    file = rig.rows(*[[gate.before(says(RIGHT))]] * ROWS)
    with rig.begun(file, "--concurrency", 4) as run:
        rig.wait_for_calls(4)
        began = _interrupt(run)
        assert run.ended(BOUND_S) == 130
        assert time.monotonic() - began > STOP_WAIT_S - 0.5
    assert "Stopping: no more rows are sent. 4 under way have 3 s to end" in run.err
    assert "what is left goes on in the environment. Ctrl-C again leaves at once." in run.err
    assert f"Stopped. {ROWS} rows have no outcome yet. Those under way go on in the environment" in run.err
    assert f"paddock run --resume -o {rig.out}." in run.err.replace(str(rig.folder / "paddock"), "paddock")
    listed = httpx.get(f"{rig.mesh.url('environment')}/episodes?state=running", trust_env=False).json()["episodes"]
    assert {episode["key"] for episode in listed} >= set(rig.keys[:4])
    gate.open()
    done = rig.resume()
    assert done.status == 0, done.told
    rig.assert_each_ran_once()


@pytest.mark.behaviour("CO-3")
def test_rows_that_end_soon_after_an_interrupt_are_kept(rig: RunRig) -> None:
    gate = Gate()
    file = rig.rows(*[[gate.before(says(RIGHT))]] * ROWS)
    with rig.begun(file, "--concurrency", 4) as run:
        rig.wait_for_calls(4)
        _interrupt(run)
        wait_for_note(run, "^Stopping: ")
        gate.open()
        assert run.ended(BOUND_S) == 130
    assert len(rig.results) == 4
    assert [len(scene.asked) for scene in rig.scenes] == [1, 1, 1, 1, 0, 0]
    assert rig.resume().status == 0
    rig.assert_each_ran_once()


@pytest.mark.behaviour("CO-5", "ES-34")
def test_an_interrupt_can_cancel_the_episodes_and_a_resumed_run_tries_them_again(rig: RunRig) -> None:
    file = rig.rows(*[[hangs, says(RIGHT)]] * ROWS)
    with rig.begun(file, "--cancel-on-interrupt") as run:
        asked = rig.wait_for_calls()
        _interrupt(run)
        assert run.ended(BOUND_S) == 130
    assert f"{ROWS} under way are cancelled." in run.err
    assert "Those under way were cancelled; a resumed run tries them again." in run.err
    for one in asked:
        rig.chat.wait_until_gone(one)
    rig.wait_until_ended()
    assert {rig.told(key).json()["failure"]["failure_kind"] for key in rig.keys} == {"cancelled"}
    done = rig.resume()
    assert done.status == 0, done.told
    rig.assert_complete()
    assert [len(scene.asked) for scene in rig.scenes] == [2] * ROWS
    assert {result["episode_id"]["attempt"] for result in rig.results} == {1}


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_interrupt_leaves_at_once_and_loses_nothing(rig: RunRig, second: signal.Signals) -> None:
    gate = Gate()
    file = rig.rows(*[[gate.before(says(RIGHT))]] * ROWS)
    with rig.begun(file) as run:
        rig.wait_for_calls()
        _interrupt(run)
        wait_for_note(run, "^Stopping: ")
        run.send(second)
        assert run.ended(BOUND_S) == 128 + second
    assert "Stopped." not in run.err, "it waited and summed up"
    assert "Traceback" not in run.err
    assert "exception" not in run.err
    gate.open()
    assert rig.resume().status == 0
    rig.assert_each_ran_once()


def test_services_of_the_run_itself_end_with_it_and_that_is_said(rig: RunRig) -> None:
    file = rig.rows(*[[hangs, says(RIGHT)]] * ROWS)
    model = {"PADDOCK_MODEL_BASE_URL": rig.chat.url, "PADDOCK_MODEL_NAME": "m"}
    arguments = ("run", file, "--environment", "math", "-o", rig.out)
    with running(*arguments, cwd=rig.folder, environ=model, name="own") as run:
        asked = rig.wait_for_calls()
        _interrupt(run)
        wait_for_note(
            run, f"^Stopping: .* {ROWS} under way have 3 s to end; what is left ends with this run's services"
        )
        assert run.ended(BOUND_S) == 130
        assert "a resumed run starts them again" in run.err
        assert wait_until_none(run.mark, 5.0) == []
    for one in asked:
        rig.chat.wait_until_gone(one)
    with running("run", "--resume", "-o", rig.out, cwd=rig.folder, environ=model, name="own-again") as again:
        assert again.ended(BOUND_S) == 0, again.err
        assert "Starting the four services" in again.err
    rig.assert_complete()


def test_a_second_interrupt_still_takes_the_services_of_the_run_along(rig: RunRig) -> None:
    file = rig.rows(*[[hangs]] * ROWS)
    model = {"PADDOCK_MODEL_BASE_URL": rig.chat.url, "PADDOCK_MODEL_NAME": "m"}
    arguments = ("run", file, "--environment", "math", "-o", rig.out)
    with running(*arguments, cwd=rig.folder, environ=model, name="own") as run:
        asked = rig.wait_for_calls()
        _interrupt(run)
        wait_for_note(run, "^Stopping: ")
        _interrupt(run)
        assert run.ended(BOUND_S) == 130
        assert "Traceback" not in run.err
        assert wait_until_none(run.mark, 5.0) == []
    for one in asked:
        rig.chat.wait_until_gone(one)
