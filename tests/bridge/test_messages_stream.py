"""An answer as Messages events, as its chunks or Responses events arrive."""

from typing import Any

import pytest

from services.model_proxy.bridge.messages_stream import MessagesStream
from services.model_proxy.bridge.messages_thinking import opened
from services.model_proxy.bridge.stream import encode_event
from tests.bridge.chats import USAGE_CHUNK, chunk, piece
from tests.bridge.messages import PlayedMessages, text, tool_use


def begins(call_id: str, index: int = 0) -> dict[str, Any]:
    return chunk(tool_calls=[piece(index, "", id=call_id, name="look_up")])


def gives(arguments: str, index: int = 0) -> dict[str, Any]:
    return chunk(tool_calls=[piece(index, arguments)])


@pytest.mark.behaviour("MS-13")
def test_thinking_text_and_a_call_arrive_block_by_block() -> None:
    played = PlayedMessages(
        [
            chunk(reasoning="H"),
            chunk(reasoning="m."),
            chunk(content="I "),
            chunk(content="look."),
            begins("t1"),
            gives('{"word"'),
            gives(':"w"}'),
            chunk("tool_calls"),
            USAGE_CHUNK,
        ]
    )
    assert played.kinds == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_delta"),
        *("content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        "message_delta",
        "message_stop",
    ]
    thinking, said, called = played.told()
    assert opened(thinking.pop("signature")) is not None
    assert thinking == {"type": "thinking", "thinking": "Hm.", "json": ""}
    assert said == text("I look.") | {"json": ""}
    assert called == tool_use("t1") | {"json": '{"word":"w"}'}
    usage = {"input_tokens": 9, "output_tokens": 4}
    assert played.events[-2] == {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use", "stop_sequence": None},
        "usage": usage,
    }
    assert played.message["content"][1:] == [text("I look."), tool_use("t1", word="w")]
    assert (played.message["stop_reason"], played.message["usage"]) == ("tool_use", usage)
    assert played.stream.response["id"] == "resp_1"


def test_the_first_event_is_a_message_without_content() -> None:
    first = PlayedMessages([]).events[0]
    assert first["message"] == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }


@pytest.mark.behaviour("MS-13")
def test_a_piece_leaves_in_the_step_in_which_it_came() -> None:
    played = PlayedMessages([])
    stream = MessagesStream(model="m", message_id="msg_2")
    assert [event["type"] for event in stream.start()] == ["message_start"]
    item = {"type": "message", "content": []}
    assert stream.feed({"type": "response.output_item.added", "output_index": 0, "item": item}) == []
    delta = {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": "a"}
    assert [event["type"] for event in stream.feed(delta)] == ["content_block_start", "content_block_delta"]
    assert [event["type"] for event in stream.feed(delta)] == ["content_block_delta"]
    assert stream.message["content"] == [text("aa")]
    assert encode_event(stream.heartbeat()) == b'event: ping\ndata: {"type":"ping"}\n\n'
    assert played.kinds == ["message_start", "error"]


def test_calls_that_arrive_at_once_are_told_one_after_the_other() -> None:
    played = PlayedMessages(
        [
            begins("t1", 0),
            begins("t2", 1),
            gives('{"word":', 1),
            gives('{"word":', 0),
            gives('"b"}', 1),
            gives('"a"}', 0),
            chunk("tool_calls"),
        ]
    )
    assert [(block["id"], block["json"]) for block in played.told()] == [("t1", '{"word":"a"}'), ("t2", '{"word":"b"}')]


def test_a_call_cut_by_the_output_limit_ends_with_what_can_be_read() -> None:
    played = PlayedMessages([begins("t1"), gives('{"word":"w","more":"cu'), chunk("length")])
    assert played.kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert played.message["content"] == [tool_use("t1", word="w")]
    assert played.message["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("name", ["stop_reason", "matched_stop"])
def test_the_stop_sequence_is_named_where_the_server_tells_it(name: str) -> None:
    last = chunk("stop")
    last["choices"][0][name] = "END"
    other = {**last["choices"][0], "index": 1, name: "THE"}
    played = PlayedMessages([chunk(content="a"), last, {"choices": [other]}, USAGE_CHUNK], stops=["END", "THE"])
    assert played.events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}


def test_a_refusal_is_text_with_a_stop_reason_of_its_own() -> None:
    played = PlayedMessages([chunk(content="I "), chunk(refusal="won't."), chunk("stop")])
    assert played.message["content"] == [text("I "), text("won't.")]
    assert played.message["stop_reason"] == "refusal"


@pytest.mark.behaviour("MS-4", "MS-14")
def test_a_stream_that_is_cut_off_ends_with_one_error() -> None:
    played = PlayedMessages([chunk(content="half"), begins("t1"), gives('{"word":"w"}')])
    assert played.error == {
        "type": "api_error",
        "message": "The upstream's answer ended without a finish reason: it was cut off.",
        "details": {"error_code": "truncated_stream"},
    }
    assert played.kinds.count("content_block_stop") == 1
    assert played.message["content"] == [text("half")]
    assert played.message["stop_reason"] is None
    assert played.stream.fail("x", "y") == played.stream.feed(chunk(content="late")) == []


def test_thinking_under_way_stays_in_the_message_of_a_failed_stream() -> None:
    played = PlayedMessages([chunk(reasoning="half")])
    assert played.message["content"] == [{"type": "thinking", "thinking": "half", "signature": ""}]


@pytest.mark.behaviour("MS-4")
@pytest.mark.parametrize(
    ("fed", "kind", "code"),
    [
        ([{"error": {"message": "slow", "code": 429}}], "rate_limit_error", "429"),
        ([{"error": {"message": "context length exceeded"}}], "invalid_request_error", "context_length_exceeded"),
        ([begins("t1"), gives("raw"), chunk("tool_calls")], "api_error", "invalid_tool_call"),
        ([{"choices": "x"}], "api_error", "invalid_reply"),
    ],
)
def test_a_failure_is_told_once_with_its_code(fed: list[dict[str, Any]], kind: str, code: str) -> None:
    error = PlayedMessages([chunk(content="a"), *fed, chunk(content="late")]).error
    assert (error["type"], error["details"]["error_code"]) == (kind, code)


def added(index: int, kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "response.output_item.added", "output_index": index, "item": {"type": kind, **fields}}


def done(index: int, kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "response.output_item.done", "output_index": index, "item": {"type": kind, **fields}}


def delta(name: str, index: int, piece: Any, **fields: Any) -> dict[str, Any]:
    return {"type": f"response.{name}.delta", "output_index": index, "delta": piece, **fields}


def completed(*output: dict[str, Any], **fields: Any) -> dict[str, Any]:
    response = {"status": "completed", "output": [*output], **fields}
    return {"type": "response.completed", "response": response}


CALL = {"call_id": "t1", "name": "look_up"}


def test_a_summary_of_reasoning_is_thinking() -> None:
    played = PlayedMessages(
        [
            {"type": "response.created", "response": {}},
            added(0, "reasoning", id="rs_1", summary=[]),
            delta("reasoning_summary_text", 0, "One.", summary_index=0),
            delta("reasoning_summary_text", 0, "Tw", summary_index=1),
            delta("reasoning_text", 0, "One and two."),
            delta("reasoning_summary_text", 0, "o.", summary_index=1),
            done(0, "reasoning", id="rs_1", summary=[], encrypted_content="zzz"),
            completed(usage={"input_tokens": 1, "output_tokens": 2}),
        ],
        responses=True,
    )
    block = played.told()[0]
    assert block["thinking"] == "One.\n\nTwo."
    assert opened(block["signature"]) == {"id": "rs_1", "encrypted_content": "zzz"}
    assert played.message["content"] == [{name: block[name] for name in ("type", "thinking", "signature")}]


def test_items_that_come_whole_are_told_too() -> None:
    part = {"type": "output_text", "text": "a"}
    refused = {"type": "refusal", "refusal": "b"}
    played = PlayedMessages(
        [
            done(0, "reasoning", id="rs_1", summary=[], encrypted_content="zzz"),
            done(1, "reasoning", id="rs_2", summary=[{"text": "Hm."}]),
            done(2, "reasoning", id="rs_3", summary=[]),
            done(3, "message", content=[part, refused, {"type": "output_text", "text": ""}]),
            done(4, "function_call", **CALL, arguments='{"word":"w"}'),
            completed(),
        ],
        responses=True,
    )
    kinds = [block["type"] for block in played.told()]
    assert kinds == ["redacted_thinking", "thinking", "text", "text", "tool_use"]
    assert played.message["content"][2:] == [text("a"), text("b"), tool_use("t1", word="w")]
    assert played.events[-2]["usage"] == {"input_tokens": None, "output_tokens": None}


def test_items_that_were_never_done_are_closed_at_the_end() -> None:
    played = PlayedMessages(
        [
            added(0, "message", content=[]),
            delta("output_text", 0, "a", content_index=0),
            added(1, "function_call", **CALL, arguments=""),
            delta("function_call_arguments", 1, '{"word":"w"}'),
            completed(),
        ],
        responses=True,
    )
    assert played.message["content"] == [text("a"), tool_use("t1", word="w")]
    whole = {"type": "function_call", **CALL, "arguments": "{}", "status": "completed"}
    only_at_the_end = PlayedMessages([completed(whole)], responses=True)
    assert only_at_the_end.message["content"] == [tool_use("t1")]
    assert only_at_the_end.told()[0]["json"] == "{}"


def test_an_incomplete_response_says_why() -> None:
    call = {"type": "function_call", **CALL, "arguments": '{"word":"w', "status": "incomplete"}
    final = completed(call, incomplete_details={"reason": "max_output_tokens"}) | {"type": "response.incomplete"}
    played = PlayedMessages(
        [added(0, "function_call", **CALL), delta("function_call_arguments", 0, '{"word":"w'), final], responses=True
    )
    assert (played.message["content"], played.message["stop_reason"]) == ([tool_use("t1")], "max_tokens")


@pytest.mark.behaviour("MS-4")
@pytest.mark.parametrize(
    ("event", "code"),
    [
        ({"type": "response.failed", "response": {"error": {"code": "server_error", "message": "x"}}}, "server_error"),
        ({"type": "error", "code": "rate_limit_exceeded", "message": "x"}, "rate_limit_exceeded"),
        ({"type": "error", "error": {"code": 503, "message": "x"}}, "503"),
        (done(0, "web_search_call"), "unsupported_output"),
        (delta("output_text", 5, "x", content_index=0), "invalid_reply"),
        (added(0, "function_call"), "invalid_reply"),
        ({"no": "type"}, "invalid_reply"),
        ({"type": "response.completed", "response": None}, "invalid_reply"),
        ({"type": "response.in_progress"}, "truncated_stream"),
    ],
)
def test_a_responses_stream_that_fails_ends_with_one_error(event: dict[str, Any], code: str) -> None:
    played = PlayedMessages([event, completed()] if code != "truncated_stream" else [event], responses=True)
    assert played.error["details"]["error_code"] == code


@pytest.mark.parametrize("piece", [None, 7])
def test_a_delta_of_another_form_is_an_error(piece: Any) -> None:
    wrong_piece = PlayedMessages(
        [added(0, "message", content=[]), delta("output_text", 0, piece, content_index=0)], responses=True
    )
    wrong_item = PlayedMessages(
        [added(0, "message", content=[]), delta("function_call_arguments", 0, "x")], responses=True
    )
    assert wrong_piece.error["details"] == wrong_item.error["details"] == {"error_code": "invalid_reply"}
