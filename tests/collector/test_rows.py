"""What is read from rows, what is refused, and where it is said to stand."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.collector.options import RunOptions
from services.collector.records import MaterialisedRow
from services.collector.rows import BadRow, Materialiser, ReadRow, read_rows
from tests.collector.fake_environment import flat_row, native_row, write_rows


def _materialised(path: Path, **options: Any) -> tuple[list[MaterialisedRow], list[BadRow]]:
    found = list(Materialiser(RunOptions(rows=(path,), **options), "run-1").rows())
    return [row for row in found if isinstance(row, MaterialisedRow)], [row for row in found if isinstance(row, BadRow)]


@pytest.mark.behaviour("CO-1")
def test_every_row_and_repeat_gets_its_indexes_and_a_stable_id(tmp_path: Path) -> None:
    rows, bad = _materialised(write_rows(tmp_path / "r.jsonl", [flat_row("a"), flat_row("b")]), repeats=2)
    assert bad == []
    assert [(row.task_index, row.repeat_index) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [row.request["episode_id"]["rollout_id"] for row in rows] == [
        "run-1-0-0",
        "run-1-0-1",
        "run-1-1-0",
        "run-1-1-1",
    ]
    assert rows[3].request["_ng_task_index"] == 1
    assert rows[3].request["_ng_rollout_index"] == 1


def test_bad_rows_are_named_by_line_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    lines = [
        json.dumps(flat_row()),
        "",
        "{not json",
        "[1, 2]",
        '{"responses_create_params": {"input": "x", "temperature": 9}}',
        '{"expected_answer": "1"}',
        '{"responses_create_params": {"input": "x", "no_such_field": 1}}',
        '{"responses_create_params": {"input": "x"}, "score": NaN}',
        '{"responses_create_params": {"input": "x"}, "score": 1e999}',
        "   ",
        json.dumps(flat_row()),
        '{"responses_create_params": {"input": "cut',
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    rows, bad = _materialised(path)
    assert [row.source.line for row in rows] == [1, 11]
    problems = {row.source.line: row.problem for row in bad}
    assert list(problems) == [3, 4, 5, 6, 7, 8, 9, 12]
    assert "not JSON" in problems[3]
    assert problems[4] == "a row is a JSON object, not a list"
    assert problems[5].startswith("responses_create_params.temperature: ")
    assert problems[6] == "responses_create_params: Field required"
    assert problems[7].startswith("responses_create_params.no_such_field: ")
    assert "NaN is not JSON" in problems[8]
    assert "too large" in problems[9]
    assert "was the file cut off?" in problems[12]


@pytest.mark.behaviour("CO-1", "ES-57")
@pytest.mark.parametrize(
    "name", ["reward", "response", "mask_sample", "_ng_failure_class", "_ng_failure_message", "_ng_task_index"]
)
def test_fields_of_results_and_of_materialised_rows_are_refused(tmp_path: Path, name: str) -> None:
    native = native_row("own-1")
    native["task"]["task_input"]["task_data"][name] = 0
    _, bad = _materialised(write_rows(tmp_path / "r.jsonl", [flat_row() | {name: 0}, native]))
    assert [row.problem.partition(" ")[0] for row in bad] == [f"{name}:", f"task.task_input.{name}:"]


def test_line_separators_a_byte_order_mark_and_huge_integers_survive(tmp_path: Path) -> None:
    huge = 12345678901234567890123456789
    path = tmp_path / "r.jsonl"
    text = json.dumps(flat_row("one\u2028two\u2029three\u0085four", expected_answer=huge), ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode() + b"\r\n" + json.dumps(flat_row("\ud800")).encode() + b"\n")
    found = list(read_rows(path))
    assert len(found) == 2
    first, second = found
    assert isinstance(first, ReadRow)
    assert isinstance(second, ReadRow)
    assert first.row["responses_create_params"]["input"][0]["content"] == "one\u2028two\u2029three\u0085four"
    assert first.row["expected_answer"] == huge
    assert second.row["responses_create_params"]["input"][0]["content"] == "\ud800"


def test_a_file_that_is_not_utf8_is_reported_by_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(json.dumps(flat_row()).encode() + b"\n" + '{"a": "ü"}'.encode("latin-1") + b"\n")
    _, bad = _materialised(path)
    assert [(row.source.line, row.problem) for row in bad] == [(2, "not UTF-8 at byte 7")]


def test_a_row_nested_without_end_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("[" * 200_000 + "\n" + json.dumps(flat_row()) + "\n")
    rows, bad = _materialised(path)
    assert len(rows) == 1
    assert [row.problem for row in bad] == ["nested too deeply"]


@pytest.mark.behaviour("CO-1", "ES-54")
def test_a_prepared_row_keeps_its_id_and_refuses_what_would_change_it(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "r.jsonl", [native_row("own-1", attempt=1), native_row("own-1"), native_row("own-2")])
    rows, bad = _materialised(path, environment="math")
    assert [row.request["episode_id"] for row in rows] == [
        {"rollout_id": "own-1", "attempt": 1},
        {"rollout_id": "own-2", "attempt": 0},
    ]
    assert all(row.request["environment"] == "math" for row in rows)
    assert "_ng_task_index" not in rows[0].request
    assert [row.problem for row in bad] == [f"episode_id.rollout_id: 'own-1' is that of {path}:1 already"]
    rows, bad = _materialised(path, repeats=2)
    assert rows == []
    assert all("run once" in row.problem for row in bad)


@pytest.mark.behaviour("ES-5", "ES-54")
@pytest.mark.parametrize(
    "episode_id",
    [{"rollout_id": "x-a1"}, {"rollout_id": "x", "attempt": True}, {"rollout_id": "ä"}, {"rollout_id": "x", "more": 1}],
)
@pytest.mark.parametrize("form", ["native", "flat"])
def test_an_id_that_the_environment_would_refuse_is_refused_here(
    tmp_path: Path, episode_id: dict[str, Any], form: str
) -> None:
    row = native_row("x") if form == "native" else flat_row()
    _, bad = _materialised(write_rows(tmp_path / "r.jsonl", [row | {"episode_id": episode_id}]))
    assert len(bad) == 1
    assert bad[0].problem.startswith("episode_id.")


def test_environment_fills_in_and_never_overrides(tmp_path: Path) -> None:
    rows, bad = _materialised(
        write_rows(tmp_path / "r.jsonl", [flat_row(), flat_row(environment="gpqa"), flat_row(environment="math")]),
        environment="math",
    )
    assert [row.request["environment"] for row in rows] == ["math", "math"]
    assert "the row names 'gpqa', --environment says 'math'" in bad[0].problem


def test_limit_counts_good_rows_and_stops_reading(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "r.jsonl", [[], flat_row("a"), flat_row("b"), []])
    rows, bad = _materialised(path, limit=1)
    assert len(rows) == 1
    assert [row.source.line for row in bad] == [1]
