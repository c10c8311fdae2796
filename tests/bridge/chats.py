"""Builders for the bridge's tests: requests, chat chunks, and the answers that come of them."""

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

from hypothesis import settings

from services.model_proxy.bridge.capabilities import PROFILES, Capabilities
from services.model_proxy.bridge.names import NameMap
from services.model_proxy.bridge.request import ChatRequest, to_chat
from services.model_proxy.bridge.response import to_responses
from services.model_proxy.bridge.stream import ChatStream

LOOK_UP = {
    "type": "function",
    "name": "look_up",
    "description": "Looks a word up.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
}
SHELL = {"type": "custom", "name": "shell", "description": "Runs a script."}
PLAIN = Capabilities()
# A busy machine is no finding.
unhurried = settings(deadline=None)
MINTED = ("id", "call_id")


def ids() -> Callable[[str], str]:
    numbers = count(1)
    return lambda prefix: f"{prefix}_{next(numbers)}"


def chat_of(
    request: dict[str, Any],
    *,
    capabilities: Capabilities = PLAIN,
    profile: str = "openai",
    defaults: dict[str, Any] | None = None,
    overrides: dict[str, Any] | None = None,
) -> ChatRequest:
    return to_chat(
        request,
        model="upstream-model",
        capabilities=capabilities,
        profile=PROFILES[profile],
        defaults=defaults or {},
        overrides=overrides or {},
    )


def asking(given: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "input": given, **fields}


def names_of(*tools: dict[str, Any]) -> NameMap:
    return chat_of(asking(tools=list(tools))).names


def chunk(finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}],
    }


def piece(index: int | None, arguments: str | None = None, **fields: Any) -> dict[str, Any]:
    """One entry of `delta.tool_calls`; `id` and `name` as they are given."""
    function = {name: fields.pop(name) for name in ("name",) if name in fields}
    if arguments is not None:
        function["arguments"] = arguments
    return {**({} if index is None else {"index": index}), **fields, "function": function}


USAGE_CHUNK = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}}


class Played:
    """A stream played to its end."""

    def __init__(
        self,
        chunks: Iterable[dict[str, Any]],
        *,
        request: dict[str, Any] | None = None,
        names: NameMap | None = None,
        capabilities: Capabilities = PLAIN,
    ) -> None:
        stream = ChatStream(
            request=request or asking(),
            names=names or NameMap(),
            capabilities=capabilities,
            new_id=ids(),
            created_at=1000.5,
        )
        self.events = stream.start()
        for each in chunks:
            self.events += stream.feed(each)
        self.events += stream.end()
        self.stream = stream
        self.response = stream.response
        self.output: list[dict[str, Any]] = stream.response["output"]

    @property
    def kinds(self) -> list[str]:
        return [event["type"].removeprefix("response.") for event in self.events]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == f"response.{kind}"]

    def done_items(self) -> list[dict[str, Any]]:
        done = sorted(self.of("output_item.done"), key=lambda event: event["output_index"])
        return [event["item"] for event in done]


def completion(finish_reason: str | None = "stop", **message: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "upstream-model",
        "choices": [
            {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish_reason},
        ],
        "usage": {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13},
    }


def answer(
    chat: dict[str, Any],
    *,
    request: dict[str, Any] | None = None,
    names: NameMap | None = None,
    capabilities: Capabilities = PLAIN,
) -> dict[str, Any]:
    return to_responses(
        chat,
        request=request or asking(),
        names=names or NameMap(),
        capabilities=capabilities,
        new_id=ids(),
        created_at=1000.5,
    )


def call(call_id: str | None, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def without_minted(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in MINTED} for item in output]


def text_of(item: dict[str, Any]) -> str:
    return "".join(str(part.get("text", part.get("refusal"))) for part in item["content"])
