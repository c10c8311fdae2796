"""Messages requests and answers for the tests, and a stream played to its end."""

from collections.abc import Iterable
from typing import Any

import pytest

from services.model_proxy.bridge.capabilities import PROFILES, Capabilities
from services.model_proxy.bridge.messages_reply import matched_stop_of, to_message
from services.model_proxy.bridge.messages_request import MessagesRequest, Speaks, from_messages, messages_to_chat
from services.model_proxy.bridge.messages_stream import ChatMessagesStream, MessagesStream
from services.model_proxy.bridge.names import NameMap
from services.model_proxy.bridge.refusals import RequestError
from services.model_proxy.bridge.request import ChatRequest
from services.model_proxy.bridge.stream import ChatStream
from tests.bridge.chats import PLAIN, answer, asking, ids

LOOK = {
    "name": "look_up",
    "description": "Looks a word up.",
    "input_schema": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


def messaging(*messages: Any, **fields: Any) -> dict[str, Any]:
    given = messages or ({"role": "user", "content": "hi"},)
    return {"model": "m", "max_tokens": 64, "messages": [*given], **fields}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*blocks]}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [*blocks]}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def tool_use(call_id: str, name: str = "look_up", **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}


def tool_result(call_id: str, content: Any = "found", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


def responses_of(
    request: dict[str, Any],
    *,
    speaks: Speaks = "chat_completions",
    capabilities: Capabilities = PLAIN,
    profile: str = "openai",
) -> MessagesRequest:
    return from_messages(request, speaks=speaks, capabilities=capabilities, profile=PROFILES[profile])


def refusal(request: dict[str, Any], **how: Any) -> RequestError:
    with pytest.raises(RequestError) as refused:
        responses_of(request, **how)
    assert refused.value.param in refused.value.message
    return refused.value


def chat_of(
    request: dict[str, Any],
    *,
    capabilities: Capabilities = PLAIN,
    profile: str = "openai",
    defaults: dict[str, Any] | None = None,
    overrides: dict[str, Any] | None = None,
) -> ChatRequest:
    return messages_to_chat(
        responses_of(request, capabilities=capabilities, profile=profile),
        model="upstream-model",
        capabilities=capabilities,
        profile=PROFILES[profile],
        defaults=defaults or {},
        overrides=overrides or {},
    )


def message_of(
    chat: dict[str, Any], *, names: NameMap | None = None, stops: Iterable[str] = (), capabilities: Capabilities = PLAIN
) -> dict[str, Any]:
    """The message that a whole chat completion amounts to."""
    response = answer(chat, names=names, capabilities=capabilities)
    matched = matched_stop_of(chat["choices"][0], [*stops])
    return to_message(response, model="m", message_id="msg_1", matched_stop=matched)


class PlayedMessages:
    """A stream of chat chunks, or of Responses events, played to its end."""

    def __init__(
        self,
        fed: Iterable[dict[str, Any]],
        *,
        responses: bool = False,
        names: NameMap | None = None,
        stops: Iterable[str] = (),
        capabilities: Capabilities = PLAIN,
    ) -> None:
        chat = ChatStream(
            request=asking(), names=names or NameMap(), capabilities=capabilities, new_id=ids(), created_at=1000.5
        )
        stream = MessagesStream(model="m", message_id="msg_1")
        if not responses:
            stream = ChatMessagesStream(chat, model="m", message_id="msg_1", stops=[*stops])
        self.events = stream.start()
        for each in fed:
            self.events += stream.feed(each)
        self.events += stream.end()
        self.stream = stream
        self.message = stream.message

    @property
    def kinds(self) -> list[str]:
        return [event["type"] for event in self.events]

    @property
    def error(self) -> dict[str, Any]:
        """The one final event of a failure."""
        assert [kind for kind in self.kinds if kind in ("error", "message_stop")] == ["error"]
        error: dict[str, Any] = self.events[-1]["error"]
        return error

    def told(self) -> list[dict[str, Any]]:
        """The blocks as a client puts them together, with the JSON of inputs as it came."""
        blocks: list[dict[str, Any]] = []
        open_at: int | None = None
        for event in self.events:
            if event["type"] == "content_block_start":
                assert (open_at, event["index"]) == (None, len(blocks))
                open_at = event["index"]
                blocks.append({**event["content_block"], "json": ""})
            elif event["type"] == "content_block_delta":
                assert event["index"] == open_at
                _add(blocks[-1], event["delta"])
            elif event["type"] == "content_block_stop":
                assert event["index"] == open_at
                open_at = None
        return blocks


def _add(block: dict[str, Any], delta: dict[str, Any]) -> None:
    kind = delta["type"]
    if kind == "text_delta":
        block["text"] += delta["text"]
    elif kind == "thinking_delta":
        block["thinking"] += delta["thinking"]
    elif kind == "signature_delta":
        block["signature"] = delta["signature"]
    else:
        assert kind == "input_json_delta"
        block["json"] += delta["partial_json"]
