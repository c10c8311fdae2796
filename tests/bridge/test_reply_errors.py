"""Answers with status 200 that are none: an error object, a form that is not Chat Completions."""

from typing import Any

import pytest

from services.model_proxy.bridge.refusals import UpstreamReplyError
from services.model_proxy.bridge.response import reply_error
from tests.bridge.chats import PLAIN, answer, call, completion


@pytest.mark.parametrize(
    ("body", "message", "code"),
    [
        ({"error": {"message": "boom", "code": 502}}, "boom", "502"),
        ({"error": {"message": "boom", "type": "overloaded"}}, "boom", "overloaded"),
        ({"error": {}, "object": "error"}, "The upstream reported", "server_error"),
        ({"error": "boom"}, "boom", "server_error"),
        ({"object": "error", "message": "boom", "code": 400}, "boom", "400"),
        ({"error": {"message": "This model's maximum context length is 8"}}, "maximum", "context_length_exceeded"),
        ({"error": {"message": "no", "code": "context_length_exceeded"}}, "no", "context_length_exceeded"),
    ],
)
def test_an_error_in_the_body_is_an_error(body: dict[str, Any], message: str, code: str) -> None:
    with pytest.raises(UpstreamReplyError, match=message) as error:
        answer(body)
    assert error.value.code == code
    assert reply_error(completion(content="x"), PLAIN) is None


@pytest.mark.parametrize(
    "body",
    [
        [],
        {},
        {"choices": []},
        {"choices": [{"finish_reason": "stop"}]},
        {"choices": [{"finish_reason": "stop", "message": {"content": 7}}]},
        {"choices": [{"finish_reason": "stop", "message": {"tool_calls": ["x"]}}]},
        {"choices": [{"finish_reason": "stop", "message": {"tool_calls": [call("c", "", "{}") | {"id": 7}]}}]},
    ],
)
def test_what_is_no_chat_completion_is_an_error(body: Any) -> None:
    with pytest.raises(UpstreamReplyError, match="not a chat completion") as error:
        answer(body)
    assert error.value.code == "invalid_reply"
