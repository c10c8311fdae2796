"""Whatever fails, an episode ends in an answer that names the cause, and never in a made-up verdict."""

import asyncio
import time
from typing import Any

import pytest

from shared.errors import ConfigurationError
from tests.environment.parties import House, answer, failed, flat, house, native
from tests.environment.test_joining import SOON_S, until

STAGES = {
    "seed resources": "seed",
    "seed agent": "seed",
    "run": "agent",
    "close agent": "cleanup",
    "verify": "verification",
}


@pytest.mark.behaviour("ES-40", "ES-43", "ES-50")
@pytest.mark.parametrize("step", ["seed resources", "seed agent", "run", "verify"])
@pytest.mark.parametrize(
    ("status", "terminal"),
    [(400, True), (404, True), (408, False), (425, False), (429, False), (500, False), (503, False)],
)
async def test_a_peers_error_is_a_failure_with_its_status_and_stage(step: str, status: int, terminal: bool) -> None:
    async with house() as home:
        home.parties.fail(step, status)
        reply = await home.run(native())
        assert reply.status_code == 200
        failure = reply.json()["failure"]
        assert failure["stage"] == STAGES[step]
        assert failure["terminal"] is terminal
        assert failure["origin"]["status"] == status
        assert f"{step} refused" in failure["failure_reason"]
        assert "result" not in reply.json()
        assert home.parties.order[-1] == "close resources"


@pytest.mark.behaviour("ES-11", "ES-21")
async def test_a_seed_whose_reply_is_lost_is_closed_all_the_same() -> None:
    async with house() as home:
        home.parties.fail("seed agent", 500)
        await home.run(native())
        assert home.parties.order == ["seed resources", "seed agent", "close agent", "close resources"]
        seeded, closed = home.parties.bodies["seed agent"][0], home.parties.bodies["close agent"][0]
        assert seeded["agent_session_id"] == closed["agent_session_id"]


@pytest.mark.behaviour("ES-12")
@pytest.mark.parametrize("fault", ["no cookie", "other id"])
async def test_a_seed_reply_that_breaks_the_contract_is_a_terminal_failure(fault: str) -> None:
    from starlette.responses import JSONResponse, Response

    async def reply(body: Any) -> Response:
        session = body["resources_session_id"] if fault == "no cookie" else "somebody-else"
        answered = JSONResponse({"resources_session_id": session})
        if fault == "other id":
            answered.set_cookie("res", "r1")
        return answered

    async with house() as home:
        home.parties.hooks["seed resources"] = reply
        failure = (await home.run(native())).json()["failure"]
        assert failure["stage"] == "seed"
        assert failure["terminal"] is True
        assert failure["failure_kind"] == "protocol_violation"
        assert home.parties.order == ["seed resources", "close resources"]


@pytest.mark.behaviour("ES-13")
async def test_granted_mcp_tools_that_are_not_lent_fail_at_the_seed() -> None:
    from starlette.responses import JSONResponse, Response

    async def reply(body: Any) -> Response:
        answered = JSONResponse({"resources_session_id": body["resources_session_id"]})
        answered.set_cookie("res", "r1")
        return answered

    async with house(tools=["mcp"]) as home:
        home.parties.hooks["seed resources"] = reply
        failure = (await home.run(native())).json()["failure"]
        assert (failure["stage"], failure["terminal"]) == ("seed", True)
        assert "seed agent" not in home.parties.order


@pytest.mark.behaviour("ES-17", "ES-25", "ES-44")
async def test_an_agent_that_cannot_be_closed_is_never_verified() -> None:
    async with house(cleanup_timeout_s=1.0) as home:
        home.parties.fail("close agent", 500)
        reply = (await home.run(native())).json()
        assert reply["failure"]["stage"] == "cleanup"
        assert reply["failure"]["failure_kind"] == "cleanup_unproven"
        assert reply["failure"]["partial_response"] == answer()
        assert reply["failure"]["cleanup_error"]["what"] == "close the agent session"
        assert [error["what"] for error in reply["evidence"]["cleanup_errors"]] == ["close the agent session"]
        assert "verify" not in home.parties.order
        assert home.parties.order.count("close agent") > 2
        assert home.parties.order[-1] == "close resources"


@pytest.mark.behaviour("ES-17", "ES-21")
async def test_a_close_that_fails_once_is_tried_again_and_the_verdict_stands() -> None:
    async with house() as home:
        home.parties.fail("close agent", 503, times=1)
        reply = (await home.run(native())).json()
        assert reply["result"]["reward"] == 1.0
        assert home.parties.order.count("close agent") == 2
        assert "cleanup_errors" not in reply["evidence"]


@pytest.mark.parametrize(
    "receipt",
    [
        {"cleanup": {"cleanup_confirmed": False, "error": "two processes are left"}},
        {"status": "unknown"},
    ],
)
async def test_a_receipt_that_proves_nothing_is_no_proof(receipt: dict[str, Any]) -> None:
    async with house() as home:
        home.parties.receipt = receipt
        failure = (await home.run(native())).json()["failure"]
        assert failure["terminal"] is False
        assert failure["failure_kind"] in {"cleanup_unproven", "session_lost"}
        assert "verify" not in home.parties.order


@pytest.mark.behaviour("ES-19", "ES-22", "ES-53")
async def test_a_failed_resources_close_never_costs_a_verdict() -> None:
    async with house() as home:
        home.parties.fail("close resources", 500)
        reply = (await home.run(native())).json()
        assert reply["result"]["reward"] == 1.0
        assert home.parties.order.count("close resources") == 2
        assert reply["evidence"]["cleanup_errors"][0]["what"] == "close the resources session"


@pytest.mark.behaviour("ES-19", "ES-33")
async def test_a_slow_resources_close_past_the_deadline_keeps_the_verdict() -> None:
    async with house(episode_timeout_s=1.5) as home:
        home.parties.hold("close resources")
        started = time.monotonic()
        reply = (await home.run(native())).json()
        assert reply["result"]["reward"] == 1.0
        assert time.monotonic() - started < SOON_S
        assert reply["evidence"]["cleanup_errors"][0]["type"] in {"TimeoutError", "TransportError"}


@pytest.mark.behaviour("ES-26", "ES-27")
@pytest.mark.parametrize("step", ["seed resources", "seed agent", "close agent"])
async def test_the_deadline_at_each_stage_is_a_retryable_failure_of_that_stage(step: str) -> None:
    async with house(episode_timeout_s=1.3) as home:
        gate = home.parties.hold(step)
        waiting = asyncio.create_task(home.run(native()))
        await until(home.parties.event(step))
        await asyncio.sleep(1.4)
        gate.set()
        failure = (await waiting).json()["failure"]
        assert failure["failure_kind"] in {"deadline", "transport_timeout"}
        assert failure["terminal"] is False
        assert failure["stage"] == STAGES[step]
        assert "verify" not in home.parties.order
        assert home.parties.order[-1] == "close resources"


@pytest.mark.behaviour("ES-27")
async def test_a_verification_beyond_its_time_is_a_failure_and_no_grade() -> None:
    async with house() as home:
        home.parties.hold("verify")
        failure = (await home.run(native())).json()["failure"]
        assert (failure["stage"], failure["terminal"]) == ("verification", False)
        assert failure["partial_response"] == answer()


@pytest.mark.behaviour("ES-29")
@pytest.mark.parametrize("partial", [True, False])
async def test_the_wall_limit_ends_the_run_and_what_is_there_is_graded(partial: bool) -> None:
    async with house() as home:
        home.parties.hold("run")
        kept = answer("half", status="incomplete")
        if partial:
            home.parties.receipt = {"partial_response": kept}
        reply = (await home.run(flat("wall", agent_timeout_s=0.3))).json()
        assert reply["reward"] == 1.0
        assert reply["agent_timed_out"] == {"limit_s": 0.3, "set_by": "task"}
        assert home.parties.order == ["seed resources", "seed agent", "run", "close agent", "verify", "close resources"]
        graded = home.parties.bodies["verify"][0]["response"]
        if partial:
            assert graded == kept
        else:
            assert graded["status"] == "incomplete"
            assert graded["metadata"] == {"origin": "environment_after_wall_limit"}


@pytest.mark.parametrize(
    ("kept", "ends"),
    [
        (answer("42"), "graded"),
        (failed("model_error", 500), "retryable"),
    ],
)
async def test_a_run_that_ended_by_itself_before_its_limit_counts_as_it_ended(kept: dict[str, Any], ends: str) -> None:
    async with house() as home:
        home.parties.hold("run")
        home.parties.receipt = {"partial_response": kept}
        reply = (await home.run(flat("late", agent_timeout_s=0.3))).json()
        assert home.parties.bodies["close agent"][0]["include_response"] is True
        if ends == "graded":
            assert reply["response"] == kept
            assert "agent_timed_out" not in reply
        else:
            assert (reply["failure"]["failure_kind"], reply["failure"]["terminal"]) == ("model_error", False)
            assert "verify" not in home.parties.order


async def test_a_run_that_failed_by_itself_before_its_limit_is_never_graded() -> None:
    async with house() as home:
        home.parties.hold("run")
        home.parties.receipt = {"cleanup": {"cleanup_confirmed": True, "error": "the tool server vanished"}}
        failure = (await home.run(flat("broken", agent_timeout_s=0.3))).json()["failure"]
        assert (failure["failure_kind"], failure["terminal"]) == ("agent_run_error", False)
        assert "verify" not in home.parties.order


@pytest.mark.behaviour("ES-32")
async def test_an_agent_without_time_left_is_not_started() -> None:
    async with house(episode_timeout_s=1.2) as home:
        gate = home.parties.hold("seed agent")
        waiting = asyncio.create_task(home.run(native()))
        await until(home.parties.event("seed agent"))
        await asyncio.sleep(0.4)
        gate.set()
        failure = (await waiting).json()["failure"]
        assert (failure["stage"], failure["terminal"]) == ("agent", False)
        assert "run" not in home.parties.order


@pytest.mark.behaviour("ES-28", "ES-30")
async def test_a_connection_that_drops_is_an_infrastructure_failure() -> None:
    async with house() as home:

        async def vanish(_body: Any) -> None:
            raise ConnectionAbortedError

        home.parties.hooks["run"] = vanish
        failure = (await home.run(native())).json()["failure"]
        assert failure["terminal"] is False
        assert failure["stage"] == "agent"


@pytest.mark.behaviour("ES-40")
async def test_a_payload_that_breaks_the_contract_is_told_with_its_type() -> None:
    async with house() as home:
        home.parties.verdict = {"reward": float("inf"), "mask_sample": "perhaps"}

        async def nonsense(_body: Any) -> Any:
            from starlette.responses import Response

            return Response(b'{"reward": "much"}', media_type="application/json")

        home.parties.hooks["verify"] = nonsense
        failure = (await home.run(native())).json()["failure"]
        assert failure["stage"] == "verification"
        assert "ValidationError" in failure["failure_reason"]


@pytest.mark.behaviour("ES-45", "ES-46", "ES-47", "ES-48", "ES-49")
@pytest.mark.parametrize(
    ("response", "policy", "action", "selected_by", "end"),
    [
        (answer(status="failed"), {}, "verify", "response:failed", "graded"),
        (answer(status="incomplete"), {}, "verify", "response:incomplete", "graded"),
        (failed("model_error", 500), {}, "retry", "status:500", "retryable"),
        (failed("model_rate_limited", 429), {}, "retry", "status:429", "retryable"),
        (failed("model_bad_request", 400), {}, "fail", "status:400", "terminal"),
        (failed("model_auth", 401), {}, "fail", "status:401", "terminal"),
        (failed("model_overloaded"), {}, "retry", "kind:model_overloaded", "retryable"),
        (failed("agent_run_error"), {}, "retry", "default", "retryable"),
        (failed("model_error", 500), {"status": {500: "mask"}}, "mask", "status:500", "masked"),
        (failed("model_error", 502), {"status": {500: "mask"}}, "retry", "status:502", "retryable"),
        (failed("model_error"), {"kind": {"model_error": "zero"}}, "zero", "kind:model_error", "zero"),
        (answer(status="incomplete"), {"response": {"incomplete": "fail"}}, "fail", "response:incomplete", "terminal"),
    ],
)
async def test_the_outcome_policy_decides_by_status_then_kind_then_response(
    response: dict[str, Any], policy: dict[str, Any], action: str, selected_by: str, end: str
) -> None:
    async with house(outcome_policy=policy) as home:
        home.parties.response = response
        home.parties.verdict = {"reward": 0.25}
        reply = (await home.run(native())).json()
        assert reply["evidence"]["outcome"]["action"] == action
        assert reply["evidence"]["outcome"]["selected_by"] == selected_by
        assert ("verify" in home.parties.order) == (end == "graded")
        if end in {"retryable", "terminal"}:
            assert reply["failure"]["terminal"] is (end == "terminal")
            assert reply["failure"]["partial_response"] == response
        else:
            expected = {"graded": (0.25, False), "masked": (0.0, True), "zero": (0.0, False)}[end]
            assert (reply["result"]["reward"], reply["result"]["mask_sample"]) == expected


@pytest.mark.behaviour("ES-35", "ES-36", "ES-38")
async def test_a_full_house_lets_episodes_wait_and_then_refuses_them() -> None:
    async with house(max_concurrent=1, queue_timeout_s=0.4, queue_size=1) as home:
        gate = home.parties.hold("close resources")
        first = asyncio.create_task(home.run(native("first")))
        await until(home.parties.event("close resources"))
        second = asyncio.create_task(home.run(native("second")))
        await asyncio.sleep(0.1)
        third = await home.run(native("third"))
        assert third.status_code == 429
        assert int(third.headers["retry-after"]) >= 1
        refused = await second
        assert refused.status_code == 429
        assert refused.json()["failure"]["terminal"] is False
        assert home.parties.order.count("seed resources") == 1
        gate.set()
        assert (await first).json()["result"]["reward"] == 1.0
        assert (await home.run(native("second"))).json()["result"]["reward"] == 1.0


@pytest.mark.behaviour("ES-35")
async def test_an_episode_that_was_promised_ends_as_a_failure_at_admission() -> None:
    async with house(max_concurrent=1, queue_timeout_s=0.5) as home:
        gate = home.parties.hold("run")
        first = asyncio.create_task(home.run(native("first")))
        await until(home.parties.event("run"))
        assert (await home.run(native("second"), Prefer="respond-async")).status_code == 202
        reply = await home.http.get("/episodes/second", headers={"Prefer": "wait=10"})
        assert reply.status_code == 200
        assert reply.json()["failure"]["stage"] == "admission"
        assert reply.json()["failure"]["terminal"] is False
        gate.set()
        await first


@pytest.mark.behaviour("ES-38")
async def test_a_queued_episode_that_is_cancelled_takes_no_place() -> None:
    async with house(max_concurrent=1, queue_timeout_s=20) as home:
        gate = home.parties.hold("run")
        first = asyncio.create_task(home.run(native("first")))
        await until(home.parties.event("run"))
        second = asyncio.create_task(home.run(native("second")))
        third = asyncio.create_task(home.run(native("third")))
        await queued(home, "second")
        await home.http.delete("/episodes/second")
        assert (await second).json()["failure"]["failure_kind"] == "cancelled"
        gate.set()
        assert (await first).json()["result"]["reward"] == 1.0
        assert (await third).json()["result"]["reward"] == 1.0


async def queued(home: House, key: str) -> None:
    """Return when the episode stands in the queue."""
    async with asyncio.timeout(SOON_S):
        while True:
            reply = await home.http.get(f"/episodes/{key}")
            if reply.status_code != 404:
                break
            await asyncio.sleep(0.01)
    assert reply.json()["state"] == "queued"


@pytest.mark.behaviour("ES-1", "ES-2", "ES-4")
@pytest.mark.parametrize(
    ("environment", "key"),
    [
        ({"max_concurrent": 2}, "queue_timeout_s"),
        ({"episode_timeout_s": 0}, "episode_timeout_s"),
        ({"episode_timeout_s": float("nan")}, "episode_timeout_s"),
        ({"cleanup_timeout_s": float("inf")}, "cleanup_timeout_s"),
        ({"cleanup_timeout_s": -1}, "cleanup_timeout_s"),
        ({"unknown": 1}, "unknown"),
        ({"tools": ["telepathy"]}, "tools"),
    ],
)
def test_limits_that_cannot_hold_are_configuration_errors(environment: dict[str, Any], key: str) -> None:
    from pydantic import ValidationError

    from tests.environment.parties import settings_for

    with pytest.raises((ValidationError, ConfigurationError), match=key):
        settings_for("http://127.0.0.1:1", environment, {})


async def test_peers_that_are_not_there_give_a_retryable_failure_soon() -> None:
    async with house(
        more={"services": {"agent": {"url": "http://127.0.0.1:9"}, "resources": {"url": "http://127.0.0.1:9"}}}
    ) as home:
        started = time.monotonic()
        failure = (await home.run(native())).json()["failure"]
        assert failure["failure_kind"] == "transport_unreachable"
        assert failure["terminal"] is False
        assert time.monotonic() - started < SOON_S
