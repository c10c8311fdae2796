"""A run that is told to stop: what is under way may still end, is left to the environment, or is cancelled."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.collector.run import collect
from services.collector.watching import RunSummary
from tests.collector.fake_environment import (
    Body,
    FakeEnvironment,
    HeldEnvironment,
    flat_row,
    graded,
    read_jsonl,
)
from tests.collector.runs import BOUND_S, again, fresh, run_against
from tests.serving import serving


async def _stopped_with_two_under_way(
    environment: HeldEnvironment, tmp_path: Path, then: Callable[[], None], **more: Any
) -> RunSummary:
    """Five rows, two at once; `then` is done as soon as the run was told to stop."""
    options = fresh(tmp_path, [flat_row(n=n) for n in range(5)], concurrency=2, **more)
    stop = asyncio.Event()
    async with asyncio.timeout(BOUND_S), serving(environment.app) as url:
        running = asyncio.create_task(collect(options, url, stop=stop))
        await environment.holds(2)
        stop.set()
        then()
        summary = await running
        assert summary.stopped
        environment.go.set()
        resumed = await collect(again(tmp_path), url)
    assert (resumed.status, resumed.run_id) == (0, summary.run_id)
    return summary


async def test_a_stop_writes_nothing_for_rows_under_way_and_resume_joins_them(tmp_path: Path) -> None:
    environment = HeldEnvironment(free=1)
    summary = await _stopped_with_two_under_way(environment, tmp_path, lambda: None, stop_wait_s=0.5)
    statuses = [outcome.status for outcome in summary.outcomes]
    assert statuses == ["graded", "no outcome", "no outcome", "no outcome", "no outcome"]
    assert read_jsonl(summary.paths.failures) == []
    assert set(environment.starts.values()) == {1}


@pytest.mark.behaviour("CO-2")
async def test_rows_under_way_may_still_end_after_a_stop_and_no_more_are_sent(tmp_path: Path) -> None:
    environment = HeldEnvironment()
    summary = await _stopped_with_two_under_way(environment, tmp_path, environment.go.set, stop_wait_s=BOUND_S)
    statuses = [outcome.status for outcome in summary.outcomes]
    assert statuses == ["graded", "graded", "no outcome", "no outcome", "no outcome"]


async def test_a_stop_while_the_last_rows_end_leaves_nothing_over(tmp_path: Path) -> None:
    stop = asyncio.Event()

    async def play(body: Body) -> Body:
        stop.set()
        return graded(body)

    options = fresh(tmp_path, [flat_row()], stop_wait_s=BOUND_S)
    summary = await run_against(FakeEnvironment(play), options, stop=stop)
    assert (summary.stopped, summary.status) == (False, 0)


async def test_a_stop_can_cancel_what_is_under_way_and_resume_tries_that_again(tmp_path: Path) -> None:
    environment = HeldEnvironment()
    more = {"cancel_on_stop": True, "stop_wait_s": BOUND_S}
    summary = await _stopped_with_two_under_way(environment, tmp_path, lambda: None, **more)
    assert [outcome.rollout.failure_kind for outcome in summary.outcomes] == ["cancelled"] * 2 + [None] * 3
    assert summary.due == 5
    keys = [f"{summary.run_id}-{n}-0" for n in range(5)]
    assert sorted(environment.cancelled) == keys[:2]
    assert sorted(environment.starts) == sorted([*keys, *(f"{key}-a1" for key in keys[:2])])
