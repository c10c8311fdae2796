"""The Responses API as the mesh reads it. Field names: OpenAI's API reference, `POST /v1/responses`.

Requests are checked for known names and outer shapes; items stay dictionaries, because a harness may
send forms that only its model understands and the mesh passes them on as they came.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from shared.contracts.contract import Contract, OpenContract
from shared.contracts.failure import FailureCause


def _item(value: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(value.get("type", value.get("role")), str):
        raise ValueError("an input item needs a 'type' or a 'role'")  # noqa: TRY004 - pydantic reports ValueError
    return value


InputItem = Annotated[dict[str, Any], AfterValidator(_item)]


class ResponsesCreateParams(Contract):
    """A request. Only fields that were set travel on (`model_dump(exclude_unset=True)`)."""

    input: str | Annotated[list[InputItem], Field(min_length=1)]
    background: bool | None = None
    client_metadata: dict[str, Any] | None = None
    context_management: Any = None
    conversation: Any = None
    include: list[str] | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    metadata: dict[str, Any] | None = None
    model: str | None = None
    moderation: Any = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    prompt: Any = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    reasoning: dict[str, Any] | None = None
    safety_identifier: str | None = None
    seed: int | None = None
    service_tier: str | None = None
    stop: str | list[str] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    text: dict[str, Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    truncation: str | None = None
    user: str | None = None


class InputTokensDetails(OpenContract):
    cached_tokens: int | None = None


class OutputTokensDetails(OpenContract):
    reasoning_tokens: int | None = None


class Usage(OpenContract):
    """Token counts. A count that is not known is null, never a made-up zero."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputTokensDetails | None = None
    output_tokens_details: OutputTokensDetails | None = None


class AgentResponse(OpenContract):
    """What an activation answers: a Responses object, with `failure_cause` when it failed for a known reason."""

    id: str
    object: Literal["response"] = "response"
    status: Literal["completed", "incomplete", "failed"]
    output: list[dict[str, Any]]
    usage: Usage | None = None
    incomplete_details: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    failure_cause: FailureCause | None = None


_TEXT_PARTS = frozenset({"output_text", "text"})


def output_text(response: dict[str, Any]) -> str:
    """The text of the last assistant message that says anything: what answer verifiers grade."""
    for item in reversed(response.get("output") or []):
        if item.get("type", "message") == "message" and item.get("role", "assistant") == "assistant":
            content = item.get("content")
            if not isinstance(content, str):
                parts = content or []
                content = "".join(part.get("text") or "" for part in parts if part.get("type") in _TEXT_PARTS)
            if content.strip():
                return content
    return ""
