"""What a resumed run sends again, and under which attempt."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.collector.options import RunError
from services.collector.paths import RunPaths
from services.collector.reading import url_of_run
from services.collector.run import collect
from services.collector.watching import RunSummary, Silence
from tests.collector.fake_environment import (
    Body,
    FakeEnvironment,
    failing,
    flat_row,
    graded,
    native_row,
    read_jsonl,
    write_rows,
)
from tests.collector.runs import BOUND_S, again, fresh, run_against
from tests.serving import serving


def _cut_off(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


async def _play(body: Body) -> Body:
    if body["want"] == "result":
        return graded(body)
    return failing(body, terminal=body["want"] == "terminal")


def _attempts(environment: FakeEnvironment) -> list[tuple[str, int]]:
    return [(post["want"], post["episode_id"]["attempt"]) for post in environment.posts]


@pytest.mark.behaviour("CO-5", "ES-6")
async def test_only_retryable_rows_run_again_and_count_their_failures_as_attempts(tmp_path: Path) -> None:
    rows = [flat_row(want=want) for want in ("result", "terminal", "retryable")]
    first = await run_against(FakeEnvironment(_play), fresh(tmp_path, rows))
    attempts = []
    for _ in range(3):
        environment = FakeEnvironment(_play)
        summary = await run_against(environment, again(tmp_path))
        attempts.append(_attempts(environment))
    assert attempts == [[("retryable", 1)], [("retryable", 2)], []]
    assert summary.run_id == first.run_id
    assert summary.status == 1
    keys = {post["episode_id"]["rollout_id"] for post in environment.posts}
    assert keys <= {f"{first.run_id}-2-0"}
    assert summary.metrics["environments"]["default"]["coverage"] == {
        "rows": 3, "graded": 1, "masked": 0, "failed": 2, "without_outcome": 0, "coverage": pytest.approx(1 / 3)
    }  # fmt: skip


@pytest.mark.behaviour("CO-5")
async def test_a_row_that_succeeds_at_a_later_attempt_counts_as_graded(tmp_path: Path) -> None:
    async def second_time(body: Body) -> Body:
        return graded(body) if body["episode_id"]["attempt"] else failing(body, terminal=False)

    await run_against(FakeEnvironment(second_time), fresh(tmp_path, [flat_row()]))
    summary = await run_against(FakeEnvironment(second_time), again(tmp_path))
    assert summary.status == 0
    assert summary.metrics["environments"]["default"]["failures"] == {}
    assert read_jsonl(summary.paths.results)[0]["episode_id"]["attempt"] == 1


@pytest.mark.behaviour("CO-5")
async def test_an_own_attempt_is_where_counting_begins(tmp_path: Path) -> None:
    async def play(body: Body) -> Body:
        return failing(body, terminal=False)

    await run_against(FakeEnvironment(play), fresh(tmp_path, [native_row("own", attempt=4)]))
    environment = FakeEnvironment(play)
    await run_against(environment, again(tmp_path))
    assert [post["episode_id"]["attempt"] for post in environment.posts] == [5]


@pytest.mark.behaviour("CO-5")
@pytest.mark.parametrize("cut", [1, 20, 60])
@pytest.mark.parametrize("which", ["results", "failures"])
async def test_a_truncated_last_line_is_dropped_and_its_row_runs_again(tmp_path: Path, which: str, cut: int) -> None:
    rows = [flat_row(want="result"), flat_row(want="result"), flat_row(want="retryable")]
    summary = await run_against(FakeEnvironment(_play), fresh(tmp_path, rows, concurrency=1))
    _cut_off(getattr(summary.paths, which), cut)
    environment = FakeEnvironment(_play)
    await run_against(environment, again(tmp_path))
    expected = [("result", 0), ("retryable", 1)] if which == "results" else [("retryable", 0)]
    assert sorted(_attempts(environment)) == expected
    assert len(read_jsonl(summary.paths.results)) == 2
    assert len(read_jsonl(summary.paths.failures)) == (2 if which == "results" else 1)


async def test_bad_rows_still_count_in_a_resumed_run(tmp_path: Path) -> None:
    summary = await run_against(FakeEnvironment(_play), fresh(tmp_path, [flat_row(want="result"), []]))
    assert (summary.status, summary.bad_rows) == (1, 1)
    summary = await run_against(FakeEnvironment(_play), again(tmp_path))
    assert (summary.status, summary.bad_rows) == (1, 1)


@pytest.mark.behaviour("CO-7")
@pytest.mark.parametrize(
    "change", [{"schema_version": 2}, {"no_such_field": 1}, {"reported_by": "environment", "delivery": "not_sent"}]
)
async def test_a_failure_record_of_another_form_is_refused_and_not_dropped(tmp_path: Path, change: Body) -> None:
    summary = await run_against(FakeEnvironment(_play), fresh(tmp_path, [flat_row(want="retryable")]))
    (record,) = read_jsonl(summary.paths.failures)
    write_rows(summary.paths.failures, [record | change])
    with pytest.raises(RunError, match=r"o_failures\.jsonl:1 is not a line of a run"):
        await run_against(FakeEnvironment(_play), again(tmp_path))


async def test_a_damaged_line_in_the_middle_is_refused_with_its_number(tmp_path: Path) -> None:
    rows = [flat_row(want="result")] * 2
    summary = await run_against(FakeEnvironment(_play), fresh(tmp_path, rows))
    lines = summary.paths.results.read_bytes().split(b"\n")
    summary.paths.results.write_bytes(lines[0][:30] + b"\n" + lines[1] + b"\n")
    with pytest.raises(RunError, match=r"o\.jsonl:1 is not a line of a run"):
        await run_against(FakeEnvironment(_play), again(tmp_path))


@pytest.mark.behaviour("CO-5")
async def test_a_run_without_its_inputs_is_not_resumed(tmp_path: Path) -> None:
    summary = await run_against(FakeEnvironment(_play), fresh(tmp_path, [flat_row(want="retryable")]))
    summary.paths.inputs.unlink()
    with pytest.raises(RunError, match=r"o_inputs\.jsonl, which says what its rows were, is missing"):
        await run_against(FakeEnvironment(_play), again(tmp_path))


async def test_results_of_another_run_are_not_mixed_in(tmp_path: Path) -> None:
    summary = await run_against(FakeEnvironment(_play), fresh(tmp_path, [flat_row(want="result")]))
    (result,) = read_jsonl(summary.paths.results)
    write_rows(summary.paths.results, [result | {"episode_id": {"rollout_id": "foreign", "attempt": 0}}])
    with pytest.raises(RunError, match="were files mixed up"):
        await run_against(FakeEnvironment(_play), again(tmp_path))


@pytest.mark.behaviour("CO-5")
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"repeats": 3}, r"was started with --repeats 2, not with --repeats 3"),
        ({"environment": "gpqa"}, r"was started with --environment math, not with --environment gpqa"),
        ({"limit": 1}, r"was started without --limit, not with --limit 1"),
    ],
)
async def test_other_options_than_those_of_the_run_are_refused(tmp_path: Path, change: Body, told: str) -> None:
    first = fresh(tmp_path, [flat_row(want="result")], repeats=2, environment="math")
    await run_against(FakeEnvironment(_play), first)
    with pytest.raises(RunError, match=told):
        await run_against(FakeEnvironment(_play), again(tmp_path, **change))
    assert (await run_against(FakeEnvironment(_play), replace(first, resume=True))).status == 0


@pytest.mark.behaviour("CO-5")
@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([flat_row(n=0), flat_row(n=7), flat_row(n=2)], 2),
        ([flat_row(n=0), flat_row(n=1)], 3),
        ([flat_row(n=0), flat_row(n=1), flat_row(n=2), flat_row(n=3)], 4),
        ([flat_row(n=0), flat_row(n=1), 7], 3),
    ],
    ids=["changed", "shorter", "longer", "spoilt"],
)
async def test_rows_that_are_not_those_of_the_run_are_refused(tmp_path: Path, rows: list[Any], line: int) -> None:
    first = fresh(tmp_path, [flat_row(n=n) for n in range(3)], environment="math", repeats=2)
    await run_against(FakeEnvironment(), first)
    write_rows(first.rows[0], rows)
    with pytest.raises(
        RunError, match=rf"not those that this run was started with; the first other one is .*:{line}\."
    ):
        await run_against(FakeEnvironment(), replace(first, resume=True))
    assert (await run_against(FakeEnvironment(), again(tmp_path))).status == 0


async def test_rows_beyond_the_limit_of_the_run_may_change(tmp_path: Path) -> None:
    first = fresh(tmp_path, [flat_row(n=n) for n in range(3)], limit=2)
    await run_against(FakeEnvironment(), first)
    write_rows(first.rows[0], [flat_row(n=0), flat_row(n=1), flat_row(n=7), flat_row(n=8)])
    assert (await run_against(FakeEnvironment(), replace(first, limit=None, resume=True))).status == 0


@pytest.mark.behaviour("CO-5")
async def test_a_failure_that_came_while_nobody_listened_is_kept_and_followed_by_the_next_attempt(
    tmp_path: Path,
) -> None:
    """As if the run had been killed between the end of the episodes and the writing of their outcomes."""

    async def play(body: Body) -> Body:
        if body["want"] == "later" and body["episode_id"]["attempt"]:
            return graded(body)
        return await _play(body)

    environment = FakeEnvironment(play)
    rows = [flat_row(want=want) for want in ("result", "terminal", "retryable", "later")]
    async with asyncio.timeout(BOUND_S), serving(environment.app) as url:
        summary = await collect(fresh(tmp_path, rows), url)
        write_rows(summary.paths.results, [])
        write_rows(summary.paths.failures, [])
        resumed = await collect(again(tmp_path), url)
    assert len(environment.starts) == 6
    assert set(environment.starts.values()) == {1}
    assert sorted(result["want"] for result in _with_want(resumed, environment)) == ["later", "result"]
    attempts = [record["episode_id"] for record in read_jsonl(resumed.paths.failures)]
    assert sorted((episode["rollout_id"][-3:], episode["attempt"]) for episode in attempts) == [
        ("1-0", 0), ("2-0", 0), ("2-0", 1), ("3-0", 0)
    ]  # fmt: skip


def _with_want(summary: RunSummary, environment: FakeEnvironment) -> list[Body]:
    wants = {post["_ng_task_index"]: post["want"] for post in environment.posts}
    return [{**result, "want": wants[result["_ng_task_index"]]} for result in read_jsonl(summary.paths.results)]


@pytest.mark.behaviour("CO-5")
async def test_cancelled_episodes_do_not_count_as_tries(tmp_path: Path) -> None:
    async def play(body: Body) -> Body:
        return failing(body, terminal=False, kind="cancelled")

    await run_against(FakeEnvironment(play), fresh(tmp_path, [flat_row()]))
    for attempt in range(1, 5):
        environment = FakeEnvironment(play)
        summary = await run_against(environment, again(tmp_path))
        assert [post["episode_id"]["attempt"] for post in environment.posts] == [attempt]
        assert summary.due == 1


async def test_a_run_that_goes_on_elsewhere_says_so(tmp_path: Path) -> None:
    class Notes(Silence):
        def __init__(self) -> None:
            self.notes: list[str] = []

        def note(self, sentence: str) -> None:
            self.notes.append(sentence)

    notes = Notes()
    first = await run_against(FakeEnvironment(_play), fresh(tmp_path, [flat_row(want="retryable")]))
    url = url_of_run(again(tmp_path))
    assert json.loads(first.paths.run.read_text())["url"] == url
    async with asyncio.timeout(BOUND_S), serving(FakeEnvironment(_play).app) as other:
        await collect(again(tmp_path), other, watcher=notes)
    assert any(f"was started at {url} and goes on at {other}" in note for note in notes.notes)


@pytest.mark.behaviour("CO-5")
async def test_a_run_without_the_record_of_its_start_is_not_resumed(tmp_path: Path) -> None:
    summary = await run_against(FakeEnvironment(_play), fresh(tmp_path, [flat_row(want="retryable")]))
    summary.paths.run.write_text('{"schema_version": 2}')
    with pytest.raises(RunError, match=r"o_run\.json does not say how a run was started"):
        await run_against(FakeEnvironment(_play), again(tmp_path))
    summary.paths.run.unlink()
    with pytest.raises(RunError, match=r"o_run\.json, which says what it was started with, is missing"):
        await run_against(FakeEnvironment(_play), again(tmp_path))


async def test_what_a_run_left_that_was_killed_before_it_began_is_taken_over(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "o.jsonl")
    paths.results.touch()
    paths.failures.write_text('{"half')
    paths.inputs.with_suffix(".jsonl.tmp").write_text("half")
    summary = await run_against(FakeEnvironment(_play), fresh(tmp_path, [flat_row(want="result")]))
    assert summary.status == 0
    assert read_jsonl(paths.failures) == []
    assert not paths.inputs.with_suffix(".jsonl.tmp").exists()


async def test_nulls_and_separators_of_rows_and_answers_survive_the_files(tmp_path: Path) -> None:
    async def play(body: Body) -> Body:
        return graded(body, note="one\u2028two", response={"usage": None, "error": None})

    row = flat_row("\u2028", hint=None, nested={"a": None}, huge=10**30)
    environment = FakeEnvironment(play)
    summary = await run_against(environment, fresh(tmp_path, [row]))
    assert {name: environment.posts[0][name] for name in row} == row
    (inputs,) = read_jsonl(summary.paths.inputs)
    assert {name: inputs["request"][name] for name in row} == row
    assert "\u2028" not in summary.paths.results.read_text(encoding="utf-8")
    result = json.loads(summary.paths.results.read_text(encoding="utf-8"))
    assert (result["note"], result["response"]) == ("one\u2028two", {"usage": None, "error": None})
