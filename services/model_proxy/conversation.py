"""One call between the caller's dialect and the upstream's: what both ways of relaying it offer.

`bridged.py` translates between dialects, `passed.py` lets the upstream's own bytes through.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from services.model_proxy.bridge.items import usage_of
from services.model_proxy.failures import category_of_code
from shared.contracts.capture import Dialect, ErrorCategory

# Request fields that say how the model samples, in either dialect; their effective values are recorded.
_SAMPLING: Final = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "max_output_tokens", "stop",
    "seed", "n", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "logprobs",
    "top_logprobs", "reasoning_effort", "reasoning", "chat_template_kwargs",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Facts:
    """What the capture keeps of an answer beside its bytes."""

    response_id: str | None = None
    response_status: str | None = None
    output_ids: tuple[str, ...] = ()
    call_ids: tuple[str, ...] = ()
    usage: dict[str, Any] | None = None
    failure: "Failure | None" = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer: `body` is what the caller gets and what the capture keeps."""

    body: bytes
    facts: Facts


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a stream ended badly. `frame` is the upstream's own error object, if it sent one."""

    code: str
    message: str
    category: ErrorCategory = ErrorCategory.UPSTREAM_ERROR
    frame: bytes | None = None


class Relay(Protocol):
    """The state of one streamed answer. It knows no connection: bytes go in and out.

    `opened`: a good frame has come. `failure`: how it ended badly. `final`: set when it is over, the last
    bytes for the caller, which are held back until the call is recorded.
    """

    opened: bool
    failure: Failure | None
    final: bytes | None

    def feed(self, chunk: bytes) -> bytes:
        """Bytes of the upstream → bytes for the caller, now."""

    def end(self) -> bytes:
        """The upstream's body is over."""

    def fail(self, failure: Failure) -> None:
        """It ends here; `final` then tells the caller so in its dialect. After the end it does nothing."""

    def withdraw(self, failure: Failure) -> None:
        """The end that came is not told: `final`, which did not leave, becomes that of this failure."""

    def heartbeat(self) -> bytes:
        """A sign of life, which also opens the answer."""

    def answer(self) -> Answer:
        """The whole answer as the capture keeps it, after the end."""


class Conversation(Protocol):
    """A caller's request in the upstream's dialect, and the way back. `exact`: its own bytes, if unchanged."""

    body: dict[str, Any]
    exact: bytes | None
    effective: dict[str, Any]
    dropped: tuple[str, ...]

    def whole(self, body: bytes) -> Answer:
        """The upstream's JSON → the caller's.

        Raises:
            ModelCallError: it is none, or holds an error.
        """

    def relay(self) -> Relay: ...


def sampling_of(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: body[name] for name in _SAMPLING if body.get(name) is not None}


def facts_of(answer: Mapping[str, Any], dialect: Dialect) -> Facts:
    """The facts of a whole answer; what it does not hold in the expected form is left out."""
    try:
        return _facts_of_response(answer) if dialect == "responses" else _facts_of_completion(answer)
    except (AttributeError, IndexError, KeyError, TypeError):
        return Facts(_text(answer.get("id")))


def _facts_of_response(response: Mapping[str, Any]) -> Facts:
    output = response.get("output") or []
    return Facts(
        _text(response.get("id")),
        _text(response.get("status")),
        tuple(item["id"] for item in output if item.get("id")),
        tuple(item["call_id"] for item in output if item.get("call_id")),
        _counted(response.get("usage")),
        _failure_of(response) if response.get("status") == "failed" else None,
    )


def _facts_of_completion(completion: Mapping[str, Any]) -> Facts:
    choice = completion["choices"][0]
    calls = choice["message"].get("tool_calls") or []
    cut = choice.get("finish_reason") in {"length", "content_filter"}
    return Facts(
        _text(completion.get("id")),
        "incomplete" if cut else "completed",
        (),
        tuple(call["id"] for call in calls if call.get("id")),
        _counted(usage_of(completion.get("usage"))),
    )


def _failure_of(response: Mapping[str, Any]) -> Failure:
    error = response.get("error") or {}
    code = str(error.get("code") or "server_error")
    return Failure(code, str(error.get("message") or ""), category_of_code(code))


def _counted(usage: Any) -> dict[str, Any] | None:
    """Usage with all three counts; null otherwise, since a made-up zero would be summed up."""
    if not isinstance(usage, dict):
        return None
    known = all(isinstance(usage.get(name), int) for name in ("input_tokens", "output_tokens", "total_tokens"))
    return usage if known else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
