"""Children that start after others are ready, and stop after others have ended."""

import os
import signal

import pytest

from tests.launcher.driver import Plan
from tests.launcher.rig import Launched, wait_for_pending

TERM_AND_INT = [(signal.SIGTERM, 143), (signal.SIGINT, 130)]
TWO_STAGES = {"first": 0, "second": 1, "third": 1}


def three(first: str, others: str = "serve") -> dict[str, str]:
    return {"first": first, "second": others, "third": others}


@pytest.mark.behaviour("LA-2")
def test_a_child_is_started_when_all_of_the_stage_before_are_ready() -> None:
    plan = Plan({"third": "serve", "second": "serve", "first": "serve"}, start_stages={"second": 1, "third": 2})
    with Launched(plan) as launched:
        launched.read_until("ready")
        assert [told.split()[0] for told in launched.named("up")] == ["first", "second", "third"]
        os.kill(launched.pid, signal.SIGTERM)
        assert launched.read_to_the_end(5.0) == 143


@pytest.mark.behaviour("LA-1", "LA-2")
def test_nothing_is_started_after_a_stage_that_does_not_become_ready() -> None:
    plan = Plan(three("mute"), start_stages={"second": 1, "third": 2}, start_timeout_s=1.0)
    with Launched(plan) as launched:
        assert launched.read_to_the_end() == 1
        assert [told.split()[0] for told in launched.named("up")] == ["first"]
        assert "not ready within 1 s." in launched.named("say")[0]


@pytest.mark.parametrize(("number", "status"), TERM_AND_INT)
def test_a_child_is_asked_to_stop_when_all_of_the_stage_before_have_ended(number: signal.Signals, status: int) -> None:
    plan = Plan(three("takes_its_time"), stop_stages=TWO_STAGES, stop_times_s=(15.0, 19.0))
    with Launched(plan) as launched:
        launched.read_until("ready")
        os.kill(launched.pid, number)
        launched.read_until("signal first")
        launched.go_on()
        assert launched.read_to_the_end() == status
        order = [line for line in launched.lines if line.startswith(("signal", "left"))]
        assert order[:2] == ["signal first SIGTERM", "left first"]
        assert sorted(order[2:]) == ["signal second SIGTERM", "signal third SIGTERM"]


@pytest.mark.behaviour("LA-4", "LA-8")
def test_the_next_stage_is_stopped_also_when_the_one_before_does_not_end_in_its_time() -> None:
    plan = Plan(three("stubborn"), stop_stages=TWO_STAGES, stop_times_s=(0.5, 2.0))
    with Launched(plan) as launched:
        launched.read_until("ready")
        os.kill(launched.pid, signal.SIGTERM)
        launched.read_until("signal", count=3, bound_s=1.8)
        assert launched.named("signal")[0] == "first SIGTERM"
        assert launched.read_to_the_end(5.0) == 143
        (said,) = launched.named("say")
        assert said.startswith("first (pid ")
        assert said.endswith("did not end within 2 s and is killed.")


@pytest.mark.behaviour("LA-4", "LA-8")
@pytest.mark.parametrize(("number", "status"), TERM_AND_INT)
def test_children_of_all_stages_that_heed_nothing_are_gone_within_five_seconds(
    number: signal.Signals, status: int
) -> None:
    stages = {"first": 0, "second": 1, "third": 2}
    with Launched(Plan(three("stubborn", "stubborn"), stop_stages=stages, stop_times_s=(2.0, 3.5, 4.5))) as launched:
        launched.read_until("ready")
        os.kill(launched.pid, number)
        assert launched.read_to_the_end(5.0) == status
        assert launched.named("signal") == ["first SIGTERM", "second SIGTERM", "third SIGTERM"]


@pytest.mark.behaviour("LA-8")
def test_further_signals_do_not_hurry_a_stop_in_stages() -> None:
    with Launched(Plan(three("takes_its_time"), stop_stages=TWO_STAGES, stop_times_s=(15.0, 19.0))) as launched:
        launched.read_until("ready")
        os.kill(launched.pid, signal.SIGTERM)
        launched.read_until("signal first")
        for further in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(launched.pid, further)
        launched.go_on()
        assert launched.read_to_the_end() == 143
        ends = [line for line in launched.lines if line.startswith(("signal", "left"))]
        assert ends[:2] == ["signal first SIGTERM", "left first"]
        assert len(ends) == 4


def test_a_death_stops_the_others_in_stages_too() -> None:
    with Launched(Plan(three("takes_its_time"), stop_stages=TWO_STAGES, stop_times_s=(15.0, 19.0))) as launched:
        launched.read_until("ready")
        os.kill(launched.pid_of("second"), signal.SIGKILL)
        launched.read_until("signal first")
        launched.go_on()
        assert launched.read_to_the_end() == 1
        ends = [line for line in launched.lines if line.startswith(("signal", "left"))]
        assert ends == ["signal first SIGTERM", "left first", "signal third SIGTERM"]


def test_a_child_of_a_later_stop_stage_that_is_not_up_yet_is_never_started() -> None:
    plan = Plan(three("takes_its_time"), hold="second", stop_stages=TWO_STAGES, stop_times_s=(15.0, 19.0))
    with Launched(plan) as launched:
        launched.read_until("held second")
        launched.read_until("up", count=2)
        os.kill(launched.pid, signal.SIGTERM)
        wait_for_pending(launched.pid, signal.SIGTERM)
        launched.go_on()
        launched.read_until("signal first")
        launched.go_on()
        assert launched.read_to_the_end() == 143
        assert sorted(launched.named("signal")) == ["first SIGTERM", "second SIGTERM"]
        assert "third" not in {told.split()[0] for told in launched.named("up")}
