"""The contract of every resources entry: seed, verify, close, whatever the verifier."""

from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from shared.contracts.resources import RESOURCES_COOKIE, RESOURCES_SESSION_HEADER
from shared.errors import ServiceError
from tests.resources.rig import (
    Served,
    close_body,
    close_request,
    loaded,
    mesh_client,
    resources,
    seed_body,
    seed_request,
    verify_body,
)

ENTRIES: dict[str, dict[str, Any]] = {
    "mcqa": {"verifier": "mcqa"},
    "words": {"verifier": "string_match"},
    "math": {"verifier": "math"},
    "weather": {"verifier": "tool_calls", "tools": ["weather"]},
    "offered": {"verifier": "tool_calls", "tools": ["weather"], "without_expected_calls": "offered_tool"},
}
TASKS: dict[str, dict[str, Any]] = {
    "mcqa": {"options": [{"A": "one"}, {"B": "two"}], "expected_answer": "B", "uuid": "u-1"},
    "words": {"expected_answer": "Paris", "extraction_mode": "full"},
    "math": {"expected_answer": "42"},
    "weather": {"expected_calls": [{"name": "get_weather", "arguments": {"city": "Oslo"}}]},
    "offered": {},
}
MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "mcqa": ({"options": [{"A": "one"}], "expected_answer": 7}, "task_data.expected_answer"),
    "words": ({"expected_answer": "x", "extraction_mode": "guess"}, "task_data.extraction_mode"),
    "math": ({}, "task_data.expected_answer"),
    "weather": ({}, "task_data.expected_calls"),
    "offered": ({"expected_calls": []}, "task_data.expected_calls"),
}
every_entry = pytest.mark.parametrize("entry", list(ENTRIES))


@pytest.fixture
async def server() -> AsyncIterator[Served]:
    async with resources(loaded(ENTRIES)) as served:
        yield served


@every_entry
@pytest.mark.behaviour("RS-1")
async def test_the_same_seed_joins_and_gives_the_same_session(server: Served, entry: str) -> None:
    first = await server.post(f"{entry}/seed_session", seed_body("s", TASKS[entry]))
    again = await server.post(f"{entry}/seed_session", seed_body("s", TASKS[entry]))
    assert (first.status_code, again.status_code) == (200, 200)
    assert first.content == again.content
    assert first.headers["set-cookie"] == again.headers["set-cookie"]
    assert first.headers["set-cookie"].startswith(f"{RESOURCES_COOKIE}=s~")
    assert first.json()["resources_session_id"] == "s"


@every_entry
@pytest.mark.behaviour("RS-1")
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"episode_id": {"rollout_id": "other", "attempt": 0}}, "another episode"),
        ({"episode_id": {"rollout_id": "s", "attempt": 1}}, "another episode"),
        ({"task_id": {"taskset": "tests", "task_id": "2"}}, "another task"),
    ],
)
async def test_the_same_id_for_something_else_is_a_conflict(
    server: Served, entry: str, changes: dict[str, Any], says: str
) -> None:
    await server.seed(entry, "s", TASKS[entry])
    refused = await server.post(f"{entry}/seed_session", seed_body("s", TASKS[entry]) | changes)
    assert refused.status_code == 409
    assert says in refused.json()["error"]["message"]


@every_entry
@pytest.mark.behaviour("RS-1")
async def test_the_same_id_with_other_task_data_is_a_conflict(server: Served, entry: str) -> None:
    await server.seed(entry, "s", TASKS[entry])
    refused = await server.post(f"{entry}/seed_session", seed_body("s", {**TASKS[entry], "note": "new"}))
    assert refused.status_code == 409


@every_entry
async def test_task_data_that_does_not_fit_is_refused_with_its_path(server: Served, entry: str) -> None:
    task_data, path = MISFITS[entry]
    refused = await server.post(f"{entry}/seed_session", seed_body("s", task_data))
    assert refused.status_code == 422
    assert path in [".".join(map(str, item["loc"])) for item in refused.json()["detail"]]
    assert (await server.post(f"{entry}/close_session", close_body("s"))).json()["status"] == "unknown"


@every_entry
@pytest.mark.behaviour("RS-1")
async def test_close_is_idempotent_and_fences_a_later_seed(server: Served, entry: str) -> None:
    await server.seed(entry, "s", TASKS[entry])
    for _ in range(2):
        closed = await server.post(f"{entry}/close_session", close_body("s"))
        assert closed.json() == {"resources_session_id": "s", "status": "closed"}
    late = await server.post(f"{entry}/seed_session", seed_body("s", TASKS[entry]))
    assert late.status_code == 409


@every_entry
@pytest.mark.behaviour("RS-1")
async def test_close_of_an_unknown_id_succeeds_and_fences_it(server: Served, entry: str) -> None:
    for _ in range(2):
        closed = await server.post(f"{entry}/close_session", close_body("s"))
        assert closed.json() == {"resources_session_id": "s", "status": "unknown"}
    late = await server.post(f"{entry}/seed_session", seed_body("s", TASKS[entry]))
    assert late.status_code == 409


@every_entry
@pytest.mark.behaviour("RS-1")
async def test_close_for_another_episode_is_a_conflict_and_closes_nothing(server: Served, entry: str) -> None:
    await server.seed(entry, "s", TASKS[entry])
    wrong = close_body("s", episode_id={"rollout_id": "other", "attempt": 0})
    assert (await server.post(f"{entry}/close_session", wrong)).status_code == 409
    joined = await server.post(f"{entry}/seed_session", seed_body("s", TASKS[entry]))
    assert joined.status_code == 200


@every_entry
async def test_a_repeated_verify_replays_the_verdict_byte_for_byte(server: Served, entry: str) -> None:
    task = TASKS[entry]
    body = verify_body(task, "the answer")
    body["responses_create_params"] = {**body["responses_create_params"], "tools": [FUNCTION]}
    cookies = await server.seed(entry, "s", task)
    first = await server.post(f"{entry}/verify", body, cookies=cookies)
    again = await server.post(f"{entry}/verify", body, cookies=cookies)
    await server.post(f"{entry}/close_session", close_body("s"))
    late = await server.post(f"{entry}/verify", body, cookies=cookies)
    assert first.status_code == 200, first.text
    assert first.json()["reward"] == 0.0
    assert first.json()["mask_sample"] is False
    assert first.content == again.content == late.content


FUNCTION = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@every_entry
async def test_a_session_belongs_to_its_entry(server: Served, entry: str) -> None:
    cookies = await server.seed(entry, "s", TASKS[entry])
    other = "mcqa" if entry != "mcqa" else "words"
    for path, body in (
        ("seed_session", seed_body("s", TASKS[other])),
        ("verify", verify_body(TASKS[other])),
        ("close_session", close_body("s")),
    ):
        refused = await server.post(f"{other}/{path}", body, cookies=cookies)
        assert refused.status_code == 409, (path, refused.text)


@every_entry
@pytest.mark.behaviour("RS-4")
async def test_an_entry_says_whether_its_verdict_can_be_computed_again(server: Served, entry: str) -> None:
    mode = (await server.http.get(f"{server.url}/{entry}/reverify_mode")).json()["reverify_mode"]
    stateless = entry in {"mcqa", "words", "math"}
    assert mode == ("stateless" if stateless else "unsupported")
    alone = await server.post(f"{entry}/verify", verify_body(TASKS[entry], "x"))
    assert alone.status_code == (200 if stateless else 410)


@every_entry
async def test_the_client_of_the_environment_server_fits(server: Served, entry: str) -> None:
    session = "rollout 1;é~"
    async with mesh_client(server.url, entry) as client:
        seeded = await client.seed(seed_request(session, TASKS[entry]), timeout_s=5)
        body = verify_body(TASKS[entry], "x")
        body["responses_create_params"] = {**body["responses_create_params"], "tools": [FUNCTION]}
        verified = await client.verify(orjson.dumps(body), cookies=seeded.cookies, timeout_s=10)
        closed = await client.close(close_request(session), cookies=seeded.cookies, timeout_s=5)
        metrics = await client.aggregate_metrics(b'{"results":[' + verified.raw + b"]}", timeout_s=5)
        with pytest.raises(ServiceError) as refused:
            await client.seed(seed_request(session, TASKS[entry]), timeout_s=5)
    assert verified.verdict.reward == 0.0
    assert closed.status == "closed"
    assert orjson.loads(metrics)["mean_reward"] == 0.0
    assert refused.value.status == 409
    tools = seeded.reply.resources_tools
    if entry in {"weather", "offered"}:
        assert tools is not None
        assert tools.mcp is not None
        assert tools.mcp.path == "/mcp"
        assert [tool["name"] for tool in tools.http] == ["get_weather"]
    else:
        assert tools is None


async def test_a_session_id_with_unusual_characters_survives_the_cookie(server: Served) -> None:
    session = 'a b;c="d"~é/%2F'
    cookies = await server.seed("words", session, TASKS["words"], episode_id={"rollout_id": "r", "attempt": 0})
    graded = await server.post("words/verify", verify_body(TASKS["words"], "paris"), cookies=cookies)
    assert graded.json()["reward"] == 1.0
    closed = await server.post("words/close_session", close_body(session, episode_id={"rollout_id": "r", "attempt": 0}))
    assert closed.json()["status"] == "closed"


@pytest.mark.parametrize("value", ["s", "s~forged", ""])
async def test_a_cookie_of_another_mesh_is_a_lost_session_and_never_a_grade(server: Served, value: str) -> None:
    await server.seed("weather", "s", TASKS["weather"])
    refused = await server.post("weather/verify", verify_body(TASKS["weather"]), cookies={RESOURCES_COOKIE: value})
    assert refused.status_code == 410
    assert refused.json()["failure"] == {"failure_kind": "session_lost", "terminal": False}


async def test_the_session_may_be_named_by_header_too(server: Served) -> None:
    cookies = await server.seed("weather", "s", TASKS["weather"])
    for value in ("s", cookies[RESOURCES_COOKIE]):
        reply = await server.post("weather/get_weather", {"city": "Oslo"}, headers={RESOURCES_SESSION_HEADER: value})
        assert reply.status_code == 200, reply.text


async def test_an_unknown_entry_is_named_with_the_nearest(server: Served) -> None:
    refused = await server.post("wether/seed_session", seed_body("s", {}))
    assert refused.status_code == 422
    assert "Did you mean 'weather'?" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({}, "resources_session_id"),
        (seed_body("s", {}, extra=1), "extra"),
        (seed_body("s", {}, episode_id={"rollout_id": "x-a1"}), "episode_id.rollout_id"),
        (seed_body("", {}), "resources_session_id"),
        (seed_body("s", {"expected_answer": "x", "n": 2**80}), "task_data"),
    ],
)
async def test_a_malformed_seed_is_refused_with_field_paths(server: Served, body: Any, path: str) -> None:
    refused = await server.post("words/seed_session", body)
    assert refused.status_code == 422
    assert path in [".".join(map(str, item["loc"])) for item in refused.json()["detail"]]


async def test_a_body_that_is_no_json_is_refused(server: Served) -> None:
    for path in ("seed_session", "verify", "close_session", "aggregate_metrics"):
        refused = await server.http.post(f"{server.url}/words/{path}", content=b"{not json")
        assert refused.status_code == 422, path
