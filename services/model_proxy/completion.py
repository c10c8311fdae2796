"""Chat chunks ↔ the chat completion that they amount to: for the capture of a stream that passes through, and
for servers that answer a call for a stream with a whole."""

from collections.abc import AsyncIterator
from typing import Any

import orjson

from services.model_proxy.failures import unusable

# Text that arrives in pieces, and lists that do.
_TEXTS = ("content", "reasoning", "reasoning_content", "refusal")


class Completion:
    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    @property
    def finished(self) -> bool:
        """Every choice that began has ended."""
        return bool(self._choices) and all(choice["finish_reason"] for choice in self._choices.values())

    def take(self, chunk: dict[str, Any]) -> None:
        for name, value in chunk.items():
            if name not in {"choices", "object"} and value is not None:
                self._head[name] = value
        for part in chunk.get("choices") or ():
            if isinstance(part, dict):
                self._take_choice(part)

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, choice in sorted(self._choices.items()):
            message = {**choice["message"]}
            for name in _TEXTS:
                if name in message:
                    message[name] = "".join(message[name])
            if choice["calls"]:
                message["tool_calls"] = [call for _, call in sorted(choice["calls"].items())]
            rest = {name: value for name, value in choice.items() if name not in {"message", "calls"}}
            choices.append({**rest, "index": index, "message": {"role": "assistant", "content": None, **message}})
        return {**self._head, "object": "chat.completion", "choices": choices}

    def _take_choice(self, part: dict[str, Any]) -> None:
        index = part.get("index") or 0
        choice = self._choices.setdefault(index, {"message": {}, "calls": {}, "finish_reason": None})
        delta = part.get("delta") or {}
        for name in _TEXTS:
            if isinstance(delta.get(name), str):
                choice["message"].setdefault(name, []).append(delta[name])
        for fragment in delta.get("tool_calls") or ():
            _take_call(choice["calls"], fragment)
        if part.get("finish_reason"):
            choice["finish_reason"] = part["finish_reason"]
        if isinstance(part.get("token_ids"), list):
            choice.setdefault("token_ids", []).extend(part["token_ids"])
        if isinstance((part.get("logprobs") or {}).get("content"), list):
            choice.setdefault("logprobs", {"content": []})["content"].extend(part["logprobs"]["content"])


def _take_call(calls: dict[int, dict[str, Any]], fragment: dict[str, Any]) -> None:
    function = fragment.get("function") or {}
    call = calls.setdefault(
        fragment.get("index") or 0, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
    )
    call["id"] = call["id"] or fragment.get("id")
    call["function"]["name"] = call["function"]["name"] or function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""


async def one_event(body: bytes, model: str) -> AsyncIterator[bytes]:
    """A whole chat completion as a stream of one chunk.

    Raises:
        ModelCallError: it is not a chat completion.
    """
    try:
        whole = orjson.loads(body)
        for choice in whole.get("choices") or ():
            choice["delta"] = choice.pop("message")
            for index, call in enumerate(choice["delta"].get("tool_calls") or ()):
                call.setdefault("index", index)
    except (AttributeError, KeyError, TypeError, orjson.JSONDecodeError) as error:
        message = f"The server of model '{model}' answered a call for a stream with something else."
        raise unusable(message, "invalid_reply") from error
    yield b"data: " + orjson.dumps(whole) + b"\n\n"
    yield b"data: [DONE]\n\n"
