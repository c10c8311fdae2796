"""What a resumed run sends again, and under which attempt."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from services.collector.files import RunPaths
from services.collector.options import RunError, RunOptions
from services.collector.run import collect
from services.collector.watching import RunSummary
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
from tests.serving import serving

BOUND_S = 30.0


async def _run(environment: FakeEnvironment, options: RunOptions) -> RunSummary:
    async with asyncio.timeout(BOUND_S), serving(environment.app) as url:
        return await collect(options, url)


def _fresh(tmp_path: Path, rows: list[Any], **more: Any) -> RunOptions:
    return RunOptions(rows=(write_rows(tmp_path / "r.jsonl", rows),), out=tmp_path / "o.jsonl", **more)


def _again(tmp_path: Path, **more: Any) -> RunOptions:
    return RunOptions(rows=(), out=tmp_path / "o.jsonl", resume=True, **more)


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
    first = await _run(FakeEnvironment(_play), _fresh(tmp_path, rows))
    attempts = []
    for _ in range(3):
        environment = FakeEnvironment(_play)
        summary = await _run(environment, _again(tmp_path))
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

    await _run(FakeEnvironment(second_time), _fresh(tmp_path, [flat_row()]))
    summary = await _run(FakeEnvironment(second_time), _again(tmp_path))
    assert summary.status == 0
    assert summary.metrics["environments"]["default"]["failures"] == {}
    assert read_jsonl(summary.paths.results)[0]["episode_id"]["attempt"] == 1


@pytest.mark.behaviour("CO-5")
async def test_an_own_attempt_is_where_counting_begins(tmp_path: Path) -> None:
    async def play(body: Body) -> Body:
        return failing(body, terminal=False)

    await _run(FakeEnvironment(play), _fresh(tmp_path, [native_row("own", attempt=4)]))
    environment = FakeEnvironment(play)
    await _run(environment, _again(tmp_path))
    assert [post["episode_id"]["attempt"] for post in environment.posts] == [5]


@pytest.mark.behaviour("CO-5")
@pytest.mark.parametrize("cut", [1, 20, 60])
@pytest.mark.parametrize("which", ["results", "failures"])
async def test_a_truncated_last_line_is_dropped_and_its_row_runs_again(tmp_path: Path, which: str, cut: int) -> None:
    rows = [flat_row(want="result"), flat_row(want="result"), flat_row(want="retryable")]
    summary = await _run(FakeEnvironment(_play), _fresh(tmp_path, rows, concurrency=1))
    _cut_off(getattr(summary.paths, which), cut)
    environment = FakeEnvironment(_play)
    await _run(environment, _again(tmp_path))
    expected = [("result", 0), ("retryable", 1)] if which == "results" else [("retryable", 0)]
    assert sorted(_attempts(environment)) == expected
    assert len(read_jsonl(summary.paths.results)) == 2
    assert len(read_jsonl(summary.paths.failures)) == (2 if which == "results" else 1)


async def test_bad_rows_still_count_in_a_resumed_run(tmp_path: Path) -> None:
    summary = await _run(FakeEnvironment(_play), _fresh(tmp_path, [flat_row(want="result"), []]))
    assert (summary.status, summary.bad_rows) == (1, 1)
    summary = await _run(FakeEnvironment(_play), _again(tmp_path))
    assert (summary.status, summary.bad_rows) == (1, 1)


@pytest.mark.behaviour("CO-7")
@pytest.mark.parametrize(
    "change", [{"schema_version": 2}, {"no_such_field": 1}, {"reported_by": "environment", "delivery": "not_sent"}]
)
async def test_a_failure_record_of_another_form_is_refused_and_not_dropped(tmp_path: Path, change: Body) -> None:
    summary = await _run(FakeEnvironment(_play), _fresh(tmp_path, [flat_row(want="retryable")]))
    (record,) = read_jsonl(summary.paths.failures)
    write_rows(summary.paths.failures, [record | change])
    with pytest.raises(RunError, match=r"o_failures\.jsonl:1 is not a line of a run"):
        await _run(FakeEnvironment(_play), _again(tmp_path))


async def test_a_damaged_line_in_the_middle_is_refused_with_its_number(tmp_path: Path) -> None:
    rows = [flat_row(want="result")] * 2
    summary = await _run(FakeEnvironment(_play), _fresh(tmp_path, rows))
    lines = summary.paths.results.read_bytes().split(b"\n")
    summary.paths.results.write_bytes(lines[0][:30] + b"\n" + lines[1] + b"\n")
    with pytest.raises(RunError, match=r"o\.jsonl:1 is not a line of a run"):
        await _run(FakeEnvironment(_play), _again(tmp_path))


@pytest.mark.behaviour("CO-5")
async def test_a_run_without_its_inputs_is_not_resumed(tmp_path: Path) -> None:
    summary = await _run(FakeEnvironment(_play), _fresh(tmp_path, [flat_row(want="retryable")]))
    summary.paths.inputs.unlink()
    with pytest.raises(RunError, match=r"o_inputs\.jsonl, which says what its rows were, is missing"):
        await _run(FakeEnvironment(_play), _again(tmp_path))


async def test_results_of_another_run_are_not_mixed_in(tmp_path: Path) -> None:
    summary = await _run(FakeEnvironment(_play), _fresh(tmp_path, [flat_row(want="result")]))
    (result,) = read_jsonl(summary.paths.results)
    write_rows(summary.paths.results, [result | {"episode_id": {"rollout_id": "foreign", "attempt": 0}}])
    with pytest.raises(RunError, match="were files mixed up"):
        await _run(FakeEnvironment(_play), _again(tmp_path))


async def test_other_repeats_are_refused(tmp_path: Path) -> None:
    await _run(FakeEnvironment(_play), _fresh(tmp_path, [flat_row(want="result")], repeats=2))
    with pytest.raises(RunError, match="2 repeats, not 3"):
        await _run(FakeEnvironment(_play), _again(tmp_path, repeats=3))
    assert (await _run(FakeEnvironment(_play), _again(tmp_path, repeats=2))).status == 0


async def test_what_a_run_left_that_was_killed_before_it_began_is_taken_over(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "o.jsonl")
    paths.results.touch()
    paths.failures.write_text('{"half')
    paths.inputs.with_suffix(".jsonl.tmp").write_text("half")
    summary = await _run(FakeEnvironment(_play), _fresh(tmp_path, [flat_row(want="result")]))
    assert summary.status == 0
    assert read_jsonl(paths.failures) == []
    assert not paths.inputs.with_suffix(".jsonl.tmp").exists()


async def test_nulls_and_separators_of_rows_and_answers_survive_the_files(tmp_path: Path) -> None:
    async def play(body: Body) -> Body:
        return graded(body, note="one\u2028two", response={"usage": None, "error": None})

    row = flat_row("\u2028", hint=None, nested={"a": None}, huge=10**30)
    environment = FakeEnvironment(play)
    summary = await _run(environment, _fresh(tmp_path, [row]))
    assert {name: environment.posts[0][name] for name in row} == row
    (inputs,) = read_jsonl(summary.paths.inputs)
    assert {name: inputs["request"][name] for name in row} == row
    assert "\u2028" not in summary.paths.results.read_text(encoding="utf-8")
    result = json.loads(summary.paths.results.read_text(encoding="utf-8"))
    assert (result["note"], result["response"]) == ("one\u2028two", {"usage": None, "error": None})
