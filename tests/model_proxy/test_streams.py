"""Streams: incremental, never silent, never quietly cut."""

import asyncio
from typing import Any

import pytest

from tests.model_proxy.raw_caller import raw_call
from tests.model_proxy.wire import (
    COMPLETION,
    DONE,
    END,
    RESPONSE,
    SSE_HEAD,
    WAIT_S,
    Asked,
    Handler,
    always,
    delta,
    event,
    events_of,
    json_body,
    piece,
    proxied,
    reply,
)

ROLE = delta({"role": "assistant", "content": ""})
STOP = delta({}, "stop")
USAGE: dict[str, Any] = {**STOP, "choices": [], "usage": COMPLETION["usage"]}
HALF_CALL = delta(
    {"tool_calls": [{"index": 0, "id": "call_A", "type": "function", "function": {"name": "f", "arguments": '{"a":'}}]}
)


def _types(text: str) -> list[str]:
    return [one["type"] for one in events_of(text)]


def _created(sequence: int = 0) -> dict[str, Any]:
    response = {**RESPONSE, "status": "in_progress", "output": [], "usage": None}
    return {"type": "response.created", "sequence_number": sequence, "response": response}


def _item_done(sequence: int) -> dict[str, Any]:
    item = RESPONSE["output"][0]
    return {"type": "response.output_item.done", "sequence_number": sequence, "output_index": 0, "item": item}


def _completed(sequence: int) -> dict[str, Any]:
    return {"type": "response.completed", "sequence_number": sequence, "response": RESPONSE}


@pytest.mark.behaviour("MS-13")
async def test_events_arrive_while_the_upstream_is_still_at_it() -> None:
    told = asyncio.Event()

    async def handler(asked: Asked) -> None:
        await asked.write(SSE_HEAD + event(ROLE) + event(delta({"content": "one"})))
        await told.wait()
        await asked.write(event(delta({"content": " two"})) + event(STOP) + event(USAGE) + piece(DONE) + END)

    async with proxied(handler) as (proxy, upstream), raw_call(proxy, "responses", stream=True) as caller:
        head = await caller.head()
        while (one := await caller.sse_data())["type"] != "response.output_text.delta":
            pass
        assert one["delta"] == "one"
        told.set()
        while (one := await caller.sse_data())["type"] != "response.completed":
            pass
        # The record stands before the final event leaves.
        call = await proxy.last_call()
    assert upstream.asked[0].json["stream_options"] == {"include_usage": True}
    assert "cache-control: no-cache" in head
    assert "x-accel-buffering: no" in head
    assert "content-encoding" not in head
    assert one["response"]["usage"]["total_tokens"] == 9
    assert (call.response_id, call.response_status) == (one["response"]["id"], "completed")
    assert call.usage is not None
    assert call.usage.total_tokens == 9


@pytest.mark.behaviour("MS-18")
@pytest.mark.parametrize(
    ("kind", "dialect", "parts"),
    [
        ("chat_completions", "responses", [event(ROLE), event(delta({"content": "x"})), event(STOP), piece(DONE)]),
        (
            "chat_completions",
            "chat_completions",
            [event(ROLE), event(delta({"content": "x"})), event(STOP), piece(DONE)],
        ),
        ("responses", "responses", [event(_created()), event(_item_done(1)), event(_completed(2))]),
    ],
)
async def test_the_record_stands_when_the_final_event_arrives(kind: str, dialect: str, parts: list[bytes]) -> None:
    # The body's own end never comes: the final event alone ends the call.
    async with proxied(always(SSE_HEAD, *parts), kind) as (proxy, _), raw_call(proxy, dialect, stream=True) as caller:
        await caller.head()
        async with asyncio.timeout(WAIT_S):
            text = b""
            while b"response.completed" not in text and b"[DONE]" not in text:
                text += await caller.reader.read(65_536)
        call = await proxy.last_call()
    assert (call.status, call.response_status, call.error_category) == (200, "completed", None)
    assert call.response is not None


CUTS: list[tuple[str, list[bytes], bool]] = [
    ("after text", [event(ROLE), event(delta({"content": "The answer is"}))], False),
    ("in a call", [event(ROLE), event(HALF_CALL)], False),
    ("by a reset", [event(ROLE), event(delta({"content": "The"}))], True),
]


def _cut(parts: list[bytes], by_reset: bool) -> Handler:
    async def handler(asked: Asked) -> None:
        await asked.write(SSE_HEAD + b"".join(parts))
        if not by_reset:
            # A proper end of the body: only the missing finish reason tells that it was cut off.
            await asked.write(END)
            return
        # The reset must not overtake the bytes.
        await asyncio.sleep(0.05)
        asked.reset()

    return handler


@pytest.mark.behaviour("MS-4", "MS-19")
@pytest.mark.parametrize(("name", "parts", "by_reset"), CUTS)
async def test_a_stream_that_is_cut_off_fails(name: str, parts: list[bytes], by_reset: bool) -> None:
    async with proxied(_cut(parts, by_reset)) as (proxy, _):
        answer = await proxy.call("responses", stream=True, tools=[{"type": "function", "name": "f"}])
        call = await proxy.last_call()
    types = _types(answer.text)
    assert types[-1] == "response.failed"
    assert "response.completed" not in types
    final = events_of(answer.text)[-1]["response"]
    assert final["error"]["code"]
    assert not [item for item in final["output"] if item["type"] == "function_call"]
    assert (call.status, call.response_status, call.error_category) == (200, "failed", "truncated_stream")


@pytest.mark.behaviour("MS-4")
@pytest.mark.parametrize(("name", "parts", "by_reset"), CUTS)
async def test_a_chat_stream_that_is_cut_off_ends_with_an_error_event(
    name: str, parts: list[bytes], by_reset: bool
) -> None:
    async with proxied(_cut(parts, by_reset)) as (proxy, _):
        answer = await proxy.call("chat_completions", stream=True)
        call = await proxy.last_call()
    assert events_of(answer.text)[-1]["error"]["code"]
    assert "[DONE]" not in answer.text
    assert call.error_category == "truncated_stream"


@pytest.mark.behaviour("MS-4")
async def test_a_responses_stream_that_is_cut_off_ends_with_a_failed_event() -> None:
    async with proxied(always(SSE_HEAD, event(_created()), END), "responses") as (proxy, _):
        answer = await proxy.call("responses", stream=True)
        call = await proxy.last_call()
    events = events_of(answer.text)
    assert [(one["type"], one["sequence_number"]) for one in events] == [
        ("response.created", 0),
        ("response.failed", 1),
    ]
    assert (events[-1]["response"]["id"], events[-1]["response"]["status"]) == ("resp_9", "failed")
    assert (call.response_status, call.error_category) == ("failed", "truncated_stream")


@pytest.mark.parametrize("dialect", ["responses", "chat_completions"])
async def test_a_stream_that_is_empty_is_a_502(dialect: str) -> None:
    async with proxied(always(SSE_HEAD, END)) as (proxy, _):
        answer = await proxy.call(dialect, stream=True)
        call = await proxy.last_call()
    assert (answer.status_code, call.error_category) == (502, "truncated_stream")


@pytest.mark.parametrize("dialect", ["responses", "chat_completions"])
async def test_a_finish_reason_without_an_end_mark_is_a_proper_end(dialect: str) -> None:
    parts = [event(ROLE), event(delta({"content": "ok"})), event(STOP)]
    async with proxied(always(SSE_HEAD, *parts, END)) as (proxy, _):
        answer = await proxy.call(dialect, stream=True)
        call = await proxy.last_call()
    assert ("response.completed" if dialect == "responses" else "[DONE]") in answer.text
    assert (call.response_status, call.error_category) == ("completed", None)


@pytest.mark.behaviour("MS-14")
async def test_silence_is_filled_with_heartbeats_that_clients_count() -> None:
    go_on = asyncio.Event()

    async def handler(asked: Asked) -> None:
        await asked.write(SSE_HEAD)
        await go_on.wait()
        await asked.write(event(ROLE) + event(delta({"content": "late"})) + event(STOP) + piece(DONE) + END)

    async with (
        proxied(handler, heartbeat_s=0.1) as (proxy, _),
        raw_call(proxy, "responses", "Accept-Encoding: gzip", stream=True) as caller,
    ):
        assert "content-encoding" not in await caller.head()
        events = [await caller.sse_data() for _ in range(4)]
        go_on.set()
        while events[-1]["type"] != "response.completed":
            events.append(await caller.sse_data())
    assert [one["type"] for one in events[:4]] == ["response.created", *["response.in_progress"] * 3]
    assert [one["sequence_number"] for one in events] == list(range(len(events)))


@pytest.mark.behaviour("MS-3", "MS-14")
async def test_no_heartbeat_comes_before_the_upstreams_status() -> None:
    async def handler(asked: Asked) -> None:
        await asyncio.sleep(0.3)
        await asked.write(reply(429, b"busy", ("Content-Type", "text/plain"), ("Retry-After", "9")))

    async with proxied(handler, heartbeat_s=0.05) as (proxy, _):
        answer = await proxy.call("responses", stream=True)
    assert (answer.status_code, answer.content, answer.headers["retry-after"]) == (429, b"busy", "9")


@pytest.mark.behaviour("MS-4")
async def test_an_error_after_a_heartbeat_is_a_failed_event() -> None:
    go_on = asyncio.Event()

    async def handler(asked: Asked) -> None:
        await asked.write(SSE_HEAD)
        await go_on.wait()
        await asked.write(event({"error": {"message": "boom", "code": "server_error"}}) + END)

    async with (
        proxied(handler, heartbeat_s=0.05) as (proxy, _),
        raw_call(proxy, "responses", stream=True) as caller,
    ):
        await caller.sse_data()
        go_on.set()
        while (one := await caller.sse_data())["type"] != "response.failed":
            pass
    assert one["response"]["error"] == {"code": "server_error", "message": "boom"}


@pytest.mark.behaviour("MS-14")
async def test_a_chat_caller_gets_comments_as_heartbeats() -> None:
    go_on = asyncio.Event()

    async def handler(asked: Asked) -> None:
        await asked.write(SSE_HEAD)
        await go_on.wait()
        await asked.write(event(STOP) + piece(DONE) + END)

    async with (
        proxied(handler, heartbeat_s=0.05) as (proxy, _),
        raw_call(proxy, "chat_completions", stream=True) as caller,
    ):
        await caller.head()
        async with asyncio.timeout(WAIT_S):
            while not (await caller.reader.readline()).startswith(b":"):
                pass
        go_on.set()
        assert (await caller.sse_data())["choices"][0]["finish_reason"] == "stop"


async def test_heartbeats_in_a_passed_responses_stream_leave_its_numbers_without_a_gap() -> None:
    go_on = asyncio.Event()

    async def handler(asked: Asked) -> None:
        await asked.write(SSE_HEAD + event(_created()))
        await go_on.wait()
        await asked.write(event(_item_done(1)) + event(_completed(2)) + END)

    async with (
        proxied(handler, "responses", heartbeat_s=0.05) as (proxy, _),
        raw_call(proxy, "responses", stream=True) as caller,
    ):
        events = [await caller.sse_data() for _ in range(3)]
        go_on.set()
        while events[-1]["type"] != "response.completed":
            events.append(await caller.sse_data())
    assert [one["type"] for one in events[:3]] == ["response.created", *["response.in_progress"] * 2]
    assert [one["sequence_number"] for one in events] == list(range(len(events)))


@pytest.mark.parametrize("dialect", ["responses", "chat_completions"])
async def test_a_server_that_does_not_stream_still_serves_a_streaming_caller(dialect: str) -> None:
    async with proxied(always(json_body(COMPLETION))) as (proxy, _):
        answer = await proxy.call(dialect, stream=True)
        call = await proxy.last_call()
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "fine" in answer.text
    assert call.usage is not None
    assert (call.response_status, call.usage.total_tokens) == ("completed", 9)


async def test_a_connection_is_used_again_after_a_stream() -> None:
    parts = [event(ROLE), event(STOP), piece(DONE), END]
    async with proxied(always(SSE_HEAD, *parts)) as (proxy, upstream):
        for _ in range(3):
            assert "response.completed" in (await proxy.call("responses", stream=True)).text
    assert {asked.connection for asked in upstream.asked} == {1}


async def test_events_cut_anywhere_and_ended_in_any_way_pass_unchanged() -> None:
    raw = b": hello\r\n\r\ndata: %b\r\n\r\nevent: x\ndata: %b\n\ndata:%b\n\ndata: [DONE]\n\n" % tuple(
        event(one).split(b"data: ")[1].split(b"\n\n")[0] for one in (ROLE, delta({"content": "é"}), STOP)
    )
    parts = [piece(raw[at : at + 1]) for at in range(len(raw))]
    async with proxied(always(SSE_HEAD, *parts, END)) as (proxy, _):
        answer = await proxy.call("chat_completions", stream=True)
    assert answer.content == raw.removeprefix(b": hello\r\n\r\n")
