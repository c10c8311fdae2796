"""Files of rows that are large, partly bad or cut, and ports that are taken."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mesh import rows
from tests.mesh.chat import ChatServer, says
from tests.mesh.processes import FREE_PORTS, MARK, UpMesh, marked, new_mark, paddock, up

RIGHT = r"\boxed{12}"
MIB = 2**20


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, chat: ChatServer) -> Iterator[UpMesh]:
    environ = {"PADDOCK_MODEL_BASE_URL": chat.url, "PADDOCK_MODEL_NAME": "m"}
    with up(cwd=tmp_path_factory.mktemp("mesh"), environ=environ) as started:
        yield started


def _results(folder: Path) -> dict[int, dict[str, Any]]:
    return {result["_ng_task_index"]: result for result in rows.read(folder / "out.jsonl")}


def test_a_row_of_thirty_megabytes_reaches_the_model_and_is_graded(
    mesh: UpMesh, chat: ChatServer, tmp_path: Path
) -> None:
    scene = chat.on("<large>", says(RIGHT))
    large = rows.math("<large>", "12", notes="n" * (10 * MIB))
    large["responses_create_params"]["input"].append({"role": "user", "content": "t" * (20 * MIB)})
    file = rows.write(tmp_path / "rows.jsonl", [large, rows.math("<large>", "13")])
    out = tmp_path / "out.jsonl"
    done = paddock("run", file, "--environment", "math", "-o", out, "--url", mesh.url, cwd=tmp_path)
    assert done.status == 0, done.told
    assert [result["reward"] for _, result in sorted(_results(tmp_path).items())] == [1.0, 0.0]
    assert max(len(asked.body) for asked in scene.asked) > 20 * MIB


def test_a_row_that_is_too_large_is_one_bad_row(mesh: UpMesh, chat: ChatServer, tmp_path: Path) -> None:
    chat.on("<fits>", says(RIGHT))
    file = rows.write(tmp_path / "rows.jsonl", [rows.math("<too large>", "n" * (65 * MIB)), rows.math("<fits>", "12")])
    out = tmp_path / "out.jsonl"
    done = paddock("run", file, "--environment", "math", "-o", out, "--url", mesh.url, cwd=tmp_path)
    assert done.status == 1, done.told
    assert _results(tmp_path).keys() == {1}
    (record,) = rows.read(tmp_path / "out_failures.jsonl")
    assert (record["task_index"], record["http_status"]) == (0, 413)
    assert (record["failure"]["failure_kind"], record["failure"]["terminal"]) == ("bad_row", True)
    assert "64 MiB" in record["failure"]["failure_reason"]


@pytest.mark.behaviour("CO-1", "CO-4", "ES-57")
def test_bad_rows_are_told_with_their_lines_and_the_others_run(mesh: UpMesh, chat: ChatServer, tmp_path: Path) -> None:
    chat.on("<good>", says(RIGHT))
    good = rows.math("<good>", "12")
    without_answer = {name: value for name, value in good.items() if name != "expected_answer"}
    lines: list[dict[str, Any] | str] = [
        good,
        '{"responses_create_params": {"input": "cut',
        "[1, 2]",
        without_answer,
        {**good, "responses_create_params": {"input": [], "temperature": "hot"}},
        {**good, "reward": 1.0},
        {**good, "agent_timeout_s": -1},
        rows.math("<good>", "13"),
    ]
    file = rows.write(tmp_path / "rows.jsonl", lines)
    out = tmp_path / "out.jsonl"
    done = paddock("run", file, "--environment", "math", "-o", out, "--url", mesh.url, cwd=tmp_path)
    assert done.status == 1, done.told
    assert sorted(result["reward"] for result in _results(tmp_path).values()) == [0.0, 1.0]
    failures = {record["source"]["line"]: record["failure"] for record in rows.read(tmp_path / "out_failures.jsonl")}
    assert failures.keys() == {2, 3, 4, 5, 6, 7}
    assert {failure["failure_kind"] for failure in failures.values()} == {"bad_row"}
    assert all(failure["terminal"] for failure in failures.values())
    assert "expected_answer" in failures[4]["failure_reason"]
    assert "temperature" in failures[5]["failure_reason"]
    assert "reward" in failures[6]["failure_reason"]
    assert "agent_timeout_s" in failures[7]["failure_reason"]
    for line in (2, 3, 6):
        assert f"{file}:{line}: " in done.err


def test_rows_that_name_an_unknown_environment_are_told_the_nearest(
    mesh: UpMesh, chat: ChatServer, tmp_path: Path
) -> None:
    chat.on("<named>", says(RIGHT))
    row = rows.math("<named>", "12")
    file = rows.write(tmp_path / "rows.jsonl", [{**row, "environment": "maths"}, {**row, "environment": "math"}, row])
    out = tmp_path / "out.jsonl"
    done = paddock("run", file, "-o", out, "--url", mesh.url, cwd=tmp_path)
    assert done.status == 1, done.told
    assert _results(tmp_path).keys() == {1}
    reasons = {
        record["source"]["line"]: record["failure"]["failure_reason"]
        for record in rows.read(tmp_path / "out_failures.jsonl")
    }
    assert "There is no environment 'maths'. Did you mean 'math'?" in reasons[1]
    assert "Known: gpqa, math, mcqa, string_match, weather" in reasons[1]
    assert (
        "the row has to name its own, in its field 'environment'. Known: gpqa, math, mcqa, string_match, weather"
        in reasons[3]
    )


@pytest.mark.behaviour("CO-5")
def test_a_cut_last_line_is_dropped_and_its_row_is_asked_for_again(
    mesh: UpMesh, chat: ChatServer, tmp_path: Path
) -> None:
    scene = chat.on("<cut line>", says(RIGHT))
    file = rows.write(tmp_path / "rows.jsonl", [rows.math("<cut line>", "12", number=number) for number in range(3)])
    out = tmp_path / "out.jsonl"
    run = ("run", file, "--environment", "math", "-o", out, "--url", mesh.url)
    assert paddock(*run, cwd=tmp_path).status == 0
    whole = rows.read(out)
    out.write_bytes(out.read_bytes()[:-50])
    done = paddock("run", "--resume", "-o", out, "--url", mesh.url, cwd=tmp_path)
    assert done.status == 0, done.told
    assert "was cut off in the middle and is dropped" in done.err
    assert sorted(_results(tmp_path)) == [0, 1, 2]
    assert {result["reward"] for result in rows.read(out)} == {1.0}
    assert rows.read(out)[:2] == whole[:2]
    assert len(scene.asked) == 3, "the environment replays what it has"
    assert paddock(*run, cwd=tmp_path).status == 2, "a file of results is not overwritten"


@pytest.mark.parametrize("words", [("up",), ("serve", "agent")], ids=["up", "serve"])
def test_a_port_that_is_taken_is_told_and_nothing_is_left(words: tuple[str, ...], tmp_path: Path) -> None:
    mark = new_mark()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        environ = {**FREE_PORTS, "PADDOCK_AGENT_URL": f"http://127.0.0.1:{port}", MARK: mark}
        done = paddock(*words, cwd=tmp_path, environ=environ)
    assert done.status == 2, done.told
    assert "Traceback" not in done.told
    assert str(port) in done.err
    assert "taken" in done.err
    assert done.out == ""
    assert marked(mark) == []
