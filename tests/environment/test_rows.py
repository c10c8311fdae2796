"""What a row must look like, and what its fields become."""

import json
from typing import Any

import orjson
import pytest

from services.environment.rows import read_row
from shared.errors import BadRowError
from shared.settings import Settings
from tests.environment.parties import PARAMS, flat, house, native, settings_for

SETTINGS = settings_for("http://127.0.0.1:1", {}, {}).settings


def two_environments() -> Settings:
    more = {
        "agents": {"solver": {"harness": "tool_loop"}, "coder": {"harness": "tool_loop"}},
        "environments": {
            "sums": {"resources": "sums", "agent": "solver"},
            "code": {"resources": "sums", "agent": "coder"},
        },
    }
    return settings_for("http://127.0.0.1:1", {}, more).settings


@pytest.mark.behaviour("ES-5", "ES-6", "ES-7", "ES-56", "ES-58")
@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"episode_id": {"rollout_id": "-x", "attempt": 0}}, "episode_id.rollout_id"),
        ({"episode_id": {"rollout_id": "x y", "attempt": 0}}, "episode_id.rollout_id"),
        ({"episode_id": {"rollout_id": "x-a3", "attempt": 0}}, "episode_id.rollout_id"),
        ({"episode_id": {"rollout_id": "x\n", "attempt": 0}}, "episode_id.rollout_id"),
        ({"episode_id": {"rollout_id": "x", "attempt": -1}}, "episode_id.attempt"),
        ({"episode_id": {"rollout_id": "x", "attempt": True}}, "episode_id.attempt"),
        ({"episode_id": {"rollout_id": "x", "attempt": "1"}}, "episode_id.attempt"),
        ({"unknown": 1}, "unknown"),
        ({"environment": 7}, "environment"),
    ],
)
async def test_a_malformed_native_request_is_refused_with_the_fields_path(change: dict[str, Any], path: str) -> None:
    async with house() as home:
        reply = await home.run({**native(), **change})
        assert reply.status_code == 422
        assert [".".join(map(str, item["loc"])) for item in reply.json()["detail"]] == [path]
        assert path in reply.json()["error"]["message"]
        assert home.parties.order == []


@pytest.mark.behaviour("ES-54", "ES-55")
@pytest.mark.parametrize(
    ("row", "path"),
    [
        ({"expected_answer": "1"}, "responses_create_params"),
        ({"responses_create_params": {"input": []}}, "responses_create_params.input"),
        ({"responses_create_params": {"input": [{"x": 1}]}}, "responses_create_params.input"),
        ({"responses_create_params": {**PARAMS, "temprature": 1}}, "responses_create_params.temprature"),
        ({"responses_create_params": {**PARAMS, "temperature": "hot"}}, "responses_create_params.temperature"),
        (flat(agent_timeout_s=0), "agent_timeout_s"),
        (flat(reward=1.0), "reward"),
        (flat(_ng_attempt_index=True), "_ng_attempt_index"),
        (flat(_ng_rollout_id="../x"), "_ng_rollout_id"),
        (flat(task_source="elsewhere"), "task_source"),
        (flat(environment="sum"), "environment"),
    ],
)
def test_a_malformed_flat_row_is_refused_with_the_fields_path(row: dict[str, Any], path: str) -> None:
    with pytest.raises(BadRowError) as caught:
        read_row(orjson.dumps(row), SETTINGS)
    assert caught.value.detail[0].path.startswith(path)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"row"', b"\xff\xfe", b'{"a":NaN}'])
async def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    async with house() as home:
        reply = await home.run(body)
        assert reply.status_code == 422
        assert reply.json()["detail"][0]["loc"] == ["body"]


async def test_all_wrong_fields_are_named_at_once() -> None:
    async with house() as home:
        reply = await home.run({"responses_create_params": {"input": 5, "top_p": 7}, "environment": 1})
        paths = {".".join(map(str, item["loc"])) for item in reply.json()["detail"]}
        assert {"responses_create_params.top_p", "environment"} < paths


async def test_an_unknown_environment_is_answered_with_the_known_ones_and_the_nearest() -> None:
    async with house() as home:
        reply = await home.run(flat(environment="sumz"))
        assert reply.status_code == 422
        assert "Did you mean 'sums'?" in reply.json()["error"]["message"]
        assert "Known: sums" in reply.json()["error"]["message"]


def test_an_integer_that_would_be_rounded_is_refused_and_a_long_one_that_fits_is_kept() -> None:
    assert read_row(orjson.dumps(flat(n=2**64 - 1)), SETTINGS).task_data["n"] == 2**64 - 1
    assert read_row(orjson.dumps(flat(n="1" * 40)), SETTINGS).task_data["n"] == "1" * 40
    with pytest.raises(BadRowError) as caught:
        read_row(json.dumps(flat(metadata={"values": [1, 10**30]})).encode(), SETTINGS)
    assert caught.value.detail[0].path == "metadata.values.1"


@pytest.mark.behaviour("ES-57")
@pytest.mark.parametrize(
    ("fields", "task_id"),
    [
        ({"task_id": "t", "problem_id": "p"}, "t"),
        ({"problem_id": "p", "instance_id": "i"}, "p"),
        ({"instance_id": "i", "_ng_task_index": 4}, "i"),
        ({"_ng_task_index": 4}, "4"),
        ({"task_id": 12}, "12"),
    ],
)
def test_the_tasks_own_id_comes_before_its_index(fields: dict[str, Any], task_id: str) -> None:
    assert read_row(orjson.dumps(flat(**fields)), SETTINGS).task_id.task_id == task_id


def test_a_row_without_any_id_is_named_after_its_content() -> None:
    first, again = (read_row(orjson.dumps(flat()), SETTINGS) for _ in range(2))
    other = read_row(orjson.dumps(flat(expected_answer="43")), SETTINGS)
    assert first.task_id == again.task_id != other.task_id
    assert first.episode_id != again.episode_id


@pytest.mark.behaviour("ES-56", "ES-57", "ES-60")
def test_bookkeeping_stays_out_of_the_task_data() -> None:
    row = flat(
        agent_ref={"type": "responses_api_agents", "name": "somebody"},
        task_source="sums",
        skills_ref={"a": 1},
        _ng_task_index=3,
        _ng_rollout_index=1,
        uuid="u",
        metadata={"difficulty": "hard"},
    )
    read = read_row(orjson.dumps(row), SETTINGS)
    assert read.task_data == {"expected_answer": "42", "uuid": "u", "metadata": {"difficulty": "hard"}}
    assert read.task_id.taskset == "sums"
    assert read.episode_id.rollout_id.startswith("3-1-")


@pytest.mark.behaviour("ES-56")
def test_a_rows_own_rollout_id_and_attempt_name_the_episode() -> None:
    read = read_row(orjson.dumps(flat(_ng_rollout_id="mine", _ng_attempt_index=2)), SETTINGS)
    assert read.episode_id.key == "mine-a2"
    assert read_row(orjson.dumps(flat()), SETTINGS, idempotency_key="try-7").episode_id.key == "try-7"
    assert read_row(orjson.dumps(flat("own")), SETTINGS, idempotency_key="try-7").episode_id.key == "own"


@pytest.mark.behaviour("ES-58")
def test_task_input_fields_are_merged_and_may_not_contradict() -> None:
    request = native()
    request["task"]["task_input"]["extra"] = 1
    assert read_row(orjson.dumps(request), SETTINGS).task_data == {"expected_answer": "42", "extra": 1}
    request["task"]["task_input"]["expected_answer"] = "43"
    with pytest.raises(BadRowError) as caught:
        read_row(orjson.dumps(request), SETTINGS)
    assert "expected_answer" in caught.value.message


def test_an_agent_reference_selects_the_environment_that_binds_it() -> None:
    settings = two_environments()
    assert read_row(orjson.dumps(flat(agent_ref={"name": "coder"})), settings).environment == "code"
    with pytest.raises(BadRowError, match="has to name its own"):
        read_row(orjson.dumps(flat()), settings)
    with pytest.raises(BadRowError, match="'nobody' selects no single environment"):
        read_row(orjson.dumps(flat(agent_ref={"name": "nobody"})), settings)
    with pytest.raises(BadRowError, match="binds the agent 'solver', not 'coder'"):
        read_row(orjson.dumps(flat(agent_ref={"name": "coder"}, environment="sums")), settings)


async def test_a_row_that_does_not_fit_the_verifier_is_refused_with_its_own_path() -> None:
    problem = {
        "error": {"message": "no"},
        "detail": [{"loc": ["task_data", "expected_answer"], "msg": "Field required", "type": "missing"}],
        "failure": {"failure_kind": "bad_row", "terminal": True},
    }
    async with house() as home:
        home.parties.fail("seed resources", 422, body=problem)
        reply = await home.run(flat("bad"))
        assert reply.status_code == 422
        assert reply.json()["detail"][0]["loc"] == ["expected_answer"]
        reply = await home.run(native("bad2"))
        assert reply.json()["detail"][0]["loc"] == ["task", "task_input", "task_data", "expected_answer"]
        assert home.parties.order.count("close resources") == 2
        home.parties.hooks.clear()
        again = await home.run(flat("bad", expected_answer="7"))
        assert again.status_code == 200
        assert again.json()["reward"] == 1.0


async def test_a_row_of_thirty_megabytes_runs_and_a_larger_body_than_allowed_is_refused() -> None:
    big = "x" * 30_000_000
    patient = {"sums": {"verifier": "math", "verify_timeout_s": 30.0}}
    async with house(more={"resources": patient}, cleanup_timeout_s=60.0) as home:
        reply = await home.run(native("big", blob=big))
        assert "failure" not in reply.json(), reply.json()["failure"]
        assert reply.json()["result"]["reward"] == 1.0
        assert home.parties.bodies["verify"][0]["blob"] == big
    async with house(more={"serving": {"max_body_mib": 1}}) as home:
        reply = await home.run(native("big", blob=big))
        assert reply.status_code == 413
        assert "1 MiB" in reply.json()["error"]["message"]
        assert home.parties.order == []
