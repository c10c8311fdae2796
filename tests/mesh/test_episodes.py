"""`paddock episodes`: a person lists, watches and cancels what an environment server has in hand."""

import re

import pytest

from services.collector.options import EXIT_ROWS_FAILED, EXIT_USAGE
from tests.mesh.background import Background
from tests.mesh.chat import Gate, hangs, refuses, says
from tests.mesh.processes import Done, paddock, running
from tests.mesh.run_rig import BOUND_S, RIGHT, RunRig
from tests.serving import free_port


def _episodes(rig: RunRig, *words: object) -> Done:
    return paddock("episodes", *words, cwd=rig.folder, environ={"PADDOCK_ENVIRONMENT_URL": rig.proxy.url})


def test_episodes_are_listed_with_their_stage_by_state_and_page_by_page(rig: RunRig) -> None:
    gate = Gate()
    file = rig.rows(*[[gate.before(says(RIGHT))]] * 3)
    with rig.begun(file) as run:
        rig.wait_for_calls()
        keys = sorted(rig.keys)
        listed = _episodes(rig, "--state", "running")
        assert listed.status == 0, listed.err
        lines = {line.split()[0]: line.split()[1:] for line in listed.out.splitlines()}
        assert {key: lines[key] for key in keys} == {key: ["running", "agent", "math"] for key in keys}
        page = _episodes(rig, "--state", "running", "--limit", 1, "--after", keys[0])
        assert [line.split()[0] for line in page.out.splitlines()] == [keys[1]]
        assert page.err == f"There may be more: --after {keys[1]}\n"
        gate.open()
        assert run.ended(BOUND_S) == 0, run.err
    done = _episodes(rig, "--state", "done", "--url", rig.mesh.url("environment"))
    assert {line.split()[0] for line in done.out.splitlines()} >= set(keys)
    none = _episodes(rig, "--state", "queued")
    assert (none.status, none.out, none.err) == (0, "", "There are none.\n")


def test_an_episode_is_watched_to_its_reward_over_connections_that_break(rig: RunRig, background: Background) -> None:
    gate = Gate()
    file = rig.rows([gate.before(says(RIGHT))])
    with rig.begun(file) as run:
        rig.scenes[0].wait_for_call()
        (key,) = rig.keys
        words = ("episodes", "watch", key, "--url", rig.proxy.url)
        with running(*words, cwd=rig.folder, environ={}, name="watch") as watch:
            watch.wait_for_line(r"^\d\d:\d\d:\d\d  running  agent$")
            background.run(rig.proxy.away(0.5))
            gate.open()
            assert watch.ended(BOUND_S) == 0, watch.err
        assert run.ended(BOUND_S) == 0, run.err
    told = watch.out.splitlines()
    assert [re.sub(r"^[\d:]{8}  ", "", line) for line in told].count("running  agent") == 1
    assert told[-2].split()[1] == "done"
    assert told[-1] == "reward 1.0"


def test_cancelled_and_failed_episodes_are_told_with_their_reason(rig: RunRig) -> None:
    file = rig.rows([hangs], [hangs], [refuses(503, {"message": "busy"})])
    with rig.begun(file) as run:
        rig.wait_for_calls()
        first, second, failed = rig.keys
        with running("episodes", "watch", first, "--url", rig.proxy.url, cwd=rig.folder, environ={}) as watch:
            watch.wait_for_line("running")
            done = _episodes(rig, "cancel", first, "never-seen", second)
            assert done.status == 1
            assert re.findall(r"^(\S+): cancelled", done.out, re.MULTILINE) == [first, second]
            assert "There is no episode 'never-seen'" in done.err
            assert watch.ended(BOUND_S) == 1, watch.err
        assert "cancelled (may be tried again): The episode was cancelled by a client." in watch.out
        assert run.ended(BOUND_S) == 1, run.err
    told = _episodes(rig, "watch", failed)
    assert told.status == 1
    assert "failed at stage agent: model_overloaded (may be tried again): " in told.out
    again = _episodes(rig, "cancel", first)
    assert (again.status, "has ended; its outcome stands" in again.err) == (1, True)


@pytest.mark.parametrize(
    "words", [(), ("watch", "never-seen"), ("cancel", "never-seen")], ids=["list", "watch", "cancel"]
)
def test_what_cannot_be_asked_is_told_in_a_sentence(rig: RunRig, words: tuple[str, ...]) -> None:
    refused = EXIT_ROWS_FAILED if words[:1] == ("cancel",) else EXIT_USAGE
    nowhere = f"http://127.0.0.1:{free_port()}"
    done = _episodes(rig, *words, "--url", nowhere)
    assert (done.status, f"Nothing answers at {nowhere}" in done.err) == (refused, True), done.err
    other = _episodes(rig, *words, "--url", rig.mesh.url("agent"))
    assert (other.status, "Not Found" in other.err) == (refused, True), other.err
    if words:
        done = _episodes(rig, *words)
        assert (done.status, "There is no episode 'never-seen'" in done.err) == (refused, True), done.err
