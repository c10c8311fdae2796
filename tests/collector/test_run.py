"""A run against an environment on a real socket."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest
from fastapi.responses import JSONResponse, Response

from services.collector.run import collect
from tests.collector.fake_environment import (
    Body,
    FakeEnvironment,
    failing,
    flat_row,
    graded,
    key_of,
    native_row,
    read_jsonl,
)
from tests.collector.runs import BOUND_S, fresh, run_against


@pytest.mark.behaviour("CO-3")
async def test_a_run_writes_results_failures_inputs_and_metrics(tmp_path: Path) -> None:
    async def play(body: Body) -> Body:
        if body["n"] == 2:
            return failing(body, terminal=False)
        return graded(body, 0.5, response={"usage": {"total_tokens": 7}}, task_id={"taskset": "t", "task_id": "x"})

    environment = FakeEnvironment(play)
    options = fresh(tmp_path, [flat_row(n=1, environment="math"), "bad", flat_row(n=2, environment="math")])
    summary = await run_against(environment, options)
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
        "o.jsonl", "o_failures.jsonl", "o_inputs.jsonl", "o_metrics.json", "o_run.json", "rows.jsonl"
    ]  # fmt: skip


async def test_a_run_in_which_every_row_has_a_result_ends_with_zero(tmp_path: Path) -> None:
    environment = FakeEnvironment()
    summary = await run_against(
        environment, fresh(tmp_path, [flat_row(), flat_row()], repeats=3), token="client-secret"
    )
    assert summary.status == 0
    assert len(read_jsonl(summary.paths.results)) == 6
    assert set(environment.authorizations) == {"Bearer client-secret"}
    assert set(environment.prefers) == {"respond-async, wait=5"}
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

    options = fresh(tmp_path, [flat_row(want=want) for want in wanted], concurrency=1, patience_s=0.5)
    summary = await run_against(FakeEnvironment(play, gate=gate), options)
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
        "not json": ("collector", "delivered", 200, "protocol_violation", False),
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
    summary = await run_against(environment, fresh(tmp_path, rows, concurrency=1))
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
    running = asyncio.create_task(run_against(environment, fresh(tmp_path, [flat_row()] * 20, concurrency=4)))
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
    summary = await run_against(environment, fresh(tmp_path, [flat_row()]))
    assert summary.status == 0
    assert len(environment.posts) == 1
    assert environment.polls.total() >= 1


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
    summary = await run_against(environment, fresh(tmp_path, [flat_row()]))
    assert summary.status == 0
    assert taken[0] - refused[0] >= 1.0
    assert [post["episode_id"]["attempt"] for post in environment.posts] == [0, 0]


@pytest.mark.parametrize("status", [429, 502, 503, 504])
@pytest.mark.behaviour("CO-4")
async def test_an_environment_that_refuses_for_ever_gives_a_retryable_failure(tmp_path: Path, status: int) -> None:
    def gate(body: Body) -> Response | None:
        return JSONResponse({"error": {"message": "not now"}}, status) if body["n"] == 1 else None

    environment = FakeEnvironment(gate=gate)
    options = fresh(tmp_path, [flat_row(n=1), flat_row(n=2)], patience_s=0.1, busy_patience_s=0.1)
    summary = await run_against(environment, options)
    (failure,) = read_jsonl(summary.paths.failures)
    assert (failure["http_status"], failure["failure"]["terminal"]) == (status, False)
    assert failure["reported_by"] == ("environment" if status == 429 else "collector")
    assert len(read_jsonl(summary.paths.results)) == 1


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
        summary = await collect(fresh(tmp_path, [flat_row()], patience_s=0.3), f"http://127.0.0.1:{port}")
    (failure,) = read_jsonl(summary.paths.failures)
    assert (failure["reported_by"], failure["delivery"]) == ("collector", "possibly_delivered")
    assert failure["failure"]["failure_kind"] == "transport_peer_drop"
    assert failure["exception_type"] in {"RemoteProtocolError", "ReadError"}
    assert tries["posts"] >= 3
