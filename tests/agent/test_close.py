"""Closing: proof, receipt, replay."""

import asyncio
from typing import Any

import pytest

from shared.plugins import PluginFolder
from tests.agent.harnesses.holding import CREATED
from tests.agent.peers import FakeTools, message, reply, response, spec, tool_call
from tests.agent.rig import Caller, Rig, running
from tests.serving import serving

FOLDER = PluginFolder("tests.agent.harnesses", "harness")
HOLDING = {"loop": {"harness": "holding"}}


async def _done(rig: Rig) -> Caller:
    caller = rig.session()
    await caller.seed()
    assert (await caller.activate()).status_code == 200
    return caller


@pytest.mark.behaviour("AG-31", "ES-52", "SB-31")
async def test_the_receipt_tells_model_calls_usage_and_tool_calls_from_the_sealed_capture() -> None:
    tools = FakeTools(answers={"add": lambda arguments: reply(arguments["a"] + arguments["b"])})
    async with serving(tools.app()) as url, running() as rig:
        rig.proxy.turns = [response(tool_call("add", '{"a": 2, "b": 2}')), response(message("4"), tokens=7)]
        lent = {"type": "direct_http", "name": "t", "base_url": url, "tools": [spec("add")]}
        caller = rig.session(tool_accesses=[lent])
        await caller.seed()
        await caller.activate()
        receipt = (await caller.close()).json()
        observed = receipt["agent_observations"]
        assert (receipt["status"], receipt["cleanup"]["cleanup_confirmed"]) == ("closed", True)
        assert [call["call_id"] for call in observed["model_calls"]] == ["model-call-0", "model-call-1"]
        assert (observed["usage"]["input_tokens"], observed["usage"]["output_tokens"]) == (20, 12)
        assert [(call["name"], call["ok"], call["model_call"]) for call in observed["tool_calls"]] == [
            ("add", True, "model-call-0")
        ]
        assert observed["gaps"] == []
        assert receipt["partial_response"] is None
        assert rig.proxy.sealed == [caller.key]


@pytest.mark.behaviour("ES-52")
async def test_usage_is_null_with_a_gap_when_one_call_has_no_counts() -> None:
    async with running() as rig:
        rig.proxy.turns = [response(tool_call("f"), tokens=None), response(message("4"))]
        caller = await _done(rig)
        assert (await caller.activate()).json()["usage"] is None
        observed = (await caller.close()).json()["agent_observations"]
        assert observed["usage"] is None
        assert "partial_model_usage_unavailable" in observed["gaps"]


async def test_a_tool_call_asked_for_by_two_model_calls_is_not_joined() -> None:
    async with running() as rig:
        rig.proxy.turns = [response(tool_call("f")), response(tool_call("f")), response(message("4"))]
        observed = (await (await _done(rig)).close()).json()["agent_observations"]
        assert [call["model_call"] for call in observed["tool_calls"]] == [None, None]
        assert observed["gaps"] == ["model_call_join_key_unavailable"]


@pytest.mark.behaviour("AG-24")
async def test_a_close_of_another_episode_or_with_another_cookie_is_refused() -> None:
    async with running() as rig:
        caller, other = await _done(rig), await _done(rig)
        wrong = {"agent_session_id": caller.session_id, "episode_id": other.seed_body["episode_id"]}
        assert (await caller.post("v1/agent_sessions/close", wrong)).status_code == 409
        own, caller.cookies = caller.cookies, other.cookies
        assert (await caller.close()).status_code == 409
        caller.cookies = own
        assert (await caller.close()).status_code == 200


@pytest.mark.behaviour("AG-25")
async def test_a_close_before_the_seed_fences_the_id_for_the_window() -> None:
    async with running(replicas=2) as rig:
        caller = rig.session()
        receipt = await caller.close()
        assert (receipt.status_code, receipt.json()["status"]) == (200, "unknown")
        assert (await caller.over(1).close()).text == receipt.text
        assert (await caller.over(1).seed()).status_code == 409
        rig.clock.now += 301
        assert (await caller.seed()).status_code == 200


@pytest.mark.behaviour("AG-26")
async def test_a_receipt_is_replayed_within_its_window_which_replays_do_not_extend() -> None:
    async with running(replicas=2) as rig:
        caller = await _done(rig)
        receipt = await caller.close()
        rig.clock.now += 299
        assert (await caller.close()).content == receipt.content
        assert (await caller.over(1).close()).content == receipt.content
        rig.clock.now += 2
        caller.cookies = {}
        assert (await caller.close()).json()["status"] == "unknown"
        assert len(rig.proxy.sealed) == 1


@pytest.mark.behaviour("AG-26")
async def test_the_window_is_counted_from_the_end_of_the_cleanup() -> None:
    async with running() as rig:
        caller = await _done(rig)
        rig.proxy.seal_failures = 1
        assert (await caller.close()).status_code == 502
        rig.clock.now += 400
        receipt = await caller.close()
        rig.clock.now += 299
        assert (await caller.close()).content == receipt.content


@pytest.mark.behaviour("AG-27")
async def test_a_close_after_the_window_with_the_old_cookie_is_refused() -> None:
    async with running() as rig:
        caller = await _done(rig)
        await caller.close()
        rig.clock.now += 301
        assert (await caller.close()).status_code == 409


@pytest.mark.behaviour("AG-28")
async def test_a_failed_seal_fails_the_close_and_the_next_close_goes_on_from_there() -> None:
    async with running() as rig:
        rig.proxy.seal_failures = 2
        caller = await _done(rig)
        for _ in range(2):
            failed = await caller.close()
            assert (failed.status_code, failed.json()["failure"]["failure_kind"]) == (502, "cleanup_unproven")
            assert failed.json()["failure"]["terminal"] is False
            assert failed.json()["failure"]["stage"] == "cleanup"
        assert (await caller.close()).json()["status"] == "closed"
        assert len(rig.proxy.requests) == 1


@pytest.mark.behaviour("AG-28")
async def test_a_release_that_failed_is_tried_again_without_sealing_or_stopping_again() -> None:
    async with running(agents=HOLDING, harnesses=FOLDER) as rig:
        CREATED[-1].failures = {"teardown": 1}
        caller = await _done(rig)
        assert (await caller.close()).status_code == 502
        receipt = await caller.close()
        assert receipt.json()["cleanup"]["cleanup_confirmed"] is True
        assert rig.proxy.sealed == [caller.key]
        assert CREATED[-1].log == ["setup", "run", *[f"teardown {caller.session_id}"] * 2]


@pytest.mark.behaviour("AG-29")
async def test_concurrent_closes_of_one_session_give_one_cleanup() -> None:
    async with running(agents=HOLDING, harnesses=FOLDER) as rig:
        first, second = await _done(rig), await _done(rig)
        receipts = await asyncio.gather(*(first.close() for _ in range(10)), second.close())
        assert [receipt.status_code for receipt in receipts] == [200] * 11
        assert len({receipt.content for receipt in receipts[:10]}) == 1
        assert sorted(rig.proxy.sealed) == sorted([first.key, second.key])
        assert CREATED[-1].log.count(f"teardown {first.session_id}") == 1


@pytest.mark.behaviour("AG-30", "SB-31")
async def test_a_harness_that_does_not_stop_fails_the_close_within_its_bound() -> None:
    agents: dict[str, Any] = {"loop": {"harness": "holding", "close_timeout_s": 0.4}}
    async with running(agents=agents, harnesses=FOLDER) as rig:
        harness = CREATED[-1]
        harness.stubborn = True
        harness.run_gate.clear()
        caller = rig.session()
        await caller.seed()
        waiting = asyncio.create_task(caller.activate())
        await harness.in_run.wait()
        failed = await caller.close()
        assert (failed.status_code, failed.json()["failure"]["failure_kind"]) == (502, "cleanup_unproven")
        assert harness.held == {caller.session_id}
        harness.run_gate.set()
        assert (await waiting).status_code == 409
        assert (await caller.close()).json()["cleanup"]["cleanup_confirmed"] is True


async def test_a_session_that_was_never_activated_is_closed_without_asking_the_proxy() -> None:
    async with running() as rig:
        caller = rig.session()
        await caller.seed()
        receipt = (await caller.close()).json()
        assert (receipt["status"], receipt["agent_observations"]["gaps"]) == ("closed", ["harness_not_run"])
        assert rig.proxy.sealed == []


@pytest.mark.behaviour("AG-33")
async def test_a_session_without_a_deadline_stays_until_it_is_closed() -> None:
    async with running() as rig:
        caller = rig.session()
        await caller.seed()
        rig.clock.now += 80_000
        assert (await caller.activate()).status_code == 200
        assert (await caller.close()).status_code == 200
