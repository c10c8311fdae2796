"""Messages of the Messages API → input items of the Responses API.

A tool's result becomes an item of its own, as does each call and each block of thinking; neighbouring text
and images stay one message.
"""

from collections.abc import Callable
from typing import Any

import orjson

from services.model_proxy.bridge.content import type_of
from services.model_proxy.bridge.messages_thinking import opened, reasoning_item_of
from services.model_proxy.bridge.refusals import RequestError

_FAILED = "The tool call failed."


class MessageItems:
    """`take` reads message by message, `items` is the result. `drop` records or refuses a field without a form."""

    def __init__(self, drop: Callable[[str], None], *, keeps_encrypted: bool) -> None:
        self.items: list[dict[str, Any]] = []
        self._drop = drop
        self._keeps_encrypted = keeps_encrypted
        self._call_ids: set[str] = set()
        self._parts: list[dict[str, Any]] = []

    def take(self, message: Any, at: str) -> None:
        """
        Raises:
            RequestError: a part of it has no form in the Responses API, or is not of the Messages API.
        """
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant", "system"):
            raise RequestError(f"'{at}.role' must be 'user', 'assistant' or 'system'.", f"{at}.role", "invalid_value")
        at = f"{at}.content"
        blocks = blocks_of(message.get("content"), at)
        if role == "system":
            text = text_of_blocks(blocks, at)
            self.items.append({"type": "message", "role": "system", "content": text})
            return
        if not blocks and role == "user":
            raise RequestError(f"'{at}' must not be empty.", at, "invalid_value")
        read = self._assistant_block if role == "assistant" else self._user_block
        for index, block in enumerate(blocks):
            read(block, f"{at}[{index}]")
        if not blocks:
            self._parts.append(_said("", "output_text"))
        self._close(role)

    def _user_block(self, block: dict[str, Any], at: str) -> None:
        if type_of(block) == "tool_result":
            self._close("user")
            self._tool_result(block, at)
        else:
            self._parts.append(_part(block, at))

    def _assistant_block(self, block: dict[str, Any], at: str) -> None:
        kind = type_of(block)
        if kind == "text":
            self._parts.append(_said(string(block, "text", at), "output_text"))
            return
        self._close("assistant")
        if kind == "thinking":
            self._thinking(string(block, "thinking", at), block.get("signature"))
        elif kind == "redacted_thinking":
            self._redacted(string(block, "data", at))
        elif kind == "tool_use":
            self._tool_use(block, at)
        else:
            raise _without_form(kind, at, "an assistant message")

    def _thinking(self, text: str, signature: Any) -> None:
        if text:
            self.items.append(reasoning_item_of(text, signature))
        else:
            self._redacted(signature)

    def _redacted(self, data: Any) -> None:
        kept = opened(data)
        if self._keeps_encrypted and kept is not None:
            self.items.append({"type": "reasoning", "summary": [], **kept})
        else:
            self._drop("messages.redacted_thinking")

    def _tool_use(self, block: dict[str, Any], at: str) -> None:
        call_id, name, given = string(block, "id", at), string(block, "name", at), block.get("input")
        if not isinstance(given, dict):
            raise RequestError(f"'{at}.input' must be an object.", f"{at}.input", "invalid_value")
        self._call_ids.add(call_id)
        arguments = orjson.dumps(given).decode()
        self.items.append({"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments})

    def _tool_result(self, block: dict[str, Any], at: str) -> None:
        call_id = string(block, "tool_use_id", at)
        if call_id not in self._call_ids:
            raise RequestError(
                f"'{at}.tool_use_id': no tool_use block before this result has the id {call_id!r}.",
                f"{at}.tool_use_id",
                "invalid_value",
            )
        content, at = block.get("content"), f"{at}.content"
        output: Any = content
        if not isinstance(content, str):
            output = [_part(part, f"{at}[{index}]") for index, part in enumerate(blocks_of(content or [], at))]
        if block.get("is_error") is True:
            output = _as_failed(output)
        self.items.append({"type": "function_call_output", "call_id": call_id, "output": output or ""})

    def _close(self, role: str) -> None:
        """Make a message of the text and images so far."""
        if self._parts:
            self.items.append({"type": "message", "role": role, "content": self._parts})
            self._parts = []


def blocks_of(content: Any, at: str) -> list[dict[str, Any]]:
    """Content as a list of blocks.

    Raises:
        RequestError: it is neither a string nor such a list.
    """
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise RequestError(f"'{at}' must be a string or a list of content blocks.", at, "invalid_value")
    return content


def text_of_blocks(blocks: list[dict[str, Any]], at: str) -> str:
    """The text of content that may hold nothing else.

    Raises:
        RequestError: it does hold something else.
    """
    for index, block in enumerate(blocks):
        if type_of(block) != "text":
            raise RequestError(f"'{at}[{index}]': only text can stand here.", f"{at}[{index}]", "invalid_value")
    return "\n\n".join(string(block, "text", f"{at}[{index}]") for index, block in enumerate(blocks))


def string(block: dict[str, Any], name: str, at: str) -> str:
    """
    Raises:
        RequestError: the field is not a string.
    """
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(f"'{at}.{name}' must be a string.", f"{at}.{name}", "invalid_value")
    return value


def _said(text: str, kind: str) -> dict[str, Any]:
    return {"type": kind, "text": text}


def _part(block: dict[str, Any], at: str) -> dict[str, Any]:
    kind = type_of(block)
    if kind == "text":
        return _said(string(block, "text", at), "input_text")
    if kind == "image":
        return {"type": "input_image", "image_url": _image_url(block.get("source"), f"{at}.source")}
    raise _without_form(kind, at, "a user message or a tool result")


def _image_url(source: Any, at: str) -> str:
    kind = type_of(source)
    if kind == "base64":
        return f"data:{string(source, 'media_type', at)};base64,{string(source, 'data', at)}"
    if kind == "url":
        return string(source, "url", at)
    raise RequestError(
        f"'{at}': an image of source {kind!r} cannot be sent on. Send its data as base64, or its URL.",
        at,
        "unsupported_value",
    )


def _as_failed(output: Any) -> Any:
    """A failure has no field of its own beyond this API, so the output says it."""
    if isinstance(output, list):
        return [_said(_FAILED, "input_text"), *output]
    return f"{_FAILED}\n{output}"


def _without_form(kind: str, at: str, where: str) -> RequestError:
    if kind == "document":
        advice = "Send its text as a text block, or its pages as images."
    else:
        advice = "Known: text, image and tool_result of users, text, thinking and tool_use of assistants."
    return RequestError(
        f"'{at}': a block of type {kind!r} in {where} cannot be sent to this model's server. {advice}",
        at,
        "unsupported_value",
    )
