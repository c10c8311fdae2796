"""Activating: the harness runs once per session; identical requests join or replay."""

import asyncio
from typing import Any

import pytest

from shared.http.service import Mesh
from shared.plugins import PluginFolder
from tests.agent.harnesses.holding import CREATED
from tests.agent.peers import message, refusal, response
from tests.agent.rig import Caller, Rig, running

FOLDER = PluginFolder("tests.agent.harnesses", "harness")
HOLDING = {"loop": {"harness": "holding"}}


async def _seeded(rig: Rig) -> Caller:
    caller = rig.session()
    assert (await caller.seed()).status_code == 200
    return caller


async def test_an_activation_answers_a_responses_object() -> None:
    async with running() as rig:
        caller = await _seeded(rig)
        answer = await caller.activate({"input": "2+2?", "temperature": 0.5, "metadata": {"row": "7"}})
        body = answer.json()
        assert (body["status"], body["model"], body["error"]) == ("completed", "served", None)
        assert body["output"] == [message("4")]
        assert body["usage"]["total_tokens"] == 15
        assert (body["temperature"], body["metadata"], body["tool_choice"]) == (0.5, {"row": "7"}, "auto")
        assert rig.proxy.requests == [
            {"input": "2+2?", "temperature": 0.5, "metadata": {"row": "7"}, "model": "policy"}
        ]
        assert rig.proxy.claimed_models == {"policy"}


@pytest.mark.behaviour("AG-14")
@pytest.mark.parametrize("missing", ["cookie", "key", "other key", "session"])
async def test_an_activation_needs_its_cookie_its_key_and_a_live_session(missing: str) -> None:
    async with running() as rig:
        caller = await _seeded(rig)
        headers = {}
        if missing == "cookie":
            caller.cookies = {}
        if missing == "session":
            caller.cookies = {}
            headers = {"X-Agent-Session": "nobody"}
        if missing == "key":
            answer = await caller.post("v1/responses", {"input": "x"})
        else:
            headers |= {"X-Paddock-Key": "other"} if missing == "other key" else {}
            answer = await caller.activate(**headers)
        assert answer.status_code == 409
        assert rig.proxy.requests == []


@pytest.mark.behaviour("AG-14")
async def test_the_session_may_come_by_header_and_the_key_by_path() -> None:
    async with running() as rig:
        caller = await _seeded(rig)
        caller.cookies = {}
        path = f"rollouts/{caller.key}/v1/responses"
        answer = await caller.post(path, {"input": "x"}, **{"X-Agent-Session": caller.session_id})
        assert answer.status_code == 200
        contradicting = {"X-Agent-Session": caller.session_id, "X-Paddock-Key": "another"}
        assert (await caller.post(path, {"input": "x"}, **contradicting)).status_code == 409


@pytest.mark.behaviour("AG-15")
@pytest.mark.parametrize(
    ("body", "loc"),
    [
        ({}, ["input"]),
        ({"input": "x", "temperature": 9}, ["temperature"]),
        ({"input": "x", "surprise": 1}, ["surprise"]),
        ({"input": "x", "background": True}, ["background"]),
        ([], []),
    ],
)
async def test_an_invalid_request_is_refused_and_a_valid_one_still_taken(body: Any, loc: list[str]) -> None:
    async with running() as rig:
        caller = await _seeded(rig)
        refused = await caller.activate(body)
        assert (refused.status_code, refused.json()["detail"][0]["loc"]) == (422, loc)
        assert (await caller.activate()).status_code == 200


async def test_a_body_that_is_not_json_is_refused() -> None:
    async with running() as rig:
        caller = await _seeded(rig)
        cookie = "; ".join(f"{name}={value}" for name, value in caller.cookies.items())
        answer = await rig.http.post(
            f"{caller.url}/loop/v1/responses", content=b"{", headers={"cookie": cookie, "X-Paddock-Key": caller.key}
        )
        assert answer.status_code == 422


@pytest.mark.behaviour("AG-16", "AG-17", "AG-20")
async def test_twenty_identical_requests_share_one_run_and_later_ones_replay_it() -> None:
    async with running() as rig:
        caller = await _seeded(rig)
        rig.proxy.gate.clear()
        waiting = [asyncio.create_task(caller.activate()) for _ in range(20)]
        await rig.proxy.asked.wait()
        rig.proxy.gate.set()
        answers = [answer.text for answer in await asyncio.gather(*waiting)]
        replayed = await caller.activate()
        reordered = await caller.post("v1/responses", {"input": "2+2?"}, **{"X-Paddock-Key": caller.key})
        assert set(answers) == {replayed.text} == {reordered.text}
        assert len(rig.proxy.requests) == 1


@pytest.mark.behaviour("AG-17")
async def test_an_error_is_replayed_as_it_was() -> None:
    async with running(agents=HOLDING, harnesses=FOLDER) as rig:
        CREATED[-1].failures = {"run": 1}
        caller = await _seeded(rig)
        first = await caller.activate()
        again = await caller.activate()
        assert (first.status_code, first.json()["failure"]["failure_kind"]) == (503, "provider_unavailable")
        assert first.json()["failure"]["stage"] == "agent"
        assert (again.status_code, again.text) == (first.status_code, first.text)
        assert CREATED[-1].log.count("run") == 1


@pytest.mark.behaviour("AG-18")
async def test_a_changed_request_is_refused_during_the_run_and_after_it() -> None:
    async with running(replicas=2) as rig:
        caller = await _seeded(rig)
        rig.proxy.gate.clear()
        first = asyncio.create_task(caller.activate())
        await rig.proxy.asked.wait()
        assert (await caller.activate({"input": "3+3?"})).status_code == 409
        assert (await caller.over(1).activate({"input": "3+3?"})).status_code == 409
        rig.proxy.gate.set()
        assert (await first).status_code == 200
        assert (await caller.activate({"input": "3+3?"})).status_code == 409


@pytest.mark.behaviour("AG-19", "AG-35")
async def test_a_waiter_that_disconnects_neither_ends_the_run_nor_other_waits() -> None:
    async with running() as rig:
        caller = await _seeded(rig)
        rig.proxy.gate.clear()
        leaving = asyncio.create_task(caller.activate())
        await rig.proxy.asked.wait()
        staying = asyncio.create_task(caller.activate())
        leaving.cancel()
        await asyncio.wait((leaving,))
        rig.proxy.gate.set()
        assert (await staying).json()["output"] == [message("4")]
        assert len(rig.proxy.requests) == 1


async def test_a_bounded_wait_answers_202_and_the_same_request_gets_the_result_later() -> None:
    async with running() as rig:
        caller = await _seeded(rig)
        rig.proxy.gate.clear()
        early = await caller.activate(Prefer="respond-async, wait=0")
        assert (early.status_code, early.headers["preference-applied"]) == (202, "wait=0")
        waiting = asyncio.create_task(caller.activate(Prefer="wait=10"))
        rig.proxy.gate.set()
        late = await waiting
        assert (late.status_code, late.headers["preference-applied"]) == (200, "wait=10")
        assert len(rig.proxy.requests) == 1


@pytest.mark.behaviour("AG-21")
async def test_a_closed_session_takes_no_activation() -> None:
    async with running() as rig:
        caller = await _seeded(rig)
        await caller.close()
        assert (await caller.activate()).status_code == 409
        rig.clock.now += 301
        assert (await caller.activate()).status_code == 409
        assert rig.proxy.requests == []


@pytest.mark.behaviour("AG-22", "AG-32")
async def test_a_close_during_the_run_gives_its_callers_a_conflict_and_itself_the_partial_response() -> None:
    async with running() as rig:
        rig.proxy.turns = [response({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"})]
        caller = await _seeded(rig)
        held = asyncio.Event()

        def second_turn(_request: dict[str, Any]) -> Any:
            rig.proxy.gate.clear()
            held.set()
            return response({"type": "function_call", "call_id": "d", "name": "f", "arguments": "{}"})(_request)

        rig.proxy.turns.append(second_turn)
        waiting = asyncio.create_task(caller.activate())
        await held.wait()
        receipt = (await caller.close()).json()
        interrupted = await waiting
        assert (interrupted.status_code, interrupted.json()["failure"]["failure_kind"]) == (409, "conflict")
        partial = receipt["partial_response"]
        assert (partial["status"], partial["incomplete_details"]) == ("incomplete", {"reason": "interrupted"})
        assert partial["output"][0]["call_id"] == "c"
        assert receipt["cleanup"] == {
            "cleanup_confirmed": True,
            "return_code": None,
            "error": None,
            "timed_out": False,
        }
        assert "agent_activation_interrupted" in receipt["agent_observations"]["gaps"]


async def test_a_run_ends_at_the_sessions_deadline() -> None:
    async with running() as rig:
        rig.proxy.gate.clear()
        caller = rig.session(deadline=0.2)
        await caller.seed()
        answer = await caller.activate()
        assert (answer.status_code, answer.json()["failure"]["failure_kind"]) == (504, "deadline")
        rig.proxy.gate.set()
        assert (await caller.close()).json()["cleanup"]["timed_out"] is True


async def test_runs_beyond_the_agents_concurrency_wait_for_a_place() -> None:
    async with running(agents={"loop": {"harness": "tool_loop", "concurrency": 1}}) as rig:
        rig.proxy.gate.clear()
        first, second = await _seeded(rig), await _seeded(rig)
        one = asyncio.create_task(first.activate())
        await rig.proxy.asked.wait()
        two = await second.activate(Prefer="wait=0")
        assert two.status_code == 202
        assert len(rig.proxy.requests) == 1
        rig.proxy.gate.set()
        assert (await one).status_code == 200
        assert (await second.activate()).status_code == 200


async def test_an_unexpected_error_of_a_harness_is_told_by_type_and_not_retried() -> None:
    async with running() as rig:
        rig.proxy.turns = [response({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"})]
        rig.proxy.turns += [lambda _request: refusal(200, None)(_request)]
        caller = await _seeded(rig)
        answer = await caller.activate()
        assert (answer.status_code, answer.json()["failure"]["terminal"]) == (502, True)
        assert answer.json()["failure"]["failure_kind"] == "protocol_violation"


async def test_open_waits_are_answered_when_the_server_leaves() -> None:
    async with running(serving={"drain_lead_s": 0.05}) as rig:
        caller = await _seeded(rig)
        rig.proxy.gate.clear()
        preferring = asyncio.create_task(caller.activate(Prefer="wait=60"))
        plain = asyncio.create_task(caller.activate())
        await rig.proxy.asked.wait()
        mesh: Mesh = rig.apps[0].state.mesh
        mesh.draining.set()
        assert (await preferring).status_code == 202
        assert (await plain).status_code == 503
