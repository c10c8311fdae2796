"""A Responses object → a message of the Messages API, and the parts of that which the stream shares."""

from collections.abc import Collection, Mapping
from typing import Any

import orjson
from pydantic_core import from_json

from services.model_proxy.bridge.content import type_of
from services.model_proxy.bridge.messages_thinking import signature_of, thinking_text
from services.model_proxy.bridge.refusals import UpstreamReplyError

_NO_COUNTS = {"input_tokens": None, "output_tokens": None}


def message_envelope(model: str, message_id: str) -> dict[str, Any]:
    """A message under way: nothing is said and nothing counted yet."""
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }


def to_message(
    response: Mapping[str, Any], *, model: str, message_id: str, matched_stop: str | None = None
) -> dict[str, Any]:
    """Translate a whole response. `matched_stop`: the stop sequence that ended it, where the upstream told.

    Raises:
        UpstreamReplyError: it has failed, is no response, or holds what no content block can.
    """
    try:
        if response["status"] == "failed":
            raise failure_of(response)
        content = [block for item in response["output"] for block in _blocks(item)]
        refused = any(part["type"] == "refusal" for item in response["output"] for part in item.get("content") or ())
    except (AttributeError, KeyError, TypeError) as error:
        raise UpstreamReplyError(
            f"The upstream's answer is not a response: {type(error).__name__}: {error}", "invalid_reply"
        ) from error
    calls = any(block["type"] == "tool_use" for block in content)
    return {
        **message_envelope(model, message_id),
        "content": content,
        **stop_of(response, calls=calls, refused=refused, matched_stop=matched_stop),
        "usage": message_usage(response.get("usage")),
    }


def failure_of(response: Mapping[str, Any]) -> UpstreamReplyError:
    """The error of a failed response."""
    error = response.get("error") or {}
    message = error.get("message") or "The upstream reported a failed response without a message."
    return UpstreamReplyError(str(message), str(error.get("code") or "server_error"))


def stop_of(
    response: Mapping[str, Any], *, calls: bool, refused: bool, matched_stop: str | None
) -> dict[str, str | None]:
    """Why the answer ended, as the two fields of a message."""
    details = response.get("incomplete_details") or {}
    reason, sequence = "end_turn", None
    if details:
        reason = "refusal" if details.get("reason") == "content_filter" else "max_tokens"
    elif calls:
        reason = "tool_use"
    elif refused:
        reason = "refusal"
    elif matched_stop is not None:
        reason, sequence = "stop_sequence", matched_stop
    return {"stop_reason": reason, "stop_sequence": sequence}


def message_usage(usage: Any) -> dict[str, Any]:
    """Counts of a message; null where the upstream gave none. Tokens read from a cache are counted apart here."""
    if not isinstance(usage, dict) or not isinstance(usage.get("input_tokens"), int):
        return dict(_NO_COUNTS)
    cached = _detail(usage, "input_tokens_details", "cached_tokens")
    counts: dict[str, Any] = {
        "input_tokens": usage["input_tokens"] - (cached or 0),
        "output_tokens": usage.get("output_tokens"),
    }
    if cached is not None:
        counts["cache_read_input_tokens"] = cached
    thinking = _detail(usage, "output_tokens_details", "reasoning_tokens")
    if thinking is not None:
        counts["output_tokens_details"] = {"thinking_tokens": thinking}
    return counts


def _detail(usage: dict[str, Any], details: str, name: str) -> int | None:
    given = usage.get(details)
    count = given.get(name) if isinstance(given, dict) else None
    return count if isinstance(count, int) else None


def matched_stop_of(choice: Mapping[str, Any], stops: Collection[str]) -> str | None:
    """The stop sequence that a chat choice names: servers that tell it have two names for it."""
    for name in ("stop_reason", "matched_stop"):
        told = choice.get(name)
        if isinstance(told, str) and told in stops:
            return told
    return None


def thinking_block(item: dict[str, Any], text: str) -> dict[str, Any] | None:
    """The block of a reasoning item; one without a word is opaque, or nothing at all."""
    if text:
        return {"type": "thinking", "thinking": text, "signature": signature_of(item)}
    if item.get("encrypted_content"):
        return {"type": "redacted_thinking", "data": signature_of(item)}
    return None


def text_of_part(part: dict[str, Any]) -> str:
    """
    Raises:
        UpstreamReplyError: it is neither text nor a refusal.
    """
    if part["type"] not in ("output_text", "refusal"):
        raise _without_form(part["type"])
    text = part["refusal" if part["type"] == "refusal" else "text"]
    if not isinstance(text, str):
        raise TypeError(f"a text is {text!r}")
    return text


def tool_use_block(item: dict[str, Any], arguments: str) -> dict[str, Any]:
    """The block of a call. An unfinished one holds what can be read of its input, as its stop reason tells.

    Raises:
        UpstreamReplyError: the arguments of a finished call are no JSON object.
    """
    name = item["name"]
    return {"type": "tool_use", "id": item["call_id"], "name": name, "input": _input(item, name, arguments)}


def _input(item: dict[str, Any], name: str, arguments: str) -> dict[str, Any]:
    if not arguments.strip():
        return {}
    try:
        if item.get("status") == "incomplete":
            value = from_json(arguments, allow_partial=True)
            return value if isinstance(value, dict) else {}
        value = orjson.loads(arguments)
    except ValueError as error:
        if item.get("status") == "incomplete":
            return {}
        raise _no_object(name) from error
    if not isinstance(value, dict):
        raise _no_object(name)
    return value


def _no_object(name: str) -> UpstreamReplyError:
    return UpstreamReplyError(
        f"The upstream called the tool {name!r} with arguments that are no JSON object; a tool_use block holds"
        " nothing else.",
        "invalid_tool_call",
    )


def _without_form(kind: Any) -> UpstreamReplyError:
    return UpstreamReplyError(
        f"The upstream's answer holds {kind!r}, which has no form in the Messages API.", "unsupported_output"
    )


def block_type(item: dict[str, Any]) -> str:
    """The type of the blocks that an output item becomes.

    Raises:
        UpstreamReplyError: it becomes none.
    """
    kind = _BLOCKS.get(type_of(item))
    if kind is None:
        raise _without_form(item.get("type"))
    return kind


_BLOCKS = {"message": "text", "reasoning": "thinking", "function_call": "tool_use"}


def _blocks(item: dict[str, Any]) -> list[dict[str, Any]]:
    kind = block_type(item)
    if kind == "tool_use":
        return [tool_use_block(item, item["arguments"])]
    if kind == "thinking":
        block = thinking_block(item, thinking_text(item))
        return [] if block is None else [block]
    texts = [text_of_part(part) for part in item["content"]]
    return [{"type": "text", "text": text} for text in texts if text]
