"""`paddock run` is killed at any moment and resumed: each row is run exactly once, and its result is there once."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.collector.fault_proxy import cuts
from tests.mesh.chat import Gate, refuses, says
from tests.mesh.run_rig import BOUND_S, RIGHT, Hold, RunRig, answers_late

ROWS = 6


@pytest.mark.behaviour("CO-3", "CO-5")
def test_a_run_that_is_killed_before_its_rows_arrive_sends_them_under_the_ids_it_wrote_down(rig: RunRig) -> None:
    file = rig.rows(*[[says(RIGHT)]] * ROWS)
    hold = Hold(then=cuts)
    rig.on("POST", "/run", hold.before)
    with rig.begun(file) as run:
        hold.wait_for(ROWS)
        run.kill()
    hold.open()
    rig.spoil_nothing()
    keys = rig.keys
    assert [rig.told(key).status_code for key in keys] == [404] * ROWS
    done = rig.resume()
    assert done.status == 0, done.told
    rig.assert_each_ran_once()
    assert sorted(result["episode_id"]["rollout_id"] for result in rig.results) == sorted(keys)


@pytest.mark.behaviour("CO-3", "CO-5")
def test_a_run_that_is_killed_after_its_rows_were_taken_joins_the_running_episodes(rig: RunRig) -> None:
    gate = Gate()
    file = rig.rows(*[[gate.before(says(RIGHT))]] * ROWS)
    with rig.begun(file) as run:
        rig.wait_for_calls()
        run.kill()
    assert [rig.told(key).json()["stage"] for key in rig.keys] == ["agent"] * ROWS
    joined = Hold()
    joined.open()
    rig.on("POST", "/run", joined.after)
    with rig.resumed() as again:
        joined.wait_until_sent(ROWS)
        gate.open()
        assert again.ended(BOUND_S) == 0, again.err
    rig.assert_each_ran_once()


@pytest.mark.behaviour("CO-3", "CO-5")
def test_a_run_that_is_killed_while_it_polls_fetches_what_ended_in_the_meantime(rig: RunRig) -> None:
    gate = Gate()
    file = rig.rows(*[[gate.before(says(RIGHT))]] * ROWS)
    polling = Hold()
    rig.on("GET", "/episodes/run-", polling.before)
    with rig.begun(file) as run:
        polling.wait_for(ROWS)
        run.kill()
    polling.open()
    gate.open()
    rig.wait_until_ended()
    done = rig.resume()
    assert done.status == 0, done.told
    rig.assert_each_ran_once()


@pytest.mark.behaviour("CO-3", "CO-5")
def test_a_run_that_is_killed_between_an_answer_and_its_line_fetches_it_again(rig: RunRig) -> None:
    file = rig.rows(*[[says(RIGHT)]] * ROWS)
    _kill_with_answers_in_hand(rig, file)
    assert (rig.results, rig.failures) == ([], [])
    done = rig.resume()
    assert done.status == 0, done.told
    rig.assert_each_ran_once()


@pytest.mark.behaviour("CO-5")
def test_failures_that_a_killed_run_never_read_are_written_down_and_tried_again(rig: RunRig) -> None:
    file = rig.rows(*[[refuses(503, {"message": "busy"}), says(RIGHT)]] * ROWS)
    _kill_with_answers_in_hand(rig, file)
    done = rig.resume()
    assert done.status == 0, done.told
    rig.assert_complete()
    assert [len(scene.asked) for scene in rig.scenes] == [2] * ROWS
    assert [(record["episode_id"]["attempt"], record["failure"]["failure_kind"]) for record in rig.failures] == [
        (0, "model_overloaded")
    ] * ROWS
    assert {result["episode_id"]["attempt"] for result in rig.results} == {1}


def _kill_with_answers_in_hand(rig: RunRig, file: Path) -> None:
    """All answers have reached the run's sockets, and it has read none of them."""
    answers = Hold()
    rig.on("POST", "/run", answers.after)
    with rig.begun(file) as run:
        answers.wait_for(ROWS)
        os.kill(run.pid, signal.SIGSTOP)
        answers.open()
        answers.wait_until_sent(ROWS)
        run.kill()
    rig.spoil_nothing()


@pytest.mark.behaviour("CO-5")
def test_a_line_that_was_half_written_is_written_again(rig: RunRig) -> None:
    file = rig.rows(*[[says(RIGHT)]] * ROWS)
    with rig.begun(file) as run:
        assert run.ended(BOUND_S) == 0, run.err
    whole = rig.results
    rig.out.write_bytes(rig.out.read_bytes()[:-30])
    done = rig.resume(file)
    assert done.status == 0, done.told
    assert "was cut off in the middle and is dropped" in done.err
    rig.assert_each_ran_once()
    assert [result["response"] for result in rig.results] == [result["response"] for result in whole]


@pytest.mark.behaviour("CO-3", "CO-5")
@pytest.mark.parametrize("seed", range(2))
def test_a_run_that_is_killed_again_and_again_at_any_moment_loses_and_repeats_nothing(rig: RunRig, seed: int) -> None:
    dice = random.Random(seed)
    file = rig.rows(*[[answers_late(dice.uniform(0.05, 0.6), says(RIGHT))] for _ in range(40)])
    with rig.begun(file, "--concurrency", 4) as run:
        rig.scenes[0].wait_for_call()
        time.sleep(dice.uniform(0.0, 0.5))
        run.kill()
    kills = 1
    while kills < 6:
        with rig.resumed("--concurrency", 4) as run:
            time.sleep(dice.uniform(0.3, 2.0))
            run.kill()
        kills += 1
    done = rig.resume()
    assert done.status == 0, done.told
    rig.assert_each_ran_once()
    assert rig.failures == []
