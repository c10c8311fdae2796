"""One episode from the row to its answer: the order of its steps and what each of them is given."""

import asyncio
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

from tests.environment.parties import PARAMS, answer, flat, house, native

ORDER = ["seed resources", "seed agent", "run", "close agent", "verify", "close resources"]


@pytest.mark.behaviour("ES-10", "ES-17", "ES-39", "ES-54")
async def test_the_agent_is_closed_before_anything_is_verified() -> None:
    async with house() as home:
        reply = (await home.run(native())).json()
        assert home.parties.order == ORDER
        assert reply["result"]["reward"] == 1.0
        assert reply["result"]["response"] == answer()
        assert "failure" not in reply
        assert reply["episode_id"] == {"rollout_id": "r1", "attempt": 0}
        assert reply["task_id"] == {"taskset": "sums", "task_id": "t1"}


@pytest.mark.behaviour("ES-15", "ES-18", "ES-8")
async def test_every_step_is_given_the_episodes_names_and_the_row() -> None:
    async with house() as home:
        await home.run(native("r1", 2, hint="secret"))
        bodies, headers = home.parties.bodies, home.parties.headers
        seed = bodies["seed resources"][0]
        assert seed["episode_id"] == {"rollout_id": "r1", "attempt": 2}
        assert seed["task_data"] == {"expected_answer": "42", "hint": "secret"}
        assert bodies["run"][0] == PARAMS
        assert "secret" not in str(bodies["seed agent"]) + str(bodies["run"])
        assert bodies["verify"][0] == {
            "expected_answer": "42", "hint": "secret", "responses_create_params": PARAMS, "response": answer(),
        }  # fmt: skip
        assert {given["x-paddock-key"] for step in ORDER for given in headers[step]} == {"r1-a2"}
        assert headers["verify"][0]["cookie"] == "res=r1"
        assert headers["run"][0]["cookie"] == headers["close agent"][0]["cookie"] == "age=a1"
        assert bodies["close agent"][0]["agent_session_id"] == bodies["seed agent"][0]["agent_session_id"]


@pytest.mark.behaviour("ES-3", "ES-14")
async def test_tools_are_lent_only_over_the_granted_transports() -> None:
    async with house() as home:
        await home.run()
        assert home.parties.bodies["seed agent"][0]["tool_accesses"] == []
    async with house(tools=["direct_http", "mcp"]) as home:
        await home.run()
        http, mcp = home.parties.bodies["seed agent"][0]["tool_accesses"]
        assert http["name"] == "sums_http"
        assert http["required"] is True
        assert http["cookies"] == {"res": "r1"}
        assert http["base_url"].endswith("/sums")
        assert http["tools"] == [{"type": "function", "name": "add"}]
        assert mcp["url"].endswith("/sums/mcp")
        assert mcp["headers"] == {"X-Resources-Session": "r1"}


@pytest.mark.behaviour("ES-16")
async def test_cookies_that_the_activation_sets_are_used_for_the_close() -> None:
    async def reply(_body: Any) -> Response:
        answered = JSONResponse(answer())
        answered.set_cookie("age", "a2")
        return answered

    async with house() as home:
        home.parties.hooks["run"] = reply
        await home.run(native("r1", 1))
        run, close = home.parties.headers["run"][0], home.parties.headers["close agent"][0]
        assert (run["cookie"], close["cookie"]) == ("age=a1", "age=a2")
        assert run["x-paddock-key"] == "r1-a1"


@pytest.mark.behaviour("ES-18")
async def test_cookies_that_the_agent_returns_are_used_for_the_verification() -> None:
    async with house() as home:
        home.parties.receipt = {"resources_cookies": {"res": "r2"}}
        await home.run()
        assert home.parties.headers["verify"][0]["cookie"] == "res=r2"


@pytest.mark.behaviour("ES-59")
async def test_a_flat_row_is_answered_flat() -> None:
    async with house() as home:
        home.parties.verdict = {"reward": 0.5, "extracted_answer": "41", "mask_sample": False}
        reply = (await home.run(flat("f1"))).json()
        assert reply["reward"] == 0.5
        assert reply["extracted_answer"] == "41"
        assert reply["response"] == answer()
        assert reply["agent_ref"]["name"] == "solver"
        assert reply["episode_id"] == {"rollout_id": "f1", "attempt": 0}
        assert not any(name.startswith("_ng_") for name in reply)


@pytest.mark.behaviour("ES-59", "ES-44", "ES-43")
async def test_a_failed_flat_row_carries_the_reserved_fields_and_the_partial_response() -> None:
    async with house() as home:
        home.parties.fail("verify", 500)
        reply = (await home.run(flat("f1"))).json()
        assert "reward" not in reply
        assert reply["_ng_failure_class"] == "environment_server_failed"
        assert reply["_ng_failure_stage"] == "verification"
        assert reply["_ng_failure_terminal"] is False
        assert reply["failure"]["partial_response"] == answer()
        assert reply["failure"]["origin"]["status"] == 500


@pytest.mark.behaviour("ES-52")
async def test_the_captures_usage_takes_the_place_of_the_agents_own_figure() -> None:
    captured = {"input_tokens": 20, "output_tokens": 8, "total_tokens": 28}
    async with house() as home:
        home.parties.response = answer(usage={"input_tokens": 1, "output_tokens": 1, "total_tokens": 2})
        home.parties.receipt = {"agent_observations": {"usage": captured}}
        reply = (await home.run(native("counted"))).json()
        assert reply["result"]["response"]["usage"] == captured
        home.parties.receipt = {"agent_observations": {"usage": None, "gaps": ["partial_model_usage_unavailable"]}}
        reply = (await home.run(native("not-counted"))).json()
        assert reply["result"]["response"]["usage"] is None


@pytest.mark.behaviour("ES-51")
@pytest.mark.parametrize("failing", [None, "verify", "run"])
async def test_the_close_receipts_evidence_is_there_for_results_and_failures_alike(failing: str | None) -> None:
    async with house() as home:
        home.parties.receipt = {"agent_observations": {"tool_calls": [{"name": "add"}]}}
        if failing is not None:
            home.parties.fail(failing, 500)
        reply = (await home.run(native())).json()
        assert ("failure" in reply) == (failing is not None)
        assert reply["evidence"]["agent_observations"] == {"tool_calls": [{"name": "add"}]}
        assert reply["evidence"]["close_receipt"]["cleanup"]["cleanup_confirmed"] is True
        assert reply["evidence"]["timings_s"]["seed"] > 0


async def test_many_episodes_at_once_keep_to_themselves() -> None:
    async with house() as home:
        replies = await asyncio.gather(*(home.run(native(f"many-{n}", number=n)) for n in range(100)))
        assert [reply.json()["episode_id"]["rollout_id"] for reply in replies] == [f"many-{n}" for n in range(100)]
        assert sorted(body["number"] for body in home.parties.bodies["verify"]) == list(range(100))
        sessions = {body["agent_session_id"] for body in home.parties.bodies["seed agent"]}
        assert len(sessions) == 100
