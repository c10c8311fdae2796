"""`paddock run` on a bad way to real services, and the mistakes that it tells before it sends anything."""

import os
import random
import time
from pathlib import Path

import pytest

from services.collector.call import FIRST_WAIT_S
from tests.collector.fault_proxy import at_random, says
from tests.mesh import rows
from tests.mesh.background import Background
from tests.mesh.chat import ChatServer, Gate
from tests.mesh.chat import says as model_says
from tests.mesh.processes import paddock, served
from tests.mesh.run_rig import BOUND_S, RIGHT, RunRig, answers_late, wait_for_note
from tests.serving import free_port

ROWS = 6


@pytest.mark.behaviour("CO-3", "CO-4")
@pytest.mark.parametrize("seed", range(3))
def test_whatever_a_balancer_does_each_row_is_run_once_and_graded(
    rig: RunRig, background: Background, seed: int
) -> None:
    dice = random.Random(seed)
    file = rig.rows(*[[answers_late(dice.uniform(0.0, 0.5), model_says(RIGHT))] for _ in range(30)])
    rig.proxy.choose = at_random(seed, 0.3)
    with rig.begun(file, "--concurrency", 8) as run:
        rig.scenes[5].wait_for_call()
        background.run(rig.proxy.away(0.5))
        assert run.ended(2 * BOUND_S) == 0, run.err
    rig.assert_each_ran_once()
    assert rig.failures == []


@pytest.mark.behaviour("CO-3")
def test_a_way_that_is_away_for_a_while_is_waited_for_and_named(rig: RunRig, background: Background) -> None:
    gate = Gate()
    file = rig.rows(*[[gate.before(model_says(RIGHT))]] * ROWS)
    with rig.begun(file) as run:
        rig.wait_for_calls()
        background.run(rig.proxy.close())
        wait_for_note(run, rf"^0/{ROWS} rows, {ROWS} waiting: {rig.proxy.url} \(.+\)$")
        gate.open()
        background.run(rig.proxy.open())
        assert run.ended(BOUND_S) == 0, run.err
    rig.assert_each_ran_once()


@pytest.mark.behaviour("CO-7")
def test_a_way_that_stays_bad_ends_a_row_with_the_reason_and_the_same_attempt_is_asked_for_again(rig: RunRig) -> None:
    gate = Gate()
    file = rig.rows([gate.before(model_says(RIGHT))])
    with rig.begun(file, "--patience", 1) as run:
        rig.scenes[0].wait_for_call()
        rig.on("GET", "/episodes/run-", says(502))
        assert run.ended(BOUND_S) == 1, run.err
    (failure,) = rig.failures
    reason = failure["failure"]["failure_reason"]
    assert reason.startswith("Given up after "), reason
    assert "answered 502: <html>" in reason
    assert (failure["failure"]["terminal"], failure["reported_by"]) == (False, "collector")
    rig.spoil_nothing()
    gate.open()
    assert rig.resume().status == 0
    rig.assert_each_ran_once()
    assert rig.results[0]["episode_id"]["attempt"] == 0


def test_stages_are_told_while_rows_are_under_way(rig: RunRig) -> None:
    gate = Gate()
    file = rig.rows(*[[gate.before(model_says(RIGHT))]] * ROWS)
    began = time.monotonic()
    with rig.begun(file) as run:
        wait_for_note(run, rf"^0/{ROWS} rows, {ROWS} under way \(agent {ROWS}\)$")
        assert time.monotonic() - began > FIRST_WAIT_S
        gate.open()
        assert run.ended(BOUND_S) == 0, run.err


def test_a_mistyped_environment_is_told_once_before_any_row_is_run(rig: RunRig) -> None:
    file = rig.rows(*[[model_says(RIGHT)]] * ROWS)
    arguments = ("run", file, "-o", rig.out, "--url", rig.proxy.url)
    done = paddock(*arguments, "--environment", "mth", cwd=rig.folder)
    (told,) = done.err.splitlines()
    assert done.status == 2
    assert "There is no environment 'mth'. Did you mean 'math'? Known: " in told
    assert told.endswith("Correct --environment.")
    done = paddock(*arguments, cwd=rig.folder)
    (told,) = done.err.splitlines()
    assert (done.status, told.endswith("Name one for all rows with --environment.")) == (2, True), told
    assert [path.name for path in rig.folder.iterdir()] == ["rows.jsonl"]
    assert [scene.asked for scene in rig.scenes] == [[]] * ROWS


def test_a_missing_or_wrong_token_is_told_once_and_a_right_one_is_used(tmp_path: Path, chat: ChatServer) -> None:
    file = rows.write(tmp_path / "rows.jsonl", [rows.math(f"<token {number}>", "12") for number in range(ROWS)])
    for number in range(ROWS):
        chat.on(f"<token {number}>", model_says(RIGHT))
    environ = {"PADDOCK_MODEL_BASE_URL": chat.url, "PADDOCK_MODEL_NAME": "m", "PADDOCK_DRAIN_LEAD_S": "0"}
    out = tmp_path / "out.jsonl"
    with served(cwd=tmp_path, environ={**environ, "PADDOCK_CLIENT_TOKEN": "right-token"}) as mesh:
        arguments = ("run", file, "--environment", "math", "-o", out, "--url", mesh.url("environment"))
        for token, sentence in ((None, "asks for a token, and there is none"), ("wrong-token", "refuses our token")):
            done = paddock(*arguments, cwd=tmp_path, environ={"PADDOCK_CLIENT_TOKEN": token} if token else {})
            (told,) = done.err.splitlines()
            assert (done.status, sentence in told, "PADDOCK_CLIENT_TOKEN" in told) == (2, True, True), told
            assert not out.exists()
        done = paddock(*arguments, cwd=tmp_path, environ={"PADDOCK_CLIENT_TOKEN": "right-token"})
    assert done.status == 0, done.told
    assert "right-token" not in done.told + "".join(path.read_text() for path in tmp_path.glob("out*"))


def test_a_run_that_can_reach_nothing_says_so_once(rig: RunRig) -> None:
    file = rig.rows(*[[model_says(RIGHT)]] * ROWS)
    url = f"http://127.0.0.1:{free_port()}"
    done = paddock("run", file, "--environment", "math", "-o", rig.out, "--url", url, cwd=rig.folder)
    (told,) = done.err.splitlines()
    assert done.status == 2
    assert f"Nothing answers at {url}" in told
    assert "paddock up" in told
    assert os.listdir(rig.folder) == ["rows.jsonl"]
