"""The record of every model call of an episode, kept by the model proxy under the episode's key."""

from enum import StrEnum
from typing import Any, Literal

from shared.contracts.contract import Contract
from shared.contracts.responses import Usage

Dialect = Literal["responses", "chat_completions", "messages"]
Phase = Literal["agent", "verify"]


class ErrorCategory(StrEnum):
    """Why a call did not end well; low cardinality."""

    TIMEOUT = "timeout"
    RATE_LIMIT = "rate_limit"
    AUTH = "auth"
    NOT_FOUND = "not_found"
    CLIENT_ERROR = "client_error"
    UPSTREAM_ERROR = "upstream_error"
    CONNECTION = "connection"
    CANCELLED = "cancelled"
    INCOMPLETE = "incomplete"
    TRUNCATED_STREAM = "truncated_stream"
    CAPTURE_PARSE_ERROR = "capture_parse_error"
    LOST = "lost"


class ModelCall(Contract):
    """One call. Times are Unix seconds; `status` is what the caller was given, null when it left before.

    A call without `ended_at` has begun and was not recorded since: it is under way, or, with the category
    `lost`, the proxy that made it has died or could not reach the store when the capture was sealed. What it
    used is not known; its record may still come, and then takes this one's place.

    `session` is that of the session token, empty for the mesh's own calls. `instance` is that of the proxy
    that made the call.

    `output_ids` are the ids of the output items and `call_ids` those of the tool calls in them:
    what joins a harness's own records to this call exactly. `left_out` names bodies that were too large
    to keep.
    """

    call_id: str
    phase: Phase
    session: str = ""
    instance: str = ""
    dialect: Dialect
    model: str
    stream: bool
    started_at: float
    first_byte_at: float | None = None
    ended_at: float | None = None
    attempts: int = 1
    status: int | None = None
    upstream_status: int | None = None
    error_category: ErrorCategory | None = None
    error_code: str | None = None
    error_excerpt: str | None = None
    response_id: str | None = None
    response_status: str | None = None
    output_ids: tuple[str, ...] = ()
    call_ids: tuple[str, ...] = ()
    usage: Usage | None = None
    effective: dict[str, Any] = {}
    dropped_fields: tuple[str, ...] = ()
    request: dict[str, Any] | None = None
    response: dict[str, Any] | None = None
    left_out: tuple[Literal["request", "response"], ...] = ()


class Capture(Contract):
    """All calls of one key: in the order in which they ended, then those that have only begun.

    `damaged` counts records that do not parse.
    """

    key: str
    sealed: bool
    calls: tuple[ModelCall, ...] = ()
    damaged: int = 0


def of_session(capture: Capture, session: str) -> Capture:
    """The capture without the calls of other sessions: a run that died may have left some under the same key."""
    calls = tuple(call for call in capture.calls if call.phase != "agent" or call.session in {session, ""})
    return capture.model_copy(update={"calls": calls})


def summed_usage(capture: Capture, phase: Phase = "agent") -> Usage | None:
    """Usage over the phase's calls; null as soon as one call lacks a count, or its end, or a record is damaged."""
    calls = [call for call in capture.calls if call.phase == phase]
    if capture.damaged or not calls or any(call.usage is None for call in calls):
        return None
    usages = [call.usage for call in calls if call.usage is not None]
    cached = [u.input_tokens_details.cached_tokens if u.input_tokens_details else None for u in usages]
    reasoning = [u.output_tokens_details.reasoning_tokens if u.output_tokens_details else None for u in usages]
    return Usage.model_validate(
        {
            "input_tokens": sum(u.input_tokens for u in usages),
            "output_tokens": sum(u.output_tokens for u in usages),
            "total_tokens": sum(u.total_tokens for u in usages),
            "input_tokens_details": {"cached_tokens": _sum_known(cached)},
            "output_tokens_details": {"reasoning_tokens": _sum_known(reasoning)},
        }
    )


def _sum_known(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
