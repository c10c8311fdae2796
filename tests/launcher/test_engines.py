"""Engines under their keepers: when they are ready, how they end, and that nothing of them is left."""

import itertools
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.driver import Plan
from tests.launcher.rig import Launched, children_of, free_ports, gone, wait_for_pending

TERM_AND_INT = [(signal.SIGTERM, 143), (signal.SIGINT, 130)]
FOUR_ENGINES = tuple(f"engine-{index}" for index in range(4))
# Everything that LA-2 names: what the engines share, the engines, and what is before them.
ALL = ("cache", *FOUR_ENGINES, "router")
STAGES = {"cache": 0, "router": 2, **dict.fromkeys(FOUR_ENGINES, 1)}
WORKERS = ["plain", "stubborn", "detached"]
STOP_S = 5.0


def engines(folder: Path, names: Sequence[str], *arguments: str) -> dict[str, dict[str, Any]]:
    ports = itertools.count(free_ports(len(names)))
    return {name: {"port": next(ports), "folder": str(folder), "arguments": arguments} for name in names}


def plan_of(folder: Path, *arguments: str, names: Sequence[str] = ALL, **options: Any) -> Plan:
    return Plan(
        dict.fromkeys(names, "kept"),
        engines=engines(folder, names, *arguments),
        start_stages={name: STAGES[name] for name in names},
        **options,
    )


def written(folder: Path, name: str) -> str:
    path = folder / f"{name}.log"
    return path.read_text() if path.exists() else ""


def pids_of(folder: Path, names: Sequence[str]) -> list[int]:
    """All processes that the engines have told of: themselves and their workers."""
    return [int(pid) for name in names for pid in re.findall(r"^(?:engine|worker) (\d+)", written(folder, name), re.M)]


def pid_of_engine(folder: Path, name: str) -> int:
    return int(re.findall(r"^engine (\d+)", written(folder, name), re.M)[-1])


def assert_gone(pids: Sequence[int], bound_s: float = 0.0) -> None:
    assert [pid for pid in pids if not gone(pid, bound_s)] == []


@pytest.mark.behaviour("LA-2", "LA-4", "LA-5")
@pytest.mark.parametrize(("number", "status"), TERM_AND_INT)
@pytest.mark.parametrize("worker", WORKERS)
def test_four_engines_their_cache_and_router_are_gone_within_five_seconds(
    worker: str, number: signal.Signals, status: int, tmp_path: Path
) -> None:
    with Launched(plan_of(tmp_path, "--worker", worker)) as launched:
        launched.read_until("ready")
        pids = pids_of(tmp_path, ALL)
        assert len(pids) == 2 * len(ALL)
        os.kill(launched.pid, number)
        assert launched.read_to_the_end(STOP_S) == status
        assert_gone(pids)
        assert not [said for said in launched.named("say") if "is killed" in said], "their keepers ended in order"


@pytest.mark.behaviour("LA-4", "LA-8")
def test_engines_that_heed_no_stop_request_are_killed_within_five_seconds(tmp_path: Path) -> None:
    with Launched(plan_of(tmp_path, "--worker", "detached", "--stubborn")) as launched:
        launched.read_until("ready")
        pids = pids_of(tmp_path, ALL)
        os.kill(launched.pid, signal.SIGTERM)
        for further in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) * 3:
            time.sleep(0.05)
            os.kill(launched.pid, further)
        assert launched.read_to_the_end(STOP_S) == 143
        assert_gone(pids)


@pytest.mark.behaviour("LA-2")
def test_the_cache_is_ready_before_the_engines_start_and_these_before_the_router(tmp_path: Path) -> None:
    with Launched(plan_of(tmp_path, "--refuse-health", "1")) as launched:
        launched.read_until("ready")
        told = [said.split()[:3] for said in launched.named("say")]
        order = [(name, what) for name, _, what in told]
        assert order[:2] == [("cache", "started;"), ("cache", "ready")]
        assert {name for name, _ in order[2:10]} == set(FOUR_ENGINES)
        assert order[10:] == [("router", "started;"), ("router", "ready")]


@pytest.mark.behaviour("LA-3", "LA-9")
@pytest.mark.parametrize(("number", "status"), TERM_AND_INT)
@pytest.mark.parametrize("name", ["cache", *FOUR_ENGINES, "router"])
def test_an_engine_is_stopped_also_when_the_signal_falls_between_its_start_and_its_registration(
    name: str, number: signal.Signals, status: int, tmp_path: Path
) -> None:
    """Its keeper is held in the window, with the program forked and not yet known."""
    plan = plan_of(tmp_path, "--stubborn", "--worker", "detached", hold=f"engine of {name}")
    with Launched(plan) as launched:
        launched.read_until(f"held engine of {name}")
        keeper = launched.pid_of(name)
        (engine,) = children_of(keeper)
        os.kill(launched.pid, number)
        wait_for_pending(keeper, signal.SIGTERM)
        launched.go_on()
        assert launched.read_to_the_end(STOP_S) == status
        assert_gone([engine, *pids_of(tmp_path, ALL)])


@pytest.mark.behaviour("LA-3", "LA-9")
@pytest.mark.parametrize("name", ["cache", *FOUR_ENGINES, "router"])
def test_a_keeper_is_stopped_also_when_the_signal_falls_between_its_start_and_its_registration(
    name: str, tmp_path: Path
) -> None:
    with Launched(plan_of(tmp_path, "--worker", "detached", hold=name)) as launched:
        launched.read_until(f"held {name}")
        os.kill(launched.pid, signal.SIGTERM)
        launched.go_on()
        assert launched.read_to_the_end(STOP_S) == 143
        assert_gone([int(told.split()[1]) for told in launched.named("up")])
        assert_gone(pids_of(tmp_path, ALL))


@pytest.mark.behaviour("LA-3")
@pytest.mark.parametrize("victim", ["launcher", "keeper"])
def test_an_engine_ends_also_when_its_keeper_or_the_launcher_is_killed_just_after_its_start(
    victim: str, tmp_path: Path
) -> None:
    plan = plan_of(tmp_path, "--stubborn", names=["engine-0"], hold="engine of engine-0")
    with Launched(plan) as launched:
        launched.read_until("held engine of engine-0")
        keeper = launched.pid_of("engine-0")
        (engine,) = children_of(keeper)
        os.kill(launched.pid if victim == "launcher" else keeper, signal.SIGKILL)
        launched.go_on()
        launched.read_to_the_end(STOP_S)
        assert_gone([engine, keeper], 1.0)


@pytest.mark.behaviour("LA-4")
@pytest.mark.parametrize("worker", WORKERS)
def test_nothing_of_an_engine_outlives_a_launcher_that_is_killed(worker: str, tmp_path: Path) -> None:
    with Launched(plan_of(tmp_path, "--worker", worker)) as launched:
        launched.read_until("ready")
        pids = pids_of(tmp_path, ALL)
        assert len(pids) == 2 * len(ALL)
        os.kill(launched.pid, signal.SIGKILL)
        assert launched.read_to_the_end(STOP_S) == -signal.SIGKILL
        assert_gone(pids, 1.0)


@pytest.mark.behaviour("LA-4")
def test_an_engine_and_its_workers_do_not_outlive_a_keeper_that_is_killed(tmp_path: Path) -> None:
    with Launched(plan_of(tmp_path, "--worker", "stubborn", names=["engine-0"])) as launched:
        launched.read_until("ready")
        pids = pids_of(tmp_path, ["engine-0"])
        os.kill(launched.pid_of("engine-0"), signal.SIGKILL)
        assert launched.read_to_the_end(STOP_S) == 1
        assert_gone(pids, 1.0)


@pytest.mark.behaviour("LA-6")
@pytest.mark.parametrize("status", [0, 3])
def test_an_engine_that_ends_before_it_is_ready_ends_all_and_its_last_words_are_shown(
    status: int, tmp_path: Path
) -> None:
    plan = plan_of(tmp_path, names=["engine-0", "engine-1"], on_death="restart")
    plan.engines["engine-1"]["arguments"] = ["--leave", str(status), "--worker", "detached"]
    with Launched(plan) as launched:
        assert launched.read_to_the_end(STOP_S) == 1
        text = "\n".join(launched.lines)
        assert re.search(
            r"say engine-1 \(pid \d+\) ended with exit status 1 before it was ready: its program ended with exit"
            rf" status {status}\. The end of {tmp_path}/engine-1\.log:\n",
            text,
        )
        assert "\n  | RuntimeError: no device has enough memory" in text
        assert ". The others are stopped." in text
        assert_gone(pids_of(tmp_path, FOUR_ENGINES), 1.0)


@pytest.mark.behaviour("LA-6")
@pytest.mark.parametrize(("number", "how"), [(signal.SIGTERM, "exit status 0"), (signal.SIGKILL, "by SIGKILL")])
def test_an_engine_that_ends_by_itself_ends_all_when_asked_to_also_with_status_0(
    number: signal.Signals, how: str, tmp_path: Path
) -> None:
    with Launched(plan_of(tmp_path, "--worker", "detached")) as launched:
        launched.read_until("ready")
        pids = pids_of(tmp_path, ALL)
        os.kill(pid_of_engine(tmp_path, "engine-2"), number)
        assert launched.read_to_the_end(STOP_S) == 1
        (said,) = [said for said in launched.named("say") if "its program" in said]
        assert said.startswith("engine-2 (pid ")
        assert how in said
        assert_gone(pids)


def test_an_engine_that_ends_by_itself_is_started_again_on_its_port_and_the_others_run_on(tmp_path: Path) -> None:
    with Launched(plan_of(tmp_path, "--worker", "detached", on_death="restart")) as launched:
        launched.read_until("ready")
        first = pids_of(tmp_path, ["engine-1"])
        others = pids_of(tmp_path, [name for name in ALL if name != "engine-1"])
        os.kill(pid_of_engine(tmp_path, "engine-1"), signal.SIGKILL)
        launched.read_until("say engine-1 is ready", count=2)
        assert_gone(first)
        assert pid_of_engine(tmp_path, "engine-1") not in first
        assert not [pid for pid in others if gone(pid)]
        assert any("It is started again (1 of 3 within 60 s)." in line for line in launched.lines)
        os.kill(launched.pid, signal.SIGTERM)
        assert launched.read_to_the_end(STOP_S) == 143
        assert_gone(pids_of(tmp_path, ALL))


@pytest.mark.behaviour("LA-1")
def test_an_engine_that_refuses_connections_or_answers_with_an_error_is_waited_for(tmp_path: Path) -> None:
    with Launched(plan_of(tmp_path, "--refuse-health", "3", names=["engine-0"])) as launched:
        launched.read_until("ready")
        said = launched.named("say")[-1]
        after = re.fullmatch(r"engine-0 is ready after ([\d.]+) s\.", said)
        assert after is not None, said
        assert float(after[1]) >= 3 * 0.2


@pytest.mark.behaviour("LA-1")
def test_an_engine_that_is_not_ready_in_its_time_is_named_with_its_last_answer_and_words(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "--refuse-health", "1000", "--worker", "detached", names=["engine-0"])
    plan.engines["engine-0"]["ready_timeout_s"] = 2.0
    with Launched(plan) as launched:
        assert launched.read_to_the_end() == 1
        text = "\n".join(launched.lines)
        assert "before it was ready: not ready within 2 s: /health answered 503. The end of " in text
        assert "  | worker " in text
        assert_gone(pids_of(tmp_path, ["engine-0"]))


@pytest.mark.behaviour("LA-1")
def test_an_engine_whose_host_has_no_address_is_told_at_once(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, names=["engine-0"])
    plan.engines["engine-0"] |= {"ready_url": "http://nowhere.invalid:1/health", "ready_timeout_s": 600.0}
    with Launched(plan) as launched:
        assert launched.read_to_the_end(60.0) == 1
        assert "the host 'nowhere.invalid' has no address" in launched.named("say")[-1]
        assert_gone(pids_of(tmp_path, ["engine-0"]))


@pytest.mark.behaviour("LA-1")
def test_with_no_time_to_be_ready_nothing_is_waited_for(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "--refuse-health", "1000", names=["engine-0"])
    plan.engines["engine-0"]["ready_timeout_s"] = 0.0
    with Launched(plan) as launched:
        launched.read_until("ready", bound_s=10.0)
        os.kill(launched.pid, signal.SIGTERM)
        assert launched.read_to_the_end(STOP_S) == 143
        assert_gone(pids_of(tmp_path, ["engine-0"]))


@pytest.mark.behaviour("LA-1", "LA-5")
@pytest.mark.parametrize(("number", "status"), TERM_AND_INT)
def test_a_signal_stops_engines_that_are_still_loading(number: signal.Signals, status: int, tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "--refuse-health", "1000", "--worker", "detached", names=FOUR_ENGINES)
    with Launched(plan) as launched:
        launched.read_until("say", count=len(FOUR_ENGINES))
        os.kill(launched.pid, number)
        assert launched.read_to_the_end(STOP_S) == status
        assert "ready" not in launched.lines
        assert_gone(pids_of(tmp_path, FOUR_ENGINES))


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, names=["engine-0"])
    plan.engines["engine-0"]["command"] = [str(tmp_path / "no-such-program")]
    with Launched(plan) as launched:
        assert launched.read_to_the_end(STOP_S) == 1
        assert f"'{tmp_path}/no-such-program' cannot be run: No such file or directory" in launched.named("say")[-1]


def test_an_engine_that_loads_long_is_told_of_now_and_then_with_what_it_wrote_last(tmp_path: Path) -> None:
    with Launched(plan_of(tmp_path, "--refuse-health", "1000", names=["engine-0"])) as launched:
        said = launched.read_until("say engine-0 is not ready", bound_s=15.0)
        assert "after 5 s: /health answered 503. The end of " in said
        launched.read_until("  | secrets")
        os.kill(launched.pid, signal.SIGTERM)
        assert launched.read_to_the_end(STOP_S) == 143
