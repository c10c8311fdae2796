"""A run against an environment on a real socket."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fastapi.responses import JSONResponse, Response

from services.collector.options import EnvironmentGoneError, RunError, RunOptions
from services.collector.run import collect
from services.collector.watching import RunSummary
from tests.collector.fake_environment import (
    Body,
    FakeEnvironment,
    always_one,
    failing,
    flat_row,
    graded,
    key_of,
    native_row,
    read_jsonl,
    write_rows,
)
from tests.serving import free_port, serving

BOUND_S = 30.0


def _options(tmp_path: Path, rows: list[Any], **more: Any) -> RunOptions:
    path = write_rows(tmp_path / "rows.jsonl", rows)
    return RunOptions(rows=(path,), out=tmp_path / "out" / "o.jsonl", **({"patience_s": 5.0} | more))


async def _run(environment: FakeEnvironment, options: RunOptions, **more: Any) -> RunSummary:
    async with asyncio.timeout(BOUND_S), serving(environment.app) as url:
        return await collect(options, url, **more)


@pytest.mark.behaviour("CO-3")
async def test_a_run_writes_results_failures_inputs_and_metrics(tmp_path: Path) -> None:
    async def play(body: Body) -> Body:
        if body["n"] == 2:
            return failing(body, terminal=False)
        return graded(body, 0.5, response={"usage": {"total_tokens": 7}}, task_id={"taskset": "t", "task_id": "x"})

    environment = FakeEnvironment(play)
    options = _options(tmp_path, [flat_row(n=1, environment="math"), "bad", flat_row(n=2, environment="math")])
    summary = await _run(environment, options)
    assert summary.status == 1
    (result,) = read_jsonl(summary.paths.results)
    assert result["reward"] == 0.5
    assert (result["_ng_task_index"], result["_ng_rollout_index"]) == (0, 0)
    assert result["episode_id"] == {"rollout_id": f"{summary.run_id}-0-0", "attempt": 0}
    assert result["environment"] == "math"
    bad, failure = read_jsonl(summary.paths.failures)
    assert bad["source"] == {"file": str(options.rows[0]), "line": 2}
    assert bad["failure"]["failure_kind"] == "bad_row"
    assert failure["episode_id"]["rollout_id"] == f"{summary.run_id}-1-0"
    assert len(read_jsonl(summary.paths.inputs)) == 2
    metrics = json.loads(summary.paths.metrics.read_text())
    assert metrics["environments"]["math"]["coverage"]["failed"] == 1
    assert metrics["environments"]["math"]["usage"]["total_tokens"] == {"mean": 7.0, "rows": 1}
    assert (metrics["complete"], metrics["bad_rows"]) == (False, 1)
    assert sorted(path.name for path in summary.paths.results.parent.iterdir()) == [
        "o.jsonl", "o_failures.jsonl", "o_inputs.jsonl", "o_metrics.json"
    ]  # fmt: skip


async def test_a_run_in_which_every_row_has_a_result_ends_with_zero(tmp_path: Path) -> None:
    environment = FakeEnvironment()
    summary = await _run(environment, _options(tmp_path, [flat_row(), flat_row()], repeats=3), token="client-secret")
    assert summary.status == 0
    assert len(read_jsonl(summary.paths.results)) == 6
    assert set(environment.authorizations) == {"Bearer client-secret"}
    assert set(environment.prefers) == {"respond-async, wait=30"}
    written = "".join(path.read_text() for path in summary.paths.results.parent.iterdir())
    assert "client-secret" not in written


@pytest.mark.behaviour("CO-7")
async def test_a_failure_record_says_who_reported_it_and_whether_it_was_delivered(tmp_path: Path) -> None:
    def gate(body: Body) -> Response | None:
        replies: dict[str, Response] = {
            "bad row": JSONResponse(
                {
                    "error": {"message": "expected_answer: Field required"},
                    "failure": {"failure_kind": "bad_row", "terminal": True},
                },
                422,
            ),
            "bare 500": Response("oops", 500),
            "not json": Response("<html>", 200),
            "no reward": JSONResponse({"hello": 1}),
            "infinite": Response(b'{"reward": 1e999}', 200),
            "other": JSONResponse({"reward": 1.0, "episode_id": {"rollout_id": "other", "attempt": 0}}),
            "new kind": JSONResponse({"failure": {"failure_reason": "?", "terminal": False, "failure_kind": "new"}}),
        }
        return replies.get(body["want"])

    wanted = ["bad row", "bare 500", "not json", "no reward", "infinite", "other", "new kind", "failed"]

    async def play(body: Body) -> Body:
        return failing(body, terminal=False)

    options = _options(tmp_path, [flat_row(want=want) for want in wanted], concurrency=1)
    summary = await _run(FakeEnvironment(play, gate=gate), options)
    found = [
        (
            record["reported_by"],
            record["delivery"],
            record["http_status"],
            record["failure"]["failure_kind"],
            record["failure"]["terminal"],
        )
        for record in read_jsonl(summary.paths.failures)
    ]
    ours = ("collector", "delivered", 200, "protocol_violation", True)
    assert dict(zip(wanted, found, strict=True)) == {
        "bad row": ("environment", "delivered", 422, "bad_row", True),
        "bare 500": ("environment", "delivered", 500, "environment_server_failed", False),
        "not json": ours,
        "no reward": ours,
        "infinite": ours,
        "other": ours,
        "new kind": ours,
        "failed": ("environment", "delivered", 200, "model_overloaded", False),
    }
    assert read_jsonl(summary.paths.results) == []
    assert all(record["schema_version"] == 1 for record in read_jsonl(summary.paths.failures))


@pytest.mark.behaviour("ES-9", "ES-54", "ES-60")
async def test_a_native_row_is_sent_as_it_is_and_its_result_is_written_flat(tmp_path: Path) -> None:
    async def play(body: Body) -> Body:
        task_id = body["task"]["task_id"]
        if body["episode_id"]["rollout_id"] == "own-2":
            task_id = {"taskset": "another", "task_id": "t1"}
        return {
            "episode_id": body["episode_id"],
            "task_id": task_id,
            "result": {"reward": 1.0, "extracted_answer": "1", "response": None},
            "evidence": {"gaps": ["a_gap"]},
        }

    environment = FakeEnvironment(play)
    rows = [native_row("own-1", attempt=3), native_row("own-2")]
    summary = await _run(environment, _options(tmp_path, rows, concurrency=1))
    assert environment.posts == rows
    (result,) = read_jsonl(summary.paths.results)
    assert result["episode_id"] == {"rollout_id": "own-1", "attempt": 3}
    assert (result["reward"], result["response"], result["evidence"]) == (1.0, None, {"gaps": ["a_gap"]})
    (failure,) = read_jsonl(summary.paths.failures)
    assert "another task" in failure["failure"]["failure_reason"]
    score = summary.metrics["environments"]["default"]["scores"]["reward"]
    assert score["majority_at_k"] == {"1": 1.0}


@pytest.mark.behaviour("CO-2")
async def test_no_more_than_the_limit_run_at_once(tmp_path: Path) -> None:
    arrived = asyncio.Semaphore(0)
    go = asyncio.Event()

    async def play(body: Body) -> Body:
        arrived.release()
        await go.wait()
        return graded(body)

    environment = FakeEnvironment(play)
    running = asyncio.create_task(_run(environment, _options(tmp_path, [flat_row()] * 20, concurrency=4)))
    async with asyncio.timeout(BOUND_S):
        for _ in range(4):
            await arrived.acquire()
        go.set()
        summary = await running
    assert summary.status == 0
    assert environment.most_running == 4


async def test_an_episode_longer_than_the_wait_is_asked_for_and_not_held(tmp_path: Path) -> None:
    environment: FakeEnvironment

    async def play(body: Body) -> Body:
        await environment.polled(key_of(body))
        return graded(body)

    environment = FakeEnvironment(play, longest_wait_s=0.05)
    summary = await _run(environment, _options(tmp_path, [flat_row()]))
    assert summary.status == 0
    assert len(environment.posts) == 1
    assert environment.polls.total() >= 1


async def test_an_episode_that_the_environment_forgot_is_posted_again_under_the_same_id(tmp_path: Path) -> None:
    environment: FakeEnvironment
    entered = asyncio.Event()

    async def play(body: Body) -> Body:
        if environment.starts.total() == 1:
            entered.set()
            await asyncio.Event().wait()
        return graded(body)

    environment = FakeEnvironment(play, longest_wait_s=0.05)
    running = asyncio.create_task(_run(environment, _options(tmp_path, [flat_row()])))
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
    summary = await _run(environment, _options(tmp_path, [flat_row()]))
    (failure,) = read_jsonl(summary.paths.failures)
    assert failure["failure"]["failure_kind"] == "session_lost"
    assert (failure["delivery"], failure["failure"]["terminal"]) == ("delivered", False)


async def test_a_full_environment_is_asked_again_when_it_said(tmp_path: Path) -> None:
    refused: list[float] = []
    taken: list[float] = []

    def gate(body: Body) -> Response | None:
        now = asyncio.get_running_loop().time()
        if len(refused) < 1:
            refused.append(now)
            return JSONResponse({"error": {"message": "full"}}, 429, {"retry-after": "1"})
        taken.append(now)
        return None

    environment = FakeEnvironment(gate=gate)
    summary = await _run(environment, _options(tmp_path, [flat_row()]))
    assert summary.status == 0
    assert taken[0] - refused[0] >= 1.0
    assert [post["episode_id"]["attempt"] for post in environment.posts] == [0, 0]


@pytest.mark.parametrize("status", [429, 502, 503, 504])
@pytest.mark.behaviour("CO-4")
async def test_an_environment_that_refuses_for_ever_gives_a_retryable_failure(tmp_path: Path, status: int) -> None:
    def gate(body: Body) -> Response | None:
        return JSONResponse({"error": {"message": "not now"}}, status) if body["n"] == 1 else None

    environment = FakeEnvironment(gate=gate)
    options = _options(tmp_path, [flat_row(n=1), flat_row(n=2)], patience_s=0.1, busy_patience_s=0.1)
    summary = await _run(environment, options)
    (failure,) = read_jsonl(summary.paths.failures)
    assert (failure["http_status"], failure["failure"]["terminal"]) == (status, False)
    assert failure["reported_by"] == ("environment" if status == 429 else "collector")
    assert len(read_jsonl(summary.paths.results)) == 1


async def test_a_restart_of_the_environment_in_the_middle_loses_nothing(tmp_path: Path) -> None:
    port = free_port()
    held = asyncio.Event()
    entered = asyncio.Semaphore(0)

    async def hold(body: Body) -> Body:
        entered.release()
        await held.wait()
        return graded(body)

    first, second = FakeEnvironment(hold), FakeEnvironment(always_one)
    options = _options(tmp_path, [flat_row(n=n) for n in range(6)], concurrency=3)
    async with asyncio.timeout(BOUND_S):
        async with serving(first.app, port=port) as url:
            running = asyncio.create_task(collect(options, url))
            for _ in range(3):
                await entered.acquire()
            first.forget()
        async with serving(second.app, port=port):
            summary = await running
    assert summary.status == 0
    assert len(read_jsonl(summary.paths.results)) == 6
    assert set(first.starts) <= set(second.starts)


@pytest.mark.behaviour("CO-3")
async def test_when_the_environment_stays_away_the_rows_are_left_as_they_were(tmp_path: Path) -> None:
    entered = asyncio.Semaphore(0)
    blocked = asyncio.Event()

    async def play(body: Body) -> Body:
        if body["n"] > 0:
            entered.release()
            await blocked.wait()
        return graded(body)

    environment = FakeEnvironment(play)
    options = _options(tmp_path, [flat_row(n=n) for n in range(4)], concurrency=2, patience_s=0.2)
    async with asyncio.timeout(BOUND_S):
        async with serving(environment.app) as url:
            running = asyncio.create_task(collect(options, url))
            for _ in range(2):
                await entered.acquire()
            environment.forget()
        summary = await running
    assert isinstance(summary.trouble, EnvironmentGoneError)
    assert summary.status == 1
    assert len(read_jsonl(summary.paths.results)) == 1
    assert read_jsonl(summary.paths.failures) == []
    resumed = await _run(FakeEnvironment(), RunOptions(rows=(), out=options.out, resume=True))
    assert resumed.status == 0
    assert len(read_jsonl(resumed.paths.results)) == 4


async def test_a_row_that_always_breaks_the_connection_fails_alone(tmp_path: Path) -> None:
    tries: Counter[str] = Counter()

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /readyz"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
            await writer.drain()
        else:
            tries["posts"] += 1
        writer.close()

    server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with asyncio.timeout(BOUND_S), server:
        summary = await collect(_options(tmp_path, [flat_row()], patience_s=0.3), f"http://127.0.0.1:{port}")
    (failure,) = read_jsonl(summary.paths.failures)
    assert (failure["reported_by"], failure["delivery"]) == ("collector", "possibly_delivered")
    assert failure["failure"]["failure_kind"] == "transport_peer_drop"
    assert failure["exception_type"] in {"RemoteProtocolError", "ReadError"}
    assert tries["posts"] >= 3


async def test_a_refused_token_ends_the_run_and_marks_no_row(tmp_path: Path) -> None:
    environment = FakeEnvironment(gate=lambda body: JSONResponse({"error": {"message": "no"}}, 401))
    summary = await _run(environment, _options(tmp_path, [flat_row()] * 3))
    assert "PADDOCK_CLIENT_TOKEN" in str(summary.trouble)
    assert summary.status == 2
    assert read_jsonl(summary.paths.failures) == []


async def test_stop_writes_nothing_for_rows_under_way_and_resume_joins_them(tmp_path: Path) -> None:
    entered = asyncio.Semaphore(0)
    go = asyncio.Event()

    async def play(body: Body) -> Body:
        if body["n"] > 0:
            entered.release()
            await go.wait()
        return graded(body)

    environment = FakeEnvironment(play)
    options = _options(tmp_path, [flat_row(n=n) for n in range(5)], concurrency=2)
    stop = asyncio.Event()
    async with asyncio.timeout(BOUND_S), serving(environment.app) as url:
        running = asyncio.create_task(collect(options, url, stop=stop))
        for _ in range(2):
            await entered.acquire()
        stop.set()
        summary = await running
        assert summary.stopped
        assert (len(read_jsonl(summary.paths.results)), read_jsonl(summary.paths.failures)) == (1, [])
        go.set()
        resumed = await collect(RunOptions(rows=(), out=options.out, resume=True), url)
    assert resumed.status == 0
    assert resumed.run_id == summary.run_id
    assert set(environment.starts.values()) == {1}


async def test_nothing_at_the_address_is_said_before_anything_is_written(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RunError, match=f"Nothing answers at {url}"):
        await collect(_options(tmp_path, [flat_row()]), url)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("url", "sentence"),
    [("127.0.0.1:8100", "is no address"), ("http://", "is no address"), ("http://h:99999999", "is no address")],
)
async def test_an_address_that_is_none_is_refused(tmp_path: Path, url: str, sentence: str) -> None:
    with pytest.raises(RunError, match=sentence):
        await collect(_options(tmp_path, [flat_row()]), url)


async def test_an_environment_that_is_not_ready_is_told_apart_from_none(tmp_path: Path) -> None:
    environment = FakeEnvironment()
    environment.ready = False
    with pytest.raises(RunError, match="not ready"):
        await _run(environment, _options(tmp_path, [flat_row()]))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"repeats": 0}, "--repeats must be at least 1"),
        ({"concurrency": 0}, "--concurrency must be at least 1"),
        ({"limit": 0}, "--limit must be at least 1"),
        ({"rows": ()}, "at least one JSONL file"),
        ({"rows": (Path("nowhere.jsonl"),)}, "nowhere.jsonl does not exist"),
        ({"resume": True, "out": None}, "--resume needs -o"),
        ({"resume": True}, "no run to resume"),
    ],
)
async def test_a_wrong_call_is_refused_with_a_sentence(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    options = _options(tmp_path, [flat_row()])
    fields = {name: getattr(options, name) for name in ("rows", "out")} | change
    with pytest.raises(RunError, match=sentence) as refused:
        await _run(FakeEnvironment(), RunOptions(**fields))
    assert refused.value.status == 2


async def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="There are no rows in"):
        await _run(FakeEnvironment(), _options(tmp_path, []))


async def test_a_fresh_run_does_not_overwrite_another(tmp_path: Path) -> None:
    options = _options(tmp_path, [flat_row()])
    summary = await _run(FakeEnvironment(), options)
    before = summary.paths.results.read_bytes()
    with pytest.raises(RunError, match="exists already and is not overwritten"):
        await _run(FakeEnvironment(), options)
    assert summary.paths.results.read_bytes() == before


async def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    entered, go = asyncio.Event(), asyncio.Event()

    async def play(body: Body) -> Body:
        entered.set()
        await go.wait()
        return graded(body)

    environment = FakeEnvironment(play)
    options = _options(tmp_path, [flat_row()])
    async with asyncio.timeout(BOUND_S), serving(environment.app) as url:
        running = asyncio.create_task(collect(options, url))
        await entered.wait()
        with pytest.raises(RunError, match="Another run is writing"):
            await collect(RunOptions(rows=(), out=options.out, resume=True), url)
        go.set()
        assert (await running).status == 0
