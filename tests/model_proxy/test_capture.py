"""The capture: every call, in order, under its key; sealed when the episode is over."""

import asyncio
import time
from typing import Any

import orjson
import pytest

from services.model_proxy.capture import CALL_BODIES_MAX_BYTES, CAPTURE_BODIES_MAX_BYTES, Captures
from shared.clients.model_proxy import ModelProxyClient
from shared.contracts.capture import Capture, ModelCall, summed_usage
from shared.http.client import HttpClient
from shared.store.memory import MemoryStore
from tests.model_proxy.raw_caller import raw_call
from tests.model_proxy.sessions import as_session
from tests.model_proxy.wire import (
    COMPLETION,
    END,
    KEY,
    RESPONSE,
    SCRIPTED,
    SSE_HEAD,
    WAIT_S,
    Asked,
    always,
    delta,
    event,
    json_body,
    piece,
    proxied,
    proxy_of,
    settings_of,
)


@pytest.mark.behaviour("MS-18")
async def test_calls_are_kept_in_order_with_what_was_asked_and_answered() -> None:
    before = time.time()
    async with proxied(always(json_body(COMPLETION)), defaults={"temperature": 0.5}) as (proxy, _):
        first = await proxy.call("responses", input="one", max_output_tokens=9, store=False)
        second = await proxy.call("chat_completions")
        capture = await proxy.capture()
        other = await proxy.capture("another")
    one, two = capture.calls
    assert (capture.sealed, capture.damaged, other.calls) == (False, 0, ())
    assert one.request == {"model": "policy", "stream": False, "input": "one", "max_output_tokens": 9, "store": False}
    assert one.response == first.json()
    assert one.effective == {"temperature": 0.5, "max_tokens": 9}
    assert one.dropped_fields == ("store",)
    assert (one.response_id, one.output_ids) == (first.json()["id"], (first.json()["output"][0]["id"],))
    assert one.first_byte_at is not None
    assert one.ended_at is not None
    assert before <= one.started_at <= one.first_byte_at <= one.ended_at <= two.started_at
    assert (two.dialect, two.response, two.response_id) == ("chat_completions", second.json(), "chatcmpl-9")
    usage = summed_usage(capture, "verify")
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (14, 4, 18)


async def test_tool_calls_can_be_joined_by_their_ids() -> None:
    call = {"id": "call_A", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    choice = {"index": 0, "message": {"role": "assistant", "tool_calls": [call]}, "finish_reason": "tool_calls"}
    async with proxied(always(json_body({**COMPLETION, "choices": [choice]}))) as (proxy, _):
        answer = await proxy.call("responses", tools=[{"type": "function", "name": "f"}])
        await proxy.call("chat_completions")
        calls = (await proxy.capture()).calls
    assert [one.call_ids for one in calls] == [("call_A",), ("call_A",)]
    assert calls[0].output_ids == (answer.json()["output"][0]["id"],)


@pytest.mark.behaviour("MS-17")
async def test_token_ids_reach_the_caller_and_the_capture() -> None:
    choice = {**COMPLETION["choices"][0], "token_ids": [5, 6], "logprobs": {"content": [_logprob(), _logprob()]}}
    body = {**COMPLETION, "prompt_token_ids": [1, 2, 3], "choices": [choice]}
    async with proxied(always(json_body(body))) as (proxy, _):
        item = (await proxy.call("responses")).json()["output"][-1]
        await proxy.call("chat_completions")
        calls = (await proxy.capture()).calls
    assert (item["prompt_token_ids"], item["generation_token_ids"]) == ([1, 2, 3], [5, 6])
    assert calls[0].response is not None
    assert calls[0].response["output"][-1] == item
    assert calls[1].response == body


@pytest.mark.behaviour("MS-17")
async def test_token_ids_that_do_not_fit_are_an_error() -> None:
    choice = {**COMPLETION["choices"][0], "token_ids": [5, 6], "logprobs": {"content": [_logprob()]}}
    body = {**COMPLETION, "prompt_token_ids": [1], "choices": [choice]}
    async with proxied(always(json_body(body))) as (proxy, _):
        answer = await proxy.call("responses")
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "token_mismatch")


def _logprob() -> dict[str, Any]:
    return {"token": "x", "logprob": -0.5, "bytes": None, "top_logprobs": []}


async def test_a_usage_that_the_upstream_does_not_tell_stays_unknown() -> None:
    body = {name: value for name, value in COMPLETION.items() if name != "usage"}
    async with proxied(always(json_body(body))) as (proxy, _):
        await proxy.call("responses")
        capture = await proxy.capture()
    assert capture.calls[0].usage is None
    assert summed_usage(capture, "verify") is None


@pytest.mark.behaviour("MS-19")
async def test_an_answer_that_ran_into_its_limit_is_incomplete() -> None:
    choice = {**COMPLETION["choices"][0], "finish_reason": "length"}
    async with proxied(always(json_body({**COMPLETION, "choices": [choice]}))) as (proxy, _):
        await proxy.call("responses")
        await proxy.call("chat_completions")
        calls = (await proxy.capture()).calls
    assert {(call.response_status, call.error_category) for call in calls} == {("incomplete", "incomplete")}


async def test_a_passed_stream_is_kept_as_the_whole_that_it_amounts_to() -> None:
    fragments = [
        {"index": 0, "id": "call_A", "type": "function", "function": {"name": "f", "arguments": '{"a"'}},
        {"index": 0, "function": {"arguments": ":1}"}},
    ]
    parts = [
        event(delta({"role": "assistant", "reasoning": "hm"})),
        event(delta({"content": "a"})),
        event(delta({"content": "b"})),
        *(event(delta({"tool_calls": [fragment]})) for fragment in fragments),
        event(delta({}, "tool_calls")),
        event({**delta({}), "choices": [], "usage": COMPLETION["usage"]}),
        piece(b"data: [DONE]\n\n"),
        END,
    ]
    async with proxied(always(SSE_HEAD, *parts)) as (proxy, _):
        await proxy.call("chat_completions", stream=True)
        call = await proxy.last_call()
    assert call.response is not None
    assert call.response["choices"][0] == {
        "index": 0,
        "finish_reason": "tool_calls",
        "message": {
            "role": "assistant",
            "content": "ab",
            "reasoning": "hm",
            "tool_calls": [{"id": "call_A", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}],
        },
    }
    assert (call.call_ids, call.usage is not None) == (("call_A",), True)


async def test_a_passed_responses_stream_is_kept_even_when_its_end_tells_no_output() -> None:
    item = RESPONSE["output"][0]
    parts = [
        event({"type": "response.created", "sequence_number": 0, "response": {**RESPONSE, "output": []}}),
        event({"type": "response.output_item.done", "sequence_number": 1, "output_index": 0, "item": item}),
        event({"type": "response.completed", "sequence_number": 2, "response": {**RESPONSE, "output": []}}),
    ]
    async with proxied(always(SSE_HEAD, *parts, END), "responses") as (proxy, _):
        await proxy.call("responses", stream=True)
        call = await proxy.last_call()
    assert call.response is not None
    assert (call.response["output"], call.output_ids) == ([item], ("msg_9",))


async def test_the_client_seals_and_reads() -> None:
    http = HttpClient()
    try:
        async with proxied(always(json_body(COMPLETION))) as (proxy, _):
            client = ModelProxyClient(http, proxy.url)
            assert await client.seal("never-used", timeout_s=WAIT_S) == Capture(key="never-used", sealed=True)
            await proxy.call("responses")
            read = await client.read("episode-1", timeout_s=WAIT_S)
            sealed = await client.seal("episode-1", timeout_s=WAIT_S)
    finally:
        await http.close()
    assert (read.sealed, sealed.sealed) == (False, True)
    assert read.calls[0].request is not None
    # A seal tells the facts; bodies are read on their own.
    without_bodies = [call.model_copy(update={"request": None, "response": None}) for call in read.calls]
    assert without_bodies == list(sealed.calls)
    assert len(sealed.calls) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_sealing_ends_the_episodes_calls_and_waits_for_their_records(stream: bool) -> None:
    async def handler(asked: Asked) -> None:
        if stream:
            await asked.write(SSE_HEAD + event(delta({"content": "half"})))
        await asked.gone.wait()

    async with (
        proxied(handler) as (proxy, upstream),
        raw_call(proxy, "responses", as_session(), stream=stream) as caller,
    ):
        async with asyncio.timeout(WAIT_S):
            await upstream.arrived.wait()
        if stream:
            await caller.head()
        sealed = await proxy.seal()
        async with asyncio.timeout(WAIT_S):
            await upstream.asked[0].gone.wait()
        await caller.is_told_of_the_seal(stream)
    (call,) = sealed.calls
    assert (call.phase, call.error_code, call.error_category) == ("agent", "capture_sealed", "cancelled")


async def test_sealing_leaves_the_meshs_own_calls_alone() -> None:
    go_on = asyncio.Event()

    async def handler(asked: Asked) -> None:
        await go_on.wait()
        await asked.write(json_body(COMPLETION))

    async with proxied(handler) as (proxy, upstream):
        judging = asyncio.create_task(proxy.call("responses"))
        async with asyncio.timeout(WAIT_S):
            await upstream.arrived.wait()
        sealed = await proxy.seal()
        (under_way,) = sealed.calls
        assert (under_way.phase, under_way.ended_at, under_way.error_category) == ("verify", None, None)
        go_on.set()
        assert (await judging).status_code == 200
        (judged,) = (await proxy.capture()).calls
        assert (judged.call_id, judged.status) == (under_way.call_id, 200)


async def test_bodies_too_large_to_keep_are_left_out_and_told() -> None:
    captures = Captures(MemoryStore(), ttl_s=60)
    large = orjson.dumps({"x": "y" * CALL_BODIES_MAX_BYTES})
    most = orjson.dumps({"x": "y" * (CALL_BODIES_MAX_BYTES - 100)})
    await captures.append("k", _facts("first"), large, b"{}")
    await captures.append("k", _facts("second"), b"{}", large)
    for n in range(CAPTURE_BODIES_MAX_BYTES // CALL_BODIES_MAX_BYTES):
        await captures.append("k", _facts(f"{n}"), most, b"{}")
    await captures.append("k", _facts("last"), most, b"{}")
    calls = Capture.model_validate_json(await captures.read("k")).calls
    assert calls[0].left_out == ("request",)
    assert (calls[0].request, calls[0].response) == (None, {})
    assert calls[1].left_out == ("response",)
    assert (calls[1].request, calls[1].response) == ({}, None)
    assert [call.left_out for call in calls[2:-1]] == [()] * (len(calls) - 3)
    assert (calls[-1].left_out, calls[-1].response) == (("request",), {})


@pytest.mark.behaviour("MS-19")
async def test_a_record_that_does_not_parse_is_counted_and_the_others_are_read() -> None:
    store = MemoryStore()
    captures = Captures(store, ttl_s=60)
    await store.append("capture:{k}", [b'{"call_id": 1', b"{}"], ttl_s=60)
    await captures.close("k")
    assert Capture.model_validate_json(await captures.read("k")) == Capture(key="k", sealed=True, damaged=2)


async def test_every_answer_of_an_upstream_is_counted() -> None:
    async with proxy_of(settings_of(SCRIPTED)) as proxy:
        await proxy.call("responses")
        await proxy.call("responses")
        metrics = (await proxy.http.get("/metrics")).text
    assert 'paddock_upstream_statuses_total{model="policy",status="200"} 2.0' in metrics


async def test_a_growing_conversation_is_stored_once_and_read_whole() -> None:
    store = MemoryStore()
    captures = Captures(store, ttl_s=60)
    tools = [{"type": "function", "name": f"tool_{n}", "description": "x" * 500} for n in range(20)]
    turns = [{"role": "user", "content": f"{n} " + "y" * 1000} for n in range(200)]
    asked = []
    for n in range(1, 201):
        request = {"model": "m", "input": turns[:n], "tools": tools}
        asked.append(request)
        await captures.append("k", _facts(f"call-{n}"), orjson.dumps(request), b'{"id":"r"}')
    stored = sum(map(len, await store.read_log("capture:{k}")))
    sent = sum(len(orjson.dumps(request)) for request in asked)
    assert stored < sent / 15
    capture = Capture.model_validate_json(await captures.read("k"))
    assert [call.request for call in capture.calls] == asked
    assert (capture.damaged, capture.calls[-1].left_out) == (0, ())


async def test_facts_are_read_without_bodies_and_a_lost_part_damages_only_the_bodies() -> None:
    store = MemoryStore()
    captures = Captures(store, ttl_s=60)
    request = orjson.dumps({"input": [{"role": "user", "content": "z" * 5000}]})
    await captures.append("k", _facts("one"), request, b'{"id":"r"}')
    entries = await store.read_log("capture:{k}")
    bare = Capture.model_validate_json(await captures.read("k", bodies=False))
    assert (bare.calls[0].request, bare.calls[0].response, bare.damaged) == (None, None, 0)
    await store.append("capture:{lossy}", entries[1:], ttl_s=60)
    assert Capture.model_validate_json(await captures.read("lossy")).damaged == 1
    assert Capture.model_validate_json(await captures.read("lossy", bodies=False)).damaged == 0


async def test_a_capture_is_exported_as_lines() -> None:
    async with proxied(always(json_body(COMPLETION))) as (proxy, _):
        for text in ("one", "two"):
            await proxy.call("responses", input=text)
        lines = (await proxy.http.get(f"/captures/{KEY}?format=jsonl")).text.splitlines()
        capture = await proxy.capture()
    assert [ModelCall.model_validate_json(line) for line in lines] == list(capture.calls)


def _facts(call_id: str) -> dict[str, Any]:
    return {
        "call_id": call_id, "phase": "agent", "dialect": "responses", "model": "m", "stream": False,
        "started_at": 1.0, "ended_at": 2.0, "status": 200, "usage": None,
    }  # fmt: skip
