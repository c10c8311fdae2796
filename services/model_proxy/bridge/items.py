"""Output items of the Responses API, as both forms of an answer build them, and the counts beside them."""

from typing import Any

from services.model_proxy.bridge.names import ToolName

CALL_ID_PREFIXES = {"function": "fc", "custom": "ctc", "tool_search": "tsc"}
CALL_TYPES = {"function": "function_call", "custom": "custom_tool_call", "tool_search": "tool_search_call"}
CALL_PAYLOADS = {"function": "arguments", "custom": "input", "tool_search": "arguments"}


def text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def refusal_part(text: str) -> dict[str, Any]:
    return {"type": "refusal", "refusal": text}


def reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def message_item(item_id: str, parts: list[dict[str, Any]], status: str) -> dict[str, Any]:
    return {"type": "message", "id": item_id, "status": status, "role": "assistant", "content": parts}


def reasoning_item(item_id: str, parts: list[dict[str, Any]], status: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": item_id, "status": status, "summary": [], "content": parts}


def call_item(tool: ToolName, item_id: str, call_id: str, payload: Any, status: str) -> dict[str, Any]:
    """`payload` is the arguments' text, a custom tool's raw input, or the arguments of a tool search."""
    item = {"type": CALL_TYPES[tool.kind], "id": item_id, "call_id": call_id, "status": status}
    if tool.kind == "tool_search":
        item["execution"] = "client"
    else:
        item["name"] = tool.name
    if tool.namespace:
        item["namespace"] = tool.namespace
    item[CALL_PAYLOADS[tool.kind]] = payload
    return item


def text_logprobs(tokens: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Chat log-probabilities in Responses form (the two differ in what may be left out)."""
    return [
        {
            "token": token["token"],
            "logprob": token["logprob"],
            "bytes": token.get("bytes") or [],
            "top_logprobs": [
                {"token": top["token"], "logprob": top["logprob"], "bytes": top.get("bytes") or []}
                for top in token.get("top_logprobs") or ()
            ],
        }
        for token in tokens
    ]


def usage_of(usage: Any) -> dict[str, Any] | None:
    """Responses usage; null when a count is missing, and null details where the upstream gave none."""
    if not isinstance(usage, dict):
        return None
    read, written = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if not isinstance(read, int) or not isinstance(written, int):
        return None
    total = usage.get("total_tokens")
    return {
        "input_tokens": read,
        "input_tokens_details": _detail(usage.get("prompt_tokens_details"), "cached_tokens"),
        "output_tokens": written,
        "output_tokens_details": _detail(usage.get("completion_tokens_details"), "reasoning_tokens"),
        "total_tokens": total if isinstance(total, int) else read + written,
    }


def _detail(details: Any, name: str) -> dict[str, int] | None:
    count = details.get(name) if isinstance(details, dict) else None
    return {name: count} if isinstance(count, int) else None
