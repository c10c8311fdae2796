"""What the launcher does about signals, at every moment of its life."""

import os
import pty
import random
import signal
import time

import pytest

from tests.launcher.driver import Plan
from tests.launcher.rig import FOUR, Launched, four, gone, wait_for_pending

TERM_AND_INT = [(signal.SIGTERM, 143), (signal.SIGINT, 130)]
ONE_TERM_EACH = sorted(f"{name} SIGTERM" for name in FOUR)


@pytest.mark.behaviour("LA-4", "LA-5")
@pytest.mark.parametrize(("number", "status"), TERM_AND_INT)
def test_four_children_are_gone_within_five_seconds_of_a_signal(number: signal.Signals, status: int) -> None:
    with Launched(Plan(four("serve"))) as launched:
        launched.read_until("ready")
        os.kill(launched.pid, number)
        assert launched.read_to_the_end(5.0) == status
        assert sorted(launched.named("signal")) == ONE_TERM_EACH


@pytest.mark.behaviour("LA-4", "LA-5", "LA-8")
@pytest.mark.parametrize(("number", "status"), TERM_AND_INT)
def test_children_that_heed_no_stop_request_are_killed_within_five_seconds(number: signal.Signals, status: int) -> None:
    with Launched(Plan(four("stubborn"))) as launched:
        launched.read_until("ready")
        os.kill(launched.pid, number)
        assert launched.read_to_the_end(5.0) == status
        assert sorted(launched.named("signal")) == ONE_TERM_EACH
        assert all("did not end within 4.5 s and is killed." in said for said in launched.named("say"))


@pytest.mark.behaviour("LA-4", "LA-5")
def test_ctrl_c_in_a_terminal_is_exactly_one_stop_request_for_each_child() -> None:
    terminal, child_side = pty.openpty()
    try:
        plan = Plan(four("stubborn"), stop_times_s=(1.0,), terminal=os.ttyname(child_side))
        with Launched(plan) as launched:
            launched.read_until("ready")
            os.write(terminal, b"\x03")
            assert launched.read_to_the_end(5.0) == 130
            assert sorted(launched.named("signal")) == ONE_TERM_EACH
    finally:
        os.close(terminal)
        os.close(child_side)


def test_a_closed_terminal_stops_the_mesh_like_any_stop_signal() -> None:
    terminal, child_side = pty.openpty()
    try:
        with Launched(Plan(four("serve"), terminal=os.ttyname(child_side))) as launched:
            launched.read_until("ready")
            os.close(terminal)
            assert launched.read_to_the_end(5.0) == 129
            assert sorted(launched.named("signal")) == ONE_TERM_EACH
    finally:
        os.close(child_side)


@pytest.mark.behaviour("LA-3", "LA-9")
@pytest.mark.parametrize(("number", "status"), TERM_AND_INT)
@pytest.mark.parametrize("name", FOUR)
def test_a_child_is_stopped_also_when_the_signal_falls_between_its_start_and_its_registration(
    name: str, number: signal.Signals, status: int
) -> None:
    with Launched(Plan(four("stubborn"), hold=name, stop_times_s=(1.0,))) as launched:
        _signal_in_the_window(launched, name, number)
        assert launched.read_to_the_end(5.0) == status
        started = FOUR[: FOUR.index(name) + 1]
        assert sorted(launched.named("signal")) == sorted(f"{one} SIGTERM" for one in started)
        assert len(launched.named("up")) == len(started), "no child is started after the signal"


@pytest.mark.behaviour("LA-9")
def test_the_window_test_catches_a_launcher_that_notes_its_children_after_their_start() -> None:
    with Launched(Plan(four("serve"), hold="model_proxy", naive=True)) as launched:
        _signal_in_the_window(launched, "model_proxy", signal.SIGTERM)
        with pytest.raises(TimeoutError):
            launched.read_to_the_end(2.0)
        assert launched.process.poll() == 143
        assert not gone(launched.pid_of("model_proxy"))


@pytest.mark.behaviour("LA-3", "LA-9")
def test_a_stop_request_is_not_lost_on_a_child_that_still_has_the_launchers_handlers() -> None:
    with Launched(Plan(four("serve"), hold_young=True)) as launched:
        launched.read_until("young", count=4)
        os.killpg(launched.pid, signal.SIGINT)
        for told in launched.named("young"):
            wait_for_pending(int(told), signal.SIGTERM)
        launched.go_on(count=4)
        assert launched.read_to_the_end(4.0) == 130, "before the launcher's KILL"
        assert launched.named("up") == launched.named("say") == []


def _signal_in_the_window(launched: Launched, name: str, number: signal.Signals) -> None:
    """Send the signal while the launcher stands between fork and registration, then let it go on."""
    launched.read_until(f"held {name}")
    launched.read_until("up", count=FOUR.index(name) + 1)
    os.kill(launched.pid, number)
    launched.go_on()


@pytest.mark.behaviour("LA-3", "LA-5")
@pytest.mark.parametrize(("number", "status"), TERM_AND_INT)
def test_a_signal_during_the_start_stops_what_has_started(number: signal.Signals, status: int) -> None:
    with Launched(Plan(four("serve", resources="mute"))) as launched:
        launched.read_until("up", count=4)
        os.kill(launched.pid, number)
        assert launched.read_to_the_end(5.0) == status
        assert sorted(launched.named("signal")) == ONE_TERM_EACH
        assert "ready" not in launched.lines


@pytest.mark.behaviour("LA-8")
@pytest.mark.parametrize(("number", "status"), TERM_AND_INT)
def test_further_signals_during_the_stop_neither_repeat_it_nor_change_the_status(
    number: signal.Signals, status: int
) -> None:
    with Launched(Plan(four("stubborn"), stop_times_s=(1.0,))) as launched:
        launched.read_until("ready")
        os.kill(launched.pid, number)
        launched.read_until("signal")
        for further in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) * 5:
            os.kill(launched.pid, further)
        assert launched.read_to_the_end(5.0) == status
        assert sorted(launched.named("signal")) == ONE_TERM_EACH
        assert launched.lines.count("stopped") == 1


@pytest.mark.behaviour("LA-8")
def test_a_signal_after_the_last_child_is_gone_does_not_change_the_status() -> None:
    with Launched(Plan(four("serve"))) as launched:
        launched.read_until("ready")
        os.kill(launched.pid, signal.SIGINT)
        launched.read_until("stopped")
        os.kill(launched.pid, signal.SIGTERM)
        assert launched.read_to_the_end(5.0) == 130


@pytest.mark.behaviour("LA-4")
def test_children_end_when_the_launcher_is_killed() -> None:
    with Launched(Plan(four("stubborn"))) as launched:
        launched.read_until("ready")
        os.kill(launched.pid, signal.SIGKILL)
        assert launched.read_to_the_end(2.0) == -signal.SIGKILL


@pytest.mark.behaviour("LA-3")
@pytest.mark.parametrize("name", FOUR)
def test_a_child_ends_also_when_the_launcher_is_killed_just_after_its_start(name: str) -> None:
    with Launched(Plan(four("stubborn"), hold=name)) as launched:
        launched.read_until(f"held {name}")
        os.kill(launched.pid, signal.SIGKILL)
        assert launched.read_to_the_end(2.0) == -signal.SIGKILL


def test_the_end_of_the_lifeline_stops_the_mesh() -> None:
    with Launched(Plan(four("serve"), lifeline=True)) as launched:
        launched.read_until("ready")
        assert launched.process.stdin is not None
        launched.process.stdin.close()
        assert launched.read_to_the_end(5.0) == 143
        assert sorted(launched.named("signal")) == ONE_TERM_EACH


@pytest.mark.behaviour("LA-3", "LA-4", "LA-5")
@pytest.mark.parametrize("seed", range(20))
def test_no_child_is_left_after_a_signal_at_a_random_moment(seed: int) -> None:
    _trial(seed)


@pytest.mark.chaos
@pytest.mark.behaviour("LA-3", "LA-4", "LA-5")
@pytest.mark.parametrize("seed", range(1000, 1110))
def test_no_child_is_left_in_110_trials(seed: int) -> None:
    _trial(seed)


def _trial(seed: int) -> None:
    """A random signal at a random moment of start, restart or run, sometimes followed by a second one."""
    chance = random.Random(seed)
    number, status = chance.choice([*TERM_AND_INT, (signal.SIGKILL, -signal.SIGKILL)])
    children = four("serve", **{chance.choice(FOUR): chance.choice(["serve", "mute", "has_a_worker"])})
    if number == signal.SIGKILL:
        children = four("serve")  # a worker of a child is not the launcher's to end when it is killed itself
    with Launched(Plan(children, on_death="restart", stop_times_s=(2.0,))) as launched:
        launched.read_until("taken")
        time.sleep(chance.uniform(0.0, 0.06))  # the moment is the subject here
        os.kill(launched.pid, number)
        allowed = {status}
        if chance.random() < 0.5:
            time.sleep(chance.uniform(0.0, 0.01))
            second, second_status = chance.choice(TERM_AND_INT)
            os.kill(launched.pid, second)
            if number != signal.SIGKILL:
                allowed.add(second_status)  # signals that wait together have no order
        assert launched.read_to_the_end(5.0) in allowed
        assert launched.named("say") == [], "no child had to be killed"
        assert not [told for told in launched.named("up") if not gone(int(told.split()[1]), 1.0)]
