"""A run whose way to the environment is bad: cut, slow, answered by a balancer, away for a while."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from services.collector.options import RunOptions
from services.collector.run import collect
from services.collector.standing import Standing
from services.collector.watching import RunSummary, Silence
from tests.collector.fake_environment import (
    Body,
    FakeEnvironment,
    HeldEnvironment,
    failing,
    flat_row,
    graded,
    read_jsonl,
)
from tests.collector.fault_proxy import Exchange, Fault, FaultProxy, at_random, cuts, passes, says
from tests.collector.runs import BOUND_S, again, fresh, run_against
from tests.serving import serving


class Listener(Silence):
    """Keeps how the run stands."""

    def __init__(self) -> None:
        self.standing: asyncio.Future[Standing] = asyncio.get_running_loop().create_future()

    def begin(self, standing: Standing) -> None:
        self.standing.set_result(standing)

    async def until(self, told: Callable[[Standing], bool]) -> Standing:
        standing = await self.standing
        async with asyncio.timeout(BOUND_S):
            while not told(standing):  # noqa: ASYNC110 - what is shown is looked at, and tells no event
                await asyncio.sleep(0.02)
        return standing


async def _through(proxy: FaultProxy, environment: FakeEnvironment, options: RunOptions) -> RunSummary:
    async with asyncio.timeout(BOUND_S), serving(environment.app) as url:
        proxy.aim(url)
        async with proxy:
            return await collect(options, proxy.url)


def _limited(seconds: float) -> Fault:
    """A balancer that gives its servers so long to answer."""

    async def fault(exchange: Exchange) -> None:
        try:
            async with asyncio.timeout(seconds):
                answer = await exchange.forward()
        except TimeoutError:
            await says(504)(exchange)
        else:
            await exchange.send(answer)

    return fault


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_on_the_way_each_row_runs_once_and_has_its_result(tmp_path: Path, seed: int) -> None:
    async def play(body: Body) -> Body:
        await asyncio.sleep(0.02 * (body["n"] % 7))
        return graded(body, float(body["n"]))

    environment = FakeEnvironment(play, longest_wait_s=0.05)
    proxy = FaultProxy(choose=at_random(seed, 0.35))
    options = fresh(tmp_path, [flat_row(n=n) for n in range(30)], concurrency=8, patience_s=BOUND_S)
    summary = await _through(proxy, environment, options)
    assert summary.status == 0, summary.trouble
    results = read_jsonl(summary.paths.results)
    assert sorted(result["reward"] for result in results) == [float(n) for n in range(30)]
    assert all(result["_ng_task_index"] == result["reward"] for result in results)
    assert read_jsonl(summary.paths.failures) == []
    assert set(environment.starts.values()) == {1}


async def test_a_balancer_that_is_reloaded_in_the_middle_is_waited_for_and_the_wait_is_shown(tmp_path: Path) -> None:
    environment, listener = HeldEnvironment(), Listener()
    options = fresh(tmp_path, [flat_row(n=n) for n in range(6)], concurrency=3)
    async with asyncio.timeout(BOUND_S), serving(environment.app) as url, FaultProxy(url) as proxy:
        running = asyncio.create_task(collect(options, proxy.url, watcher=listener))
        await environment.holds(3)
        await proxy.close()
        standing = await listener.until(lambda standing: "3 waiting" in standing.places())
        assert standing.places().startswith(f"3 waiting: {proxy.url} (")
        await proxy.open()
        environment.go.set()
        summary = await running
    assert summary.status == 0
    assert set(environment.starts.values()) == {1}
    assert standing.places() == ""


async def test_stages_are_shown_as_soon_as_the_environment_tells_them(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def play(body: Body) -> Body:
        await go.wait()
        return graded(body)

    environment, listener = FakeEnvironment(play, longest_wait_s=0.1), Listener()
    async with asyncio.timeout(BOUND_S), serving(environment.app) as url:
        options = fresh(tmp_path, [flat_row(n=n) for n in range(3)], concurrency=2)
        running = asyncio.create_task(collect(options, url, watcher=listener))
        standing = await listener.until(lambda standing: "agent" in standing.places())
        await listener.until(lambda standing: standing.places() == "2 under way (agent 2)")
        assert standing.counts() == "0/3 rows"
        go.set()
        await running
    assert standing.counts() == "3/3 rows, mean reward 1.000"


async def test_a_balancer_with_a_short_limit_costs_no_patience(tmp_path: Path) -> None:
    async def play(body: Body) -> Body:
        await asyncio.sleep(5.0)
        return graded(body)

    environment = FakeEnvironment(play)
    proxy = FaultProxy(choose=lambda _: _limited(1.7))
    summary = await _through(proxy, environment, fresh(tmp_path, [flat_row()], patience_s=3.5))
    assert summary.status == 0
    assert set(environment.starts.values()) == {1}


@pytest.mark.behaviour("CO-4", "CO-7")
@pytest.mark.parametrize(
    ("fault", "told", "record"),
    [
        (
            says(503),
            "the environment server answered 503: <html>",
            ("possibly_delivered", 503, "transport_unreachable"),
        ),
        (says(404), "the environment server answered 404: <html>", ("possibly_delivered", 404, "not_found")),
        (says(200), "The environment's answer cannot be read: not JSON", ("delivered", 200, "protocol_violation")),
        (cuts, "No answer from the environment server: ", ("possibly_delivered", None, "transport_peer_drop")),
    ],
    ids=["503", "404", "a page with 200", "cut"],
)
async def test_a_row_that_is_given_up_says_after_how_long_and_why(
    tmp_path: Path, fault: Fault, told: str, record: tuple[str, int | None, str]
) -> None:
    proxy = FaultProxy(choose=lambda exchange: fault if exchange.path == "/run" else passes)
    summary = await _through(proxy, FakeEnvironment(), fresh(tmp_path, [flat_row()], patience_s=0.5))
    (failure,) = read_jsonl(summary.paths.failures)
    reason = failure["failure"]["failure_reason"]
    assert reason.startswith("Given up after ")
    assert f" s: {told}" in reason
    assert (failure["reported_by"], failure["failure"]["terminal"]) == ("collector", False)
    assert (failure["delivery"], failure.get("http_status"), failure["failure"]["failure_kind"]) == record


@pytest.mark.behaviour("CO-5")
async def test_a_row_that_could_not_be_asked_for_is_asked_for_again_under_the_same_attempt(tmp_path: Path) -> None:
    """The environment may have run it all the same."""
    environment = FakeEnvironment()

    async def loses_every_answer(exchange: Exchange) -> None:
        await exchange.forward()
        exchange.cut()

    options = fresh(tmp_path, [flat_row()], patience_s=0.5)
    async with asyncio.timeout(BOUND_S), serving(environment.app) as url, FaultProxy(url) as proxy:
        proxy.choose = lambda exchange: loses_every_answer if exchange.path == "/run" else passes
        summary = await collect(options, proxy.url)
        assert len(read_jsonl(summary.paths.failures)) == 1
        resumed = await collect(again(tmp_path), url)
    assert resumed.status == 0
    assert set(environment.starts.values()) == {1}
    assert {post["episode_id"]["attempt"] for post in environment.posts} == {0}


async def test_an_episode_that_never_got_a_place_is_tried_under_the_next_attempt_and_is_no_failure(
    tmp_path: Path,
) -> None:
    async def play(body: Body) -> Body:
        if body["episode_id"]["attempt"] < 4:
            answer = failing(body, terminal=False, kind="overloaded")
            answer["failure"]["stage"] = "admission"
            return answer
        return graded(body)

    environment = FakeEnvironment(play)
    summary = await run_against(environment, fresh(tmp_path, [flat_row()]))
    assert summary.status == 0
    assert [post["episode_id"]["attempt"] for post in environment.posts] == [0, 1, 2, 3, 4]
    assert read_jsonl(summary.paths.failures) == []


async def test_a_place_is_not_waited_for_without_end(tmp_path: Path) -> None:
    async def play(body: Body) -> Body:
        answer = failing(body, terminal=False, kind="overloaded")
        answer["failure"]["stage"] = "admission"
        return answer

    summary = await run_against(FakeEnvironment(play), fresh(tmp_path, [flat_row()], busy_patience_s=0.5))
    (failure,) = read_jsonl(summary.paths.failures)
    assert failure["failure"]["failure_kind"] == "overloaded"
    assert summary.due == 1
