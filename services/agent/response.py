"""The Responses object that an activation answers, built from what the run produced."""

import secrets
from typing import Any

import orjson

from shared.contracts.failure import FailureCause
from shared.ports.harness import HarnessEnd, Progress

# Of the request: what a Responses object repeats where the request set it.
_ECHOED = (
    "instructions", "max_output_tokens", "max_tool_calls", "prompt_cache_key", "reasoning", "safety_identifier",
    "service_tier", "temperature", "text", "top_logprobs", "top_p", "truncation", "user",
)  # fmt: skip

INTERRUPTED = "interrupted"


def build_response(
    request: dict[str, Any], progress: Progress, end: HarnessEnd, *, model: str, created_at: float
) -> bytes:
    """As JSON. `model` is the configured name, given where the model did not say its own."""
    response: dict[str, Any] = {
        "id": f"resp_{secrets.token_hex(16)}",
        "object": "response",
        "created_at": int(created_at),
        "status": end.status,
        "model": progress.model or model,
        "output": progress.output or [_empty_message()],
        "usage": summed_usage(progress.usages),
        "error": _error(end),
        "incomplete_details": {"reason": end.incomplete_reason} if end.incomplete_reason else None,
        "metadata": request.get("metadata") or {},
        "parallel_tool_calls": request.get("parallel_tool_calls") is not False,
        "tool_choice": request.get("tool_choice") or "auto",
        "tools": progress.tools or request.get("tools") or [],
    }
    response |= {name: request[name] for name in _ECHOED if request.get(name) is not None}
    if end.cause is not None:
        response["failure_cause"] = end.cause.model_dump(mode="json", exclude_none=True)
    return orjson.dumps(response)


def interrupted_response(request: dict[str, Any], progress: Progress, *, model: str, created_at: float) -> bytes | None:
    """What there was when the run had to end; None when it had produced nothing."""
    if not progress.output:
        return None
    end = HarnessEnd(status="incomplete", incomplete_reason=INTERRUPTED)
    return build_response(request, progress, end, model=model, created_at=created_at)


def summed_usage(usages: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Over all model calls; null as soon as one of them has no counts."""
    known = [usage for usage in usages if usage is not None]
    if not known or len(known) != len(usages):
        return None
    total: dict[str, Any] = {}
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        counts = [usage.get(name) for usage in known]
        if not all(isinstance(count, int) for count in counts):
            return None
        total[name] = sum(count for count in counts if count is not None)
    for details, name in (("input_tokens_details", "cached_tokens"), ("output_tokens_details", "reasoning_tokens")):
        counts = [(usage.get(details) or {}).get(name) for usage in known]
        known_counts = [count for count in counts if isinstance(count, int)]
        total[details] = {name: sum(known_counts) if len(known_counts) == len(counts) else None}
    return total


def _error(end: HarnessEnd) -> dict[str, Any] | None:
    if end.status != "failed":
        return None
    cause: FailureCause | None = end.cause
    if cause is None:
        return {"code": "server_error", "message": "The harness failed without saying why."}
    code = cause.origin.code if cause.origin is not None else None
    return {"code": code or cause.failure_kind.value, "message": cause.reason}


def _empty_message() -> dict[str, Any]:
    return {
        "id": f"msg_{secrets.token_hex(16)}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "", "annotations": []}],
    }
