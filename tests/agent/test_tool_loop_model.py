"""What the model's errors and unfinished answers make of a run of the tool loop."""

import httpx
import pytest

from tests.agent.peers import Turn, message, refusal, reply, response, tool_call
from tests.agent.rig import Rig, running
from tests.serving import free_port


async def _activated(rig: Rig, turns: list[Turn]) -> httpx.Response:
    rig.proxy.turns = turns
    caller = rig.session()
    assert (await caller.seed()).status_code == 200
    return await caller.activate()


@pytest.mark.behaviour("ES-45", "ES-50")
@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_value", "model_bad_request"),
        (401, "invalid_api_key", "model_auth"),
        (429, "rate_limit_exceeded", "model_rate_limited"),
        (429, "insufficient_quota", "model_quota"),
        (503, None, "model_overloaded"),
        (500, None, "model_error"),
    ],
)
async def test_an_upstreams_error_is_a_failed_response_with_its_cause(status: int, code: str | None, kind: str) -> None:
    async with running() as rig:
        answer = await _activated(rig, [refusal(status, code, "no luck")])
        body = answer.json()
        assert (answer.status_code, body["status"]) == (200, "failed")
        assert body["failure_cause"]["failure_kind"] == kind
        assert body["failure_cause"]["origin"]["status"] == status
        assert "no luck" in body["failure_cause"]["origin"]["body_excerpt"]
        assert "no luck" in body["error"]["message"]
        assert [item["role"] for item in body["output"]] == ["assistant"]


async def test_a_full_context_window_is_known_by_its_code_alone() -> None:
    async with running() as rig:
        by_code = await _activated(rig, [refusal(400, "context_length_exceeded", "too long")])
        by_text = await _activated(rig, [refusal(400, None, "max_tokens is larger than the context length")])
        assert by_code.json()["incomplete_details"] == {"reason": "context_window"}
        assert by_text.json()["failure_cause"]["failure_kind"] == "model_bad_request"


@pytest.mark.parametrize("reason", ["max_output_tokens", "content_filter"])
async def test_an_incomplete_answer_ends_the_run_without_running_its_calls(reason: str) -> None:
    async with running() as rig:
        cut = response(tool_call("f", '{"a'), status="incomplete", incomplete_details={"reason": reason})
        answer = (await _activated(rig, [cut])).json()
        assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": reason})
        assert [item["type"] for item in answer["output"]] == ["function_call"]


async def test_a_failed_answer_is_a_failed_response() -> None:
    async with running() as rig:
        failed = response(status="failed", error={"code": "rate_limit_exceeded", "message": "slow down"})
        answer = (await _activated(rig, [failed])).json()
        assert (answer["status"], answer["failure_cause"]["failure_kind"]) == ("failed", "model_rate_limited")


async def test_the_proxys_own_error_is_an_error_of_the_run() -> None:
    body = {
        "error": {"message": "sealed", "code": "conflict"},
        "failure": {"failure_kind": "conflict", "terminal": True},
    }
    async with running() as rig:
        answer = await _activated(rig, [lambda _request: reply(body, 409)])
        assert (answer.status_code, answer.json()["failure"]["failure_kind"]) == (409, "conflict")


async def test_a_proxy_that_cannot_be_reached_is_an_error_to_retry() -> None:
    gone = {"model_proxy": {"url": f"http://127.0.0.1:{free_port()}"}}
    async with running(peers=gone) as rig:
        answer = await _activated(rig, [response(message("never"))])
        assert answer.json()["failure"]["failure_kind"] == "transport_unreachable"
        assert answer.json()["failure"]["terminal"] is False
