"""The Messages API on the wire, before upstreams of both dialects: answers, streams, errors, record, tokens."""

import asyncio
from typing import Any

import orjson
import pytest

from services.model_proxy.bridge.messages_thinking import opened
from tests.model_proxy.raw_caller import raw_call
from tests.model_proxy.wire import (
    COMPLETION,
    DONE,
    END,
    RESPONSE,
    SSE_HEAD,
    Asked,
    always,
    delta,
    event,
    events_of,
    json_body,
    piece,
    proxied,
    reply,
)

KINDS = ["chat_completions", "responses"]
USAGE = {**delta({}), "choices": [], "usage": COMPLETION["usage"]}
CHAT_PARTS = [event(delta({"content": "fi"})), event(delta({"content": "ne"})), event(delta({}, "stop")), event(USAGE)]
ITEM = RESPONSE["output"][0]
RESPONSES_PARTS = [
    event({"type": "response.created", "response": {**RESPONSE, "status": "in_progress", "output": []}}),
    event({"type": "response.output_item.added", "output_index": 0, "item": {**ITEM, "content": []}}),
    event({"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": "fi"}),
    event({"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": "ne"}),
    event({"type": "response.output_item.done", "output_index": 0, "item": ITEM}),
    event({"type": "response.completed", "response": RESPONSE}),
]
PARTS = {"chat_completions": CHAT_PARTS, "responses": RESPONSES_PARTS}
WHOLE = {"chat_completions": COMPLETION, "responses": RESPONSE}
COUNTS = {"input_tokens": 7, "output_tokens": 2}


def _calling(arguments: str, **choice: Any) -> dict[str, Any]:
    called = {"id": "t1", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [called], **choice}
    return COMPLETION | {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}


def _error(body: Any) -> dict[str, Any]:
    """The error, after a check of the shape that it stands in."""
    assert body["type"] == "error"
    error: dict[str, Any] = body["error"]
    assert {"type", "message", "details"} <= set(error)
    return error


@pytest.mark.behaviour("MS-1", "MS-18")
@pytest.mark.parametrize("kind", KINDS)
async def test_a_whole_answer_is_a_message_and_stands_in_the_capture(kind: str) -> None:
    async with proxied(always(json_body(WHOLE[kind])), kind) as (proxy, upstream):
        answer = await proxy.call("messages", metadata={"user_id": "u"})
        call = await proxy.last_call()
    message = answer.json()
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert message == {
        "id": message["id"],
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [{"type": "text", "text": "fine"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": COUNTS,
    }
    assert upstream.asked[0].json["model"] == "up"
    assert (call.dialect, call.status, call.response_status, call.error_category) == (
        "messages",
        200,
        "completed",
        None,
    )
    assert (call.response_id, call.response) == (message["id"], message)
    assert call.request is not None
    assert call.request["max_tokens"] == 64
    assert call.dropped_fields == ("metadata",)
    limit = "max_tokens" if kind == "chat_completions" else "max_output_tokens"
    assert call.effective == {limit: 64}
    assert call.usage is not None
    assert call.usage.total_tokens == 9


@pytest.mark.behaviour("MS-13", "MS-18")
@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_arrives_as_it_comes_and_ends_after_its_record(kind: str) -> None:
    told = asyncio.Event()

    async def handler(asked: Asked) -> None:
        first, rest = PARTS[kind][:-3], PARTS[kind][-3:]
        await asked.write(SSE_HEAD + b"".join(first))
        await told.wait()
        # The body's own end never comes.
        await asked.write(b"".join(rest) + (piece(DONE) if kind == "chat_completions" else b""))

    async with proxied(handler, kind) as (proxy, _), raw_call(proxy, "messages", stream=True) as caller:
        await caller.head()
        events = [await caller.sse_data() for _ in range(3)]
        told.set()
        while events[-1]["type"] != "message_stop":
            events.append(await caller.sse_data())
        call = await proxy.last_call()
    assert [one["type"] for one in events] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        "message_delta",
        "message_stop",
    ]
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"] == COUNTS
    assert (call.stream, call.status, call.response_status) == (True, 200, "completed")
    assert (call.response_id, call.error_category) == (events[0]["message"]["id"], None)
    assert call.response is not None
    assert call.response["content"] == [{"type": "text", "text": "fine"}]
    assert call.usage is not None
    assert call.usage.total_tokens == 9


@pytest.mark.behaviour("MS-12", "MS-18")
async def test_a_call_is_joined_to_its_record_by_its_id() -> None:
    async with proxied(always(json_body(_calling('{"word": "w"}', reasoning="Hm.")))) as (proxy, _):
        answer = await proxy.call("messages")
        call = await proxy.last_call()
    thinking, called = answer.json()["content"]
    assert thinking["thinking"] == "Hm."
    assert opened(thinking["signature"]) is not None
    assert called == {"type": "tool_use", "id": "t1", "name": "look_up", "input": {"word": "w"}}
    assert answer.json()["stop_reason"] == "tool_use"
    assert (call.call_ids, call.output_ids) == (("t1",), ())


async def test_a_stop_sequence_that_the_server_names_is_named() -> None:
    ended = COMPLETION | {"choices": [COMPLETION["choices"][0] | {"stop_reason": "END"}]}
    async with proxied(always(json_body(ended))) as (proxy, upstream):
        message = (await proxy.call("messages", stop_sequences=["END"])).json()
    assert upstream.asked[0].json["stop"] == ["END"]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")


@pytest.mark.parametrize("kind", KINDS)
async def test_top_k_reaches_a_server_that_takes_it(kind: str) -> None:
    async with proxied(always(json_body(WHOLE[kind])), kind, capabilities={"top_k": True}) as (proxy, upstream):
        await proxy.call("messages", top_k=20)
        call = await proxy.last_call()
    assert upstream.asked[0].json["top_k"] == 20
    assert call.effective["top_k"] == 20


@pytest.mark.behaviour("MS-4", "MS-18")
async def test_an_answer_cut_by_the_output_limit_is_incomplete() -> None:
    cut = COMPLETION | {"choices": [COMPLETION["choices"][0] | {"finish_reason": "length"}]}
    async with proxied(always(json_body(cut))) as (proxy, _):
        answer = await proxy.call("messages")
        call = await proxy.last_call()
    assert answer.json()["stop_reason"] == "max_tokens"
    assert (call.response_status, call.error_category) == ("incomplete", "incomplete")


@pytest.mark.behaviour("MS-4")
@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_that_is_cut_off_ends_with_one_error(kind: str) -> None:
    async with proxied(always(SSE_HEAD, *PARTS[kind][:-3], END), kind) as (proxy, _):
        answer = await proxy.call("messages", stream=True)
        call = await proxy.last_call()
    events = events_of(answer.text)
    assert answer.status_code == 200
    assert [one["type"] for one in events if one["type"] in {"error", "message_stop"}] == ["error"]
    assert _error(events[-1])["details"] == {"error_code": "truncated_stream"}
    assert (call.status, call.response_status, call.error_category) == (200, "failed", "truncated_stream")
    assert call.response is not None
    assert call.response["stop_reason"] is None


@pytest.mark.behaviour("MS-4", "MS-19")
@pytest.mark.parametrize(
    ("kind", "late"),
    [
        ("chat_completions", {"error": {"message": "boom", "code": 429}}),
        ("responses", {"type": "error", "code": "rate_limit_exceeded", "message": "boom"}),
        (
            "responses",
            {"type": "response.failed", "response": {"error": {"code": "rate_limit_exceeded", "message": "boom"}}},
        ),
    ],
)
async def test_a_late_error_ends_the_stream_with_one_error(kind: str, late: dict[str, Any]) -> None:
    async with proxied(always(SSE_HEAD, *PARTS[kind][:-3], event(late), END), kind) as (proxy, _):
        answer = await proxy.call("messages", stream=True)
        call = await proxy.last_call()
    last = events_of(answer.text)[-1]
    assert answer.text.split("\n\n")[-2].startswith("event: error\n")
    assert (_error(last)["type"], last["error"]["message"]) == ("rate_limit_error", "boom")
    assert (call.status, call.error_category) == (200, "rate_limit")


@pytest.mark.behaviour("MS-3")
@pytest.mark.parametrize(
    ("kind", "first"),
    [
        ("chat_completions", {"error": {"message": "boom", "code": 500}}),
        ("responses", {"type": "error", "code": "server_error", "message": "boom"}),
    ],
)
async def test_a_first_frame_that_is_an_error_becomes_an_http_error(kind: str, first: dict[str, Any]) -> None:
    async with proxied(always(SSE_HEAD, event(first), END), kind) as (proxy, _):
        answer = await proxy.call("messages", stream=True)
    assert (answer.status_code, _error(answer.json())["message"]) == (502, "boom")
    assert answer.json()["error"]["type"] == "api_error"


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_that_no_message_can_hold_is_a_502(kind: str) -> None:
    search = RESPONSE | {"output": [{"type": "web_search_call", "id": "ws"}]}
    wrong = {"chat_completions": _calling("raw"), "responses": search}
    async with proxied(always(json_body(wrong[kind])), kind) as (proxy, _):
        answer = await proxy.call("messages")
    expected = {"chat_completions": "invalid_tool_call", "responses": "unsupported_output"}
    assert (answer.status_code, _error(answer.json())["details"]["error_code"]) == (502, expected[kind])


async def test_silence_is_filled_with_pings() -> None:
    go_on = asyncio.Event()

    async def handler(asked: Asked) -> None:
        await asked.write(SSE_HEAD)
        await go_on.wait()
        await asked.write(b"".join(CHAT_PARTS) + piece(DONE) + END)

    async with proxied(handler, heartbeat_s=0.05) as (proxy, _), raw_call(proxy, "messages", stream=True) as caller:
        events = [await caller.sse_data() for _ in range(4)]
        go_on.set()
        while events[-1]["type"] != "message_stop":
            events.append(await caller.sse_data())
    assert [one["type"] for one in events[:4]] == ["message_start", "ping", "ping", "ping"]
    assert [one["type"] for one in events].count("message_start") == 1


@pytest.mark.behaviour("MS-1")
async def test_a_request_without_a_form_is_a_400_that_names_the_field() -> None:
    async with proxied(always()) as (proxy, upstream):
        document = {"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "x"}}]}
        answer = await proxy.call("messages", messages=[document])
        call = await proxy.last_call()
    error = _error(answer.json())
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == "messages[0].content[0]"
    assert "'document'" in error["message"]
    assert (call.status, call.error_category, call.error_code) == (400, "client_error", "unsupported_value")
    assert upstream.asked == []


async def test_a_body_that_is_no_json_is_a_422_in_the_apis_shape() -> None:
    async with proxied(always()) as (proxy, _):
        answer = await proxy.http.post("/rollouts/k/v1/messages", content=b"{")
    assert (answer.status_code, _error(answer.json())["type"]) == (422, "invalid_request_error")


async def test_an_unknown_model_is_a_404_in_the_apis_shape() -> None:
    async with proxied(always()) as (proxy, _):
        answer = await proxy.call("messages", model="polic")
    assert (answer.status_code, _error(answer.json())["type"]) == (404, "not_found_error")
    assert "policy" in answer.json()["error"]["message"]


async def test_tokens_are_not_counted_ahead_and_the_answer_says_so() -> None:
    async with proxied(always()) as (proxy, _):
        answer = await proxy.http.post("/rollouts/k/v1/messages/count_tokens", json={"messages": []})
    assert (answer.status_code, _error(answer.json())["type"]) == (404, "not_found_error")
    assert "usage" in answer.json()["error"]["message"]


@pytest.mark.behaviour("MS-2", "MS-5")
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_of_an_anthropic_like_upstream_keeps_its_shape(stream: bool) -> None:
    body = orjson.dumps({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}})
    answered = reply(529, body, ("Content-Type", "application/json"), ("Retry-After", "2"), ("request-id", "r1"))
    async with proxied(always(answered)) as (proxy, _):
        answer = await proxy.call("messages", stream=stream)
    assert (answer.status_code, answer.content) == (529, body)
    assert (answer.headers["retry-after"], answer.headers["request-id"]) == ("2", "r1")
