"""What a run refuses, once and with a sentence, before it leaves anything behind."""

import asyncio
import os
from math import nan
from pathlib import Path
from typing import Any

import pytest
from fastapi.responses import JSONResponse, Response

from services.collector.options import RefusedError, RunError, RunOptions
from services.collector.run import collect
from tests.collector.fake_environment import (
    Body,
    FakeEnvironment,
    flat_row,
    graded,
    read_jsonl,
)
from tests.collector.runs import BOUND_S, fresh, run_against
from tests.serving import free_port, serving


async def test_a_refused_token_ends_the_run_and_leaves_no_files_in_the_way(tmp_path: Path) -> None:
    environment = FakeEnvironment(gate=lambda body: JSONResponse({"error": {"message": "no"}}, 401))
    options = fresh(tmp_path, [flat_row()] * 3)
    with pytest.raises(RunError, match=r"asks for a token, and there is none.*PADDOCK_CLIENT_TOKEN"):
        await run_against(environment, options)
    with pytest.raises(RunError, match=r"refuses our token.*PADDOCK_CLIENT_TOKEN"):
        await run_against(environment, options, token="wrong")


async def test_nothing_at_the_address_is_said_before_anything_is_written(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RunError, match=f"Nothing answers at {url}"):
        await collect(fresh(tmp_path, [flat_row()]), url)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("127.0.0.1:8100", "is no address"),
        ("http://", "is no address"),
        ("http://h:99999999", "is no address"),
        ("http://u:secret@h", "may not hold a password"),
    ],
)
async def test_an_address_that_is_none_is_refused(tmp_path: Path, url: str, sentence: str) -> None:
    with pytest.raises(RunError, match=sentence):
        await collect(fresh(tmp_path, [flat_row()]), url)


async def test_an_environment_that_is_not_ready_is_told_apart_from_none(tmp_path: Path) -> None:
    environment = FakeEnvironment()
    environment.ready = False
    with pytest.raises(RunError, match="not ready"):
        await run_against(environment, fresh(tmp_path, [flat_row()]))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"repeats": 0}, "--repeats must be at least 1"),
        ({"concurrency": 0}, "--concurrency must be at least 1"),
        ({"limit": 0}, "--limit must be at least 1"),
        ({"patience_s": 0.0}, "--patience must be more than 0 seconds"),
        ({"patience_s": nan}, "--patience must be more than 0 seconds"),
        ({"rows": ()}, "at least one JSONL file"),
        ({"rows": (Path("nowhere.jsonl"),)}, "nowhere.jsonl does not exist"),
        ({"resume": True, "out": None}, "--resume needs -o"),
        ({"resume": True}, "no run to resume"),
    ],
)
async def test_a_wrong_call_is_refused_with_a_sentence(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    options = fresh(tmp_path, [flat_row()])
    fields = {name: getattr(options, name) for name in ("rows", "out")} | change
    with pytest.raises(RunError, match=sentence) as refused:
        await run_against(FakeEnvironment(), RunOptions(**fields))
    assert refused.value.status == 2


async def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="There are no rows in"):
        await run_against(FakeEnvironment(), fresh(tmp_path, []))


async def test_a_fresh_run_does_not_overwrite_another(tmp_path: Path) -> None:
    options = fresh(tmp_path, [flat_row()])
    summary = await run_against(FakeEnvironment(), options)
    before = summary.paths.results.read_bytes()
    with pytest.raises(RunError, match="exists already and is not overwritten"):
        await run_against(FakeEnvironment(), options)
    assert summary.paths.results.read_bytes() == before


async def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    entered, go = asyncio.Event(), asyncio.Event()

    async def play(body: Body) -> Body:
        entered.set()
        await go.wait()
        return graded(body)

    environment = FakeEnvironment(play)
    options = fresh(tmp_path, [flat_row()])
    async with asyncio.timeout(BOUND_S), serving(environment.app) as url:
        running = asyncio.create_task(collect(options, url))
        await entered.wait()
        with pytest.raises(RunError, match="Another run is writing"):
            await collect(RunOptions(rows=(), out=options.out, resume=True), url)
        go.set()
        assert (await running).status == 0


def _knows_only_math(body: Body) -> Response | None:
    name = body.get("environment")
    if name == "math":
        return None
    told = "There is no environment 'mth'. Did you mean 'math'? Known: math." if name else "Name one. Known: math."
    detail = [{"loc": ["environment"], "msg": told, "type": "unknown_name" if name else "missing"}]
    failure = {"failure_kind": "bad_row", "terminal": True}
    return JSONResponse({"error": {"message": f"environment: {told}"}, "detail": detail, "failure": failure}, 422)


@pytest.mark.parametrize(
    ("row", "option", "told"),
    [
        (flat_row(), "mth", r"Did you mean 'math'\? Known: math\. Correct --environment\.$"),
        (flat_row(environment="mth"), None, r"Did you mean 'math'\? Known: math\. Correct it in the rows\.$"),
        (flat_row(), None, r"Known: math\. Name one for all rows with --environment\.$"),
    ],
)
async def test_an_environment_that_knows_none_of_the_rows_is_told_once_and_leaves_nothing_behind(
    tmp_path: Path, row: Body, option: str | None, told: str
) -> None:
    options = fresh(tmp_path, [row] * 40, environment=option)
    with pytest.raises(RefusedError, match=told):
        await run_against(FakeEnvironment(gate=_knows_only_math), options)
    assert os.listdir(tmp_path) == ["rows.jsonl"]


async def test_a_wrong_environment_of_some_rows_is_their_own_failure(tmp_path: Path) -> None:
    rows = [flat_row(environment="math"), flat_row(environment="mth"), flat_row(environment="math")]
    summary = await run_against(FakeEnvironment(gate=_knows_only_math), fresh(tmp_path, rows))
    assert len(read_jsonl(summary.paths.results)) == 2
    (failure,) = read_jsonl(summary.paths.failures)
    assert (failure["source"]["line"], failure["failure"]["failure_kind"]) == (2, "bad_row")
