"""What the close tells about a run: its model calls, usage and tool calls, from the sealed capture."""

from collections import defaultdict
from typing import Any, Final

import orjson

from services.agent.record import RunEnd
from shared.contracts.capture import Capture, ModelCall, summed_usage

NOT_RUN_GAP: Final = "harness_not_run"
NO_CALLS_GAP: Final = "model_calls_unavailable"
USAGE_GAP: Final = "partial_model_usage_unavailable"
JOIN_GAP: Final = "model_call_join_key_unavailable"


def not_run() -> bytes:
    """For a session that was never activated."""
    return orjson.dumps({"model_calls": [], "usage": None, "tool_calls": [], "gaps": [NOT_RUN_GAP]})


def observe(capture: Capture, end: RunEnd) -> bytes:
    """As JSON. What cannot be told exactly is null, and a gap names it."""
    calls = [call for call in capture.calls if call.phase == "agent"]
    gaps = list(end.gaps)
    usage = summed_usage(capture)
    if not calls:
        gaps.append(NO_CALLS_GAP)
    elif usage is None:
        gaps.append(USAGE_GAP)
    joined = [_joined(tool_call, _owners(calls)) for tool_call in end.tool_calls] if end.tool_calls else []
    if any(tool_call["model_call"] is None for tool_call in joined):
        gaps.append(JOIN_GAP)
    return orjson.dumps(
        {
            "model_calls": [_told(call) for call in calls],
            "usage": None if usage is None else usage.model_dump(mode="json"),
            "tool_calls": joined,
            "gaps": gaps,
        }
    )


def _owners(calls: list[ModelCall]) -> dict[str, list[str]]:
    """Which model calls asked for each tool call."""
    owners: dict[str, list[str]] = defaultdict(list)
    for call in calls:
        for call_id in call.call_ids:
            owners[call_id].append(call.call_id)
    return owners


def _joined(tool_call: dict[str, Any], owners: dict[str, list[str]]) -> dict[str, Any]:
    asked_by = owners.get(str(tool_call.get("call_id")), [])
    return {**tool_call, "model_call": asked_by[0] if len(asked_by) == 1 else None}


def _told(call: ModelCall) -> dict[str, Any]:
    """The call without its bodies and what it was asked with: those stay in the capture."""
    return {
        "call_id": call.call_id,
        "response_id": call.response_id,
        "response_status": call.response_status,
        "model": call.model,
        "status": call.status,
        "upstream_status": call.upstream_status,
        "error_category": call.error_category,
        "error_code": call.error_code,
        "attempts": call.attempts,
        "started_at": call.started_at,
        "ended_at": call.ended_at,
        "usage": None if call.usage is None else call.usage.model_dump(mode="json"),
    }
