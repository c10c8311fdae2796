"""An environment server that forgets, is started again, or stays away."""

import asyncio
from pathlib import Path

import pytest

from services.collector.options import EnvironmentGoneError
from services.collector.run import collect
from tests.collector.fake_environment import (
    Body,
    FakeEnvironment,
    HeldEnvironment,
    flat_row,
    graded,
    key_of,
    read_jsonl,
)
from tests.collector.runs import BOUND_S, again, fresh, run_against
from tests.serving import free_port, serving


async def test_an_episode_that_the_environment_forgot_is_posted_again_under_the_same_id(tmp_path: Path) -> None:
    environment: FakeEnvironment
    entered = asyncio.Event()

    async def play(body: Body) -> Body:
        if environment.starts.total() == 1:
            entered.set()
            await asyncio.Event().wait()
        return graded(body)

    environment = FakeEnvironment(play, longest_wait_s=0.05)
    running = asyncio.create_task(run_against(environment, fresh(tmp_path, [flat_row()])))
    async with asyncio.timeout(BOUND_S):
        await entered.wait()
        await environment.polled(key_of(environment.posts[0]))
        environment.forget()
        summary = await running
    assert summary.status == 0
    assert len(environment.posts) == 2
    assert len(environment.starts) == 1


async def test_an_episode_that_is_forgotten_again_and_again_fails_in_the_end(tmp_path: Path) -> None:
    environment: FakeEnvironment

    async def play(body: Body) -> Body:
        # Long enough for the 202, and gone before the next question.
        asyncio.get_running_loop().call_later(0.2, environment.forget)
        await asyncio.Event().wait()
        return body

    environment = FakeEnvironment(play, longest_wait_s=0.05)
    summary = await run_against(environment, fresh(tmp_path, [flat_row()]))
    (failure,) = read_jsonl(summary.paths.failures)
    assert failure["failure"]["failure_kind"] == "session_lost"
    assert (failure["delivery"], failure["failure"]["terminal"]) == ("delivered", False)


async def test_a_restart_of_the_environment_in_the_middle_loses_nothing(tmp_path: Path) -> None:
    port = free_port()
    first, second = HeldEnvironment(), FakeEnvironment()
    options = fresh(tmp_path, [flat_row(n=n) for n in range(6)], concurrency=3)
    async with asyncio.timeout(BOUND_S):
        async with serving(first.app, port=port) as url:
            running = asyncio.create_task(collect(options, url))
            await first.holds(3)
            first.forget()
        async with serving(second.app, port=port):
            summary = await running
    assert summary.status == 0
    assert len(read_jsonl(summary.paths.results)) == 6
    assert set(first.starts) <= set(second.starts)


@pytest.mark.behaviour("CO-3")
async def test_when_the_environment_stays_away_the_rows_are_left_as_they_were(tmp_path: Path) -> None:
    environment = HeldEnvironment(free=1)
    options = fresh(tmp_path, [flat_row(n=n) for n in range(4)], concurrency=2, patience_s=0.2)
    async with asyncio.timeout(BOUND_S):
        async with serving(environment.app) as url:
            running = asyncio.create_task(collect(options, url))
            await environment.holds(2)
            environment.forget()
        summary = await running
    assert isinstance(summary.trouble, EnvironmentGoneError)
    assert summary.status == 1
    assert len(read_jsonl(summary.paths.results)) == 1
    assert read_jsonl(summary.paths.failures) == []
    resumed = await run_against(FakeEnvironment(), again(tmp_path))
    assert resumed.status == 0
    assert len(read_jsonl(resumed.paths.results)) == 4
