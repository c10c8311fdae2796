"""A whole answer as a message of the Messages API."""

from typing import Any

import pytest

from services.model_proxy.bridge.messages_errors import error_body, error_type
from services.model_proxy.bridge.messages_reply import message_usage, to_message
from services.model_proxy.bridge.messages_thinking import opened
from services.model_proxy.bridge.refusals import UpstreamReplyError
from tests.bridge.chats import call, completion
from tests.bridge.messages import LOOK, chat_of, message_of, messaging, text, tool_use


def response(*output: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"id": "resp_1", "status": "completed", "output": [*output], **fields}


def read(given: dict[str, Any]) -> dict[str, Any]:
    return to_message(given, model="m", message_id="msg_1")


@pytest.mark.behaviour("MS-10", "MS-12")
def test_an_answer_becomes_thinking_text_and_tool_use() -> None:
    chat = completion(
        "tool_calls",
        reasoning="Hm.",
        content="I look.",
        tool_calls=[call("t1", "look_up", '{"word": "w"}'), call("t2", "look_up", " ")],
    )
    message = message_of(chat)
    signature = message["content"][0].pop("signature")
    assert opened(signature) is not None
    assert message == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "Hm."},
            text("I look."),
            tool_use("t1", word="w"),
            tool_use("t2"),
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {"input_tokens": 9, "output_tokens": 4},
    }


def test_an_answer_without_a_word_has_no_block() -> None:
    message = message_of(completion(content=""))
    assert (message["content"], message["stop_reason"]) == ([], "end_turn")


def test_a_tool_has_the_callers_own_name_again() -> None:
    chat = chat_of(messaging(tools=[LOOK | {"name": "l" * 100}]))
    flat = chat.body["tools"][0]["function"]["name"]
    message = message_of(completion("tool_calls", tool_calls=[call("t1", flat, "{}")]), names=chat.names)
    assert message["content"] == [tool_use("t1", "l" * 100)]


@pytest.mark.behaviour("MS-10")
@pytest.mark.parametrize(
    ("finish", "said", "stop"),
    [
        ("stop", {"content": "a"}, "end_turn"),
        ("length", {"content": "a"}, "max_tokens"),
        ("content_filter", {"content": "a"}, "refusal"),
        ("stop", {"refusal": "No."}, "refusal"),
        ("stop", {"tool_calls": [call("t", "x", "{}")]}, "tool_use"),
        ("length", {"tool_calls": [call("t", "x", "{}")]}, "max_tokens"),
    ],
)
def test_why_an_answer_ended(finish: str, said: dict[str, Any], stop: str) -> None:
    message = message_of(completion(finish, **said))
    assert (message["stop_reason"], message["stop_sequence"]) == (stop, None)


@pytest.mark.parametrize(
    ("told", "stop"),
    [
        ({"stop_reason": "END"}, ("stop_sequence", "END")),
        ({"matched_stop": "END"}, ("stop_sequence", "END")),
        ({"stop_reason": "other"}, ("end_turn", None)),
        ({"stop_reason": 128009}, ("end_turn", None)),
    ],
)
def test_a_stop_sequence_is_named_where_the_server_tells_it(told: dict[str, Any], stop: tuple[str, str]) -> None:
    chat = completion(content="a")
    chat["choices"][0] |= told
    message = message_of(chat, stops=["END"])
    assert (message["stop_reason"], message["stop_sequence"]) == stop


@pytest.mark.parametrize(
    ("arguments", "read_so_far"),
    [
        ('{"word": "w", "more": "cut', {"word": "w"}),
        ("", {}),
        ("[1", {}),
        ("raw", {}),
    ],
)
def test_a_call_cut_by_the_output_limit_holds_what_can_be_read(arguments: str, read_so_far: dict[str, Any]) -> None:
    message = message_of(completion("length", tool_calls=[call("t1", "look_up", arguments)]))
    assert message["content"] == [tool_use("t1", **read_so_far)]
    assert message["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("arguments", ["raw", "[1]", '{"word":'])
def test_a_finished_call_whose_arguments_are_no_object_is_an_error(arguments: str) -> None:
    with pytest.raises(UpstreamReplyError, match="'look_up'") as failed:
        message_of(completion("tool_calls", tool_calls=[call("t1", "look_up", arguments)]))
    assert failed.value.code == "invalid_tool_call"


@pytest.mark.behaviour("MS-10")
@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        (None, {"input_tokens": None, "output_tokens": None}),
        ({"input_tokens": None}, {"input_tokens": None, "output_tokens": None}),
        ({"input_tokens": 3, "output_tokens": 2}, {"input_tokens": 3, "output_tokens": 2}),
        (
            {
                "input_tokens": 30,
                "input_tokens_details": {"cached_tokens": 20},
                "output_tokens": 9,
                "output_tokens_details": {"reasoning_tokens": 4},
            },
            {
                "input_tokens": 10,
                "cache_read_input_tokens": 20,
                "output_tokens": 9,
                "output_tokens_details": {"thinking_tokens": 4},
            },
        ),
    ],
)
def test_usage_is_what_the_upstream_counted(usage: Any, counts: dict[str, Any]) -> None:
    assert message_usage(usage) == counts


def test_a_response_of_another_server_is_read_too() -> None:
    message = read(
        response(
            {"type": "reasoning", "id": "rs_1", "summary": [{"text": "One."}, {"text": "Two."}]},
            {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "zzz"},
            {"type": "reasoning", "id": "rs_3", "summary": []},
            {"type": "message", "content": [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]},
        )
    )
    kinds = [block["type"] for block in message["content"]]
    assert kinds == ["thinking", "redacted_thinking", "text", "text"]
    assert message["content"][0]["thinking"] == "One.\n\nTwo."
    assert opened(message["content"][1]["data"]) == {"id": "rs_2", "encrypted_content": "zzz"}
    assert message["stop_reason"] == "refusal"


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (response(status="failed", error={"code": "rate_limit_exceeded", "message": "slow"}), "rate_limit_exceeded"),
        (response(status="failed"), "server_error"),
        (response({"type": "web_search_call", "id": "ws"}), "unsupported_output"),
        (response({"type": "message", "content": [{"type": "image"}]}), "unsupported_output"),
        (response({"type": "message", "content": [{"type": "output_text", "text": 1}]}), "invalid_reply"),
        (response({"type": "message"}), "invalid_reply"),
        ({"output": []}, "invalid_reply"),
        ({"status": "completed", "output": ["x"]}, "invalid_reply"),
    ],
)
def test_what_is_no_answer_is_an_error(given: dict[str, Any], code: str) -> None:
    with pytest.raises(UpstreamReplyError) as failed:
        read(given)
    assert failed.value.code == code


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (409, "conflict_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "api_error"),
        (504, "timeout_error"),
        (529, "overloaded_error"),
    ],
)
def test_an_error_has_the_apis_own_name(status: int, kind: str) -> None:
    assert error_type(status) == kind
    assert error_body(str(status), "no")["error"] == {
        "type": kind,
        "message": "no",
        "details": {"error_code": str(status)},
    }


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("context_length_exceeded", "invalid_request_error"),
        ("rate_limit_exceeded", "rate_limit_error"),
        ("anything", "api_error"),
        ("17", "api_error"),
    ],
)
def test_a_code_tells_what_kind_of_error_it_is(code: str, kind: str) -> None:
    assert error_body(code, "no")["error"]["type"] == kind
    assert error_body(code, "no", "overloaded_error")["error"]["type"] == "overloaded_error"
