"""What a failing model server does to an episode: a failure that says why, never a grade."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.mesh import rows
from tests.mesh.chat import ChatServer, answers_text, hangs, refuses, says, sends
from tests.mesh.processes import UpMesh, paddock, up
from tests.model_proxy.wire import COMPLETION, Handler, json_body, reply
from tests.serving import free_port

KEY = "Zq7-key-that-nobody-may-see-4711"
TOKEN = "a-mesh-token-of-the-test"
SILENCE_S = 1.5
ANSWER_S = 60.0
# A right answer, so that a response that were graded would get a reward.
RIGHT = r"\boxed{12}"


def configuration(chat_url: str, nobody_url: str) -> dict[str, Any]:
    model = {"upstream": "chat_completions", "api_key_env": "A_MODELS_KEY", "timeout_s": SILENCE_S, "model": "m"}
    return {
        "models": {"policy": {**model, "base_url": chat_url}, "nobody": {**model, "base_url": nobody_url}},
        "agents": {
            "tool_loop": {"harness": "tool_loop", "model": "policy"},
            "calls_nobody": {"harness": "tool_loop", "model": "nobody"},
        },
        "resources": {"math": {"verifier": "math"}, "judged": {"verifier": "math", "judge": "policy"}},
        "environments": {
            "math": {"resources": "math", "agent": "tool_loop"},
            "nobody": {"resources": "math", "agent": "calls_nobody"},
            "judged": {"resources": "judged", "agent": "tool_loop"},
        },
    }


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, chat: ChatServer) -> Iterator[UpMesh]:
    folder = tmp_path_factory.mktemp("mesh")
    config = folder / "paddock.json"
    config.write_bytes(orjson.dumps(configuration(chat.url, f"http://127.0.0.1:{free_port()}/v1")))
    environ = {"A_MODELS_KEY": KEY, "PADDOCK_MESH_TOKEN": TOKEN, "PADDOCK_LOG_LEVEL": "debug"}
    with up("--config", config, cwd=folder, environ=environ) as started:
        yield started


def run(mesh: UpMesh, row: dict[str, Any], **headers: str) -> httpx.Response:
    return httpx.post(f"{mesh.url}/run", json=row, headers=headers, timeout=ANSWER_S, trust_env=False)


@dataclass(frozen=True)
class Fault:
    """An answer of the model's server and the failure that it has to become."""

    name: str
    answer: Handler
    kind: str
    terminal: bool
    status: int | None
    excerpt: str = ""
    code: str | None = None


def _error(message: str, code: str | None = None) -> dict[str, Any]:
    return {"message": f"{message} (sent key: {KEY})", "type": "some_error", "param": None, "code": code}


_LIMITS = "max_tokens must be at most 4096; this model's maximum context length is 8192 tokens"
_HALF = reply(200, orjson.dumps(COMPLETION), ("Content-Type", "application/json"))[:-40]

FAULTS = [
    Fault("400", refuses(400, _error("bad value")), "model_bad_request", True, 400, "bad value"),
    Fault("400 about limits", refuses(400, _error(_LIMITS)), "model_bad_request", True, 400, "maximum context length"),
    Fault(
        "400 with a code", refuses(400, _error("no", "bad_param")), "model_bad_request", True, 400, "no", "bad_param"
    ),
    Fault("401", refuses(401, _error("who are you")), "model_auth", True, 401, "who are you"),
    Fault("403", refuses(403, _error("not you")), "model_auth", True, 403, "not you"),
    Fault("404", refuses(404, _error("no such model")), "model_bad_request", True, 404, "no such model"),
    Fault("408", refuses(408, _error("too slow")), "model_error", False, 408, "too slow"),
    Fault("429", refuses(429, _error("slow down"), ("Retry-After", "7")), "model_rate_limited", False, 429, "slow"),
    Fault(
        "429 for a quota",
        refuses(429, _error("pay", "insufficient_quota")),
        "model_quota",
        False,
        429,
        "pay",
        "insufficient_quota",
    ),
    Fault("500 in plain text", answers_text(500, "boiler broke"), "model_error", False, 500, "boiler broke"),
    Fault("502 as a page", answers_text(502, "<h1>Bad Gateway</h1>"), "model_error", False, 502, "Bad Gateway"),
    Fault("503", refuses(503, _error("busy")), "model_overloaded", False, 503, "busy"),
    Fault("an error in a 200", sends(json_body({"error": _error("inner fault")})), "model_error", False, 200),
    Fault("a page in a 200", answers_text(200, "<h1>Welcome</h1>"), "model_error", False, 200),
    Fault("no choices", sends(json_body({**COMPLETION, "choices": []})), "model_error", False, 200),
    Fault("no HTTP", sends(f"SPEAK {KEY} FRIEND\r\n\r\n".encode(), then_close=True), "model_error", False, None),
    Fault("a cut body", sends(_HALF, then_close=True), "model_error", False, None),
    Fault("a cut head", sends(b"HTTP/1.1 200 OK\r\nConte", then_close=True), "model_error", False, None),
    Fault("silence", hangs, "model_error", False, None),
]


@pytest.mark.behaviour("ES-45", "ES-47", "ES-50", "MS-2")
@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_fault_of_the_models_server_is_a_failure_with_its_cause(mesh: UpMesh, chat: ChatServer, fault: Fault) -> None:
    scene = chat.on(marker := f"<fault {fault.name}>", fault.answer)
    answered = run(mesh, rows.math(marker, "12", environment="math"))
    assert answered.status_code == 200
    body = answered.json()
    failure = body["failure"]
    assert "reward" not in body
    assert failure["failure_kind"] == fault.kind, failure
    assert (failure["terminal"], failure["stage"]) == (fault.terminal, "agent")
    assert body["_ng_failure_terminal"] is fault.terminal
    assert body["_ng_failure_message"] == failure["failure_reason"]
    assert failure["origin"]["service"] == "upstream"
    assert failure["origin"].get("status") == fault.status
    assert failure["origin"].get("code") == fault.code or fault.code is None
    assert fault.excerpt in failure["origin"].get("body_excerpt", "")
    assert KEY not in answered.text
    assert len(scene.asked) == 1, "nothing is repeated that the server may have begun to answer"


@pytest.mark.behaviour("ES-50")
def test_a_model_that_nobody_serves_is_a_retryable_failure(mesh: UpMesh) -> None:
    body = run(mesh, rows.math("<nobody>", "12", environment="nobody")).json()
    assert "reward" not in body
    assert body["failure"]["failure_kind"] == "model_error"
    assert body["failure"]["terminal"] is False
    assert "cannot be reached" in body["failure"]["failure_reason"]
    assert body["failure"]["origin"] == {"service": "upstream", "code": "upstream_unreachable"}


@pytest.mark.behaviour("ES-47", "ES-49")
def test_a_full_context_window_ends_the_answer_and_what_is_there_is_graded(mesh: UpMesh, chat: ChatServer) -> None:
    chat.on("<full>", refuses(400, _error("too long", "context_length_exceeded")))
    body = run(mesh, rows.math("<full>", "12", environment="math")).json()
    assert body["reward"] == 0.0
    assert body["response"]["status"] == "incomplete"
    assert body["response"]["incomplete_details"] == {"reason": "context_window"}
    assert body["outcome"]["action"] == "verify"


@pytest.mark.behaviour("ES-47", "ES-49")
def test_an_answer_that_is_cut_at_the_output_limit_is_graded_as_it_is(mesh: UpMesh, chat: ChatServer) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": RIGHT}, "finish_reason": "length"}
    chat.on("<length>", sends(json_body({**COMPLETION, "choices": [choice]})))
    body = run(mesh, rows.math("<length>", "12", environment="math")).json()
    assert body["reward"] == 1.0
    assert body["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.behaviour("RS-3", "ES-50")
def test_a_judge_that_fails_masks_the_sample(mesh: UpMesh, chat: ChatServer) -> None:
    scene = chat.on("<judge>", says(r"\boxed{13}"), refuses(401, _error("who are you")))
    body = run(mesh, rows.math("<judge>", "12", environment="judged")).json()
    assert (body["reward"], body["mask_sample"]) == (0.0, True)
    assert body["failure_kind"] == "judge_failed"
    assert "401" in body["failure_reason"]
    assert KEY not in str(body)
    assert len(scene.asked) == 2
    assert body["response"]["usage"]["input_tokens"] == 7, "the judge's call is not the agent's"


def test_a_native_row_gets_its_failure_in_the_native_form(mesh: UpMesh, chat: ChatServer) -> None:
    chat.on("<native>", refuses(503, _error("busy")))
    flat = rows.math("<native>", "12")
    params = flat.pop("responses_create_params")
    native = {
        "episode_id": {"rollout_id": "native-1", "attempt": 0},
        "task": {
            "task_id": {"taskset": "sums", "task_id": "one"},
            "task_input": {"responses_create_params": params, "task_data": flat},
        },
        "environment": "math",
    }
    body = run(mesh, native).json()
    assert body.keys() == {"episode_id", "task_id", "failure", "evidence"}
    assert body["failure"]["failure_kind"] == "model_overloaded"
    assert body["failure"]["origin"]["status"] == 503


@pytest.mark.behaviour("CO-7", "ES-40")
def test_a_run_keeps_failures_beside_results_and_a_resumed_one_repeats_what_may_be(
    mesh: UpMesh, chat: ChatServer, tmp_path: Path
) -> None:
    chat.on("<run good>", says(RIGHT))
    later = chat.on("<run later>", refuses(503, _error("busy")), says(RIGHT))
    never = chat.on("<run never>", refuses(401, _error("who are you")))
    file = rows.write(
        tmp_path / "rows.jsonl",
        [rows.math(marker, "12") for marker in ("<run good>", "<run later>", "<run never>")],
    )
    out = tmp_path / "out.jsonl"
    done = paddock("run", file, "--environment", "math", "-o", out, "--url", mesh.url, cwd=tmp_path)
    assert done.status == 1, done.told
    assert [result["_ng_task_index"] for result in rows.read(out)] == [0]
    failures = {record["task_index"]: record for record in rows.read(tmp_path / "out_failures.jsonl")}
    assert {index: record["failure"]["failure_kind"] for index, record in failures.items()} == {
        1: "model_overloaded",
        2: "model_auth",
    }
    assert all("reward" not in record for record in failures.values())
    assert failures[2]["failure"]["origin"]["status"] == 401

    done = paddock("run", "--resume", "-o", out, "--url", mesh.url, cwd=tmp_path)
    assert done.status == 1, done.told
    results = {result["_ng_task_index"]: result for result in rows.read(out)}
    assert results.keys() == {0, 1}
    assert results[1]["reward"] == 1.0
    assert results[1]["episode_id"]["attempt"] == 1
    assert (len(later.asked), len(never.asked)) == (2, 1)
    assert KEY not in "".join(path.read_text() for path in tmp_path.glob("out*")) + done.told


def test_many_rows_at_once_each_get_their_own_fate(mesh: UpMesh, chat: ChatServer, tmp_path: Path) -> None:
    fates: list[tuple[Handler, float | str]] = [
        (says(RIGHT), 1.0),
        (says(r"\boxed{13}"), 0.0),
        (refuses(500, _error("broken")), "model_error"),
        (refuses(401, _error("who are you")), "model_auth"),
        (sends(_HALF, then_close=True), "model_error"),
        (refuses(400, _error("too long", "context_length_exceeded")), 0.0),
    ]
    listed = []
    for number in range(60):
        chat.on(marker := f"<fate {number}>", fates[number % len(fates)][0])
        listed.append(rows.math(marker, "12"))
    file = rows.write(tmp_path / "rows.jsonl", listed)
    out = tmp_path / "out.jsonl"
    done = paddock("run", file, "--environment", "math", "-o", out, "--url", mesh.url, cwd=tmp_path)
    assert done.status == 1, done.told
    told: dict[int, float | str] = {result["_ng_task_index"]: result["reward"] for result in rows.read(out)}
    told |= {
        record["task_index"]: record["failure"]["failure_kind"] for record in rows.read(tmp_path / "out_failures.jsonl")
    }
    assert told == {number: fates[number % len(fates)][1] for number in range(60)}


def test_the_models_key_stands_in_no_answer_no_capture_no_log_and_no_list(mesh: UpMesh, chat: ChatServer) -> None:
    answers = {
        "error": refuses(400, _error("bad"), ("X-Request-Id", KEY)),
        "page": answers_text(500, f"<p>Authorization: Bearer {KEY}</p>"),
        "noise": sends(f"{KEY}\r\n\r\n".encode(), then_close=True),
        "status line": sends(f"HTTP/1.1 500 {KEY}\r\nContent-Length: 0\r\n\r\n".encode()),
        "header": sends(f"HTTP/1.1 200 OK\r\n{KEY}\r\n\r\n".encode(), then_close=True),
        "answer": says(f"Your key is {KEY}."),
    }
    proxy = mesh.urls["model_proxy"]
    told = []
    with httpx.Client(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=ANSWER_S, trust_env=False) as client:
        for number, (name, answer) in enumerate(answers.items()):
            chat.on(marker := f"<leak {name}>", answer)
            key = f"leak-{number}"
            row = rows.math(marker, "12", environment="math", episode_id={"rollout_id": key, "attempt": 0})
            asked = {"model": "policy", "input": marker}
            told += [
                client.post(f"{mesh.url}/run", json=row),
                client.get(f"{mesh.url}/episodes/{key}"),
                client.get(f"{proxy}/captures/{key}"),
                client.post(f"{proxy}/rollouts/{key}-direct/v1/responses", json=asked),
                client.post(f"{proxy}/rollouts/{key}-direct/v1/responses", json={**asked, "stream": True}),
                client.get(f"{proxy}/captures/{key}-direct"),
            ]
        told += [client.get(f"{mesh.url}/episodes", params={"limit": 1000})]
        told += [client.get(f"{url}/metrics") for url in mesh.urls.values()]
    assert [reply.url for reply in told if KEY in reply.text + str(reply.headers)] == []
    assert KEY not in mesh.told
