"""What the engine does about its children's starts and ends."""

import os
import signal
import socket
from typing import Literal

import pytest

from tests.launcher.driver import Plan
from tests.launcher.rig import FOUR, Launched, four, gone


@pytest.mark.behaviour("LA-1")
def test_the_mesh_is_ready_when_its_last_child_is() -> None:
    with Launched(Plan(four("serve"))) as launched:
        launched.read_until("ready")
        assert sorted(told.split()[0] for told in launched.named("up")) == sorted(FOUR)


@pytest.mark.behaviour("LA-1")
def test_a_child_that_fails_before_all_are_ready_shuts_all_down_and_its_reason_is_shown() -> None:
    with Launched(Plan(four("serve", agent="refuses"), on_death="restart")) as launched:
        assert launched.read_to_the_end() == 1
        (said,) = launched.named("say")
        assert said.startswith("agent (pid ")
        assert said.endswith("exit status 1 before it was ready: the key of agent is missing. The others are stopped.")
        assert "ready" not in launched.lines


@pytest.mark.behaviour("LA-1")
def test_a_bug_in_a_child_is_named_with_its_type_and_leaves_a_traceback() -> None:
    with Launched(Plan(four("serve", resources="crashes"))) as launched:
        assert launched.read_to_the_end() == 1
        assert "ValueError: resources met a bug." in launched.named("say")[0]
        assert launched.process.stderr is not None
        assert "Traceback" in launched.process.stderr.read().decode()


@pytest.mark.behaviour("LA-1")
def test_a_child_that_is_never_ready_is_named_when_the_time_is_up() -> None:
    with Launched(Plan(four("serve", model_proxy="mute"), start_timeout_s=1.0)) as launched:
        assert launched.read_to_the_end() == 1
        (said,) = launched.named("say")
        assert said.startswith("model_proxy (pid ")
        assert "before it was ready: not ready within 1 s." in said


@pytest.mark.behaviour("LA-6")
@pytest.mark.parametrize(("behaviour", "status"), [("serve", 0), ("leaves_with_7", 7)])
def test_a_child_that_ends_early_ends_the_mesh_with_a_failure_also_when_it_ended_with_0(
    behaviour: str, status: int
) -> None:
    with Launched(Plan(four("serve", agent=behaviour))) as launched:
        launched.read_until("ready")
        os.kill(launched.pid_of("agent"), signal.SIGTERM)
        assert launched.read_to_the_end(5.0) == 1
        assert launched.named("say")[0].endswith(f"ended with exit status {status}. The others are stopped.")
        assert sorted(launched.named("signal")) == [f"{name} SIGTERM" for name in sorted(FOUR)]


@pytest.mark.behaviour("LA-6")
def test_a_killed_child_is_named_within_a_second_and_the_rest_is_stopped() -> None:
    with Launched(Plan(four("serve"))) as launched:
        launched.read_until("ready")
        killed = launched.pid_of("resources")
        os.kill(killed, signal.SIGKILL)
        said = launched.read_until("say", bound_s=1.0)
        assert said == f"say resources (pid {killed}) was ended by SIGKILL. The others are stopped."
        assert launched.read_to_the_end(5.0) == 1
        others = sorted(name for name in FOUR if name != "resources")
        assert sorted(launched.named("signal")) == [f"{name} SIGTERM" for name in others]


def test_a_killed_child_is_started_again_and_the_others_run_on() -> None:
    with Launched(Plan(four("serve"), on_death="restart")) as launched:
        launched.read_until("ready")
        killed = launched.pid_of("agent")
        os.kill(killed, signal.SIGKILL)
        said = launched.read_until("say", bound_s=1.0)
        assert said == f"say agent (pid {killed}) was ended by SIGKILL. It is started again (1 of 3 within 60 s)."
        launched.read_until("up agent", count=2, bound_s=1.0)
        assert launched.pid_of("agent") != killed
        assert launched.named("signal") == []
        os.kill(launched.pid, signal.SIGTERM)
        assert launched.read_to_the_end(5.0) == 143


def test_a_child_that_keeps_dying_is_started_three_times_and_then_the_mesh_ends() -> None:
    with Launched(Plan(four("serve"), on_death="restart")) as launched:
        launched.read_until("ready")
        for times in range(3):
            os.kill(launched.pid_of("agent"), signal.SIGKILL)
            launched.read_until("up agent", count=times + 2)
        os.kill(launched.pid_of("agent"), signal.SIGKILL)
        assert launched.read_to_the_end() == 1
        assert "It was the 4th time within 60 s. The others are stopped." in launched.named("say")[-1]


def test_clients_of_a_child_that_is_started_again_wait_instead_of_being_refused() -> None:
    with Launched(Plan(four("serve", agent="answers"), on_death="restart")) as launched:
        launched.read_until("ready")
        port = int(launched.named("listening")[0].split()[1])
        first = launched.pid_of("agent")
        os.kill(first, signal.SIGKILL)
        assert gone(first, 5.0)
        with socket.create_connection(("127.0.0.1", port), timeout=5.0) as connection:
            second = int(connection.recv(64))
        launched.read_until("up agent", count=2, bound_s=1.0)
        assert second == launched.pid_of("agent") != first


def test_a_listener_is_closed_when_its_child_has_stopped_though_others_still_run() -> None:
    with Launched(Plan(four("stubborn", agent="answers"), stop_times_s=(3.0,))) as launched:
        launched.read_until("ready")
        port = int(launched.named("listening")[0].split()[1])
        os.kill(launched.pid, signal.SIGTERM)
        launched.read_until("signal", count=3, bound_s=2.0)
        assert gone(launched.pid_of("agent"), 2.0)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=1.0)
        assert launched.read_to_the_end(5.0) == 143


@pytest.mark.behaviour("LA-4")
@pytest.mark.parametrize("death", ["stop", "kill"])
def test_what_a_child_started_itself_does_not_outlive_it(death: Literal["stop", "kill"]) -> None:
    with Launched(Plan(four("serve", resources="has_a_worker"))) as launched:
        launched.read_until("ready")
        worker = int(launched.named("worker")[0].split()[1])
        victim = launched.pid if death == "stop" else launched.pid_of("resources")
        os.kill(victim, signal.SIGTERM if death == "stop" else signal.SIGKILL)
        assert launched.read_to_the_end(5.0) == (143 if death == "stop" else 1)
        assert gone(worker, 1.0)
