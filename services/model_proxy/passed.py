"""A caller that speaks the upstream's own dialect: bytes pass through, read along for the capture.

Changed are only the request's model name and configured defaults and overrides. In a stream every whole
event is released as it came; the last one waits for the record.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final

import orjson

from services.model_proxy.bridge.capabilities import Capabilities
from services.model_proxy.bridge.response import reply_error
from services.model_proxy.bridge.stream import DONE, encode_event
from services.model_proxy.completion import Completion
from services.model_proxy.conversation import Answer, Facts, Failure, Relay, facts_of, sampling_of
from services.model_proxy.failures import category_of_code, unusable
from services.model_proxy.models import ServedModel
from services.model_proxy.raw_events import RawEvents
from shared.contracts.capture import Dialect

_TERMINAL: Final = frozenset({"response.completed", "response.incomplete", "response.failed", "error"})
_LIMITS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_TEMPLATE: Final = "chat_template_kwargs"
_CUT: Final = "The upstream's answer ended before it was complete."


class PassedConversation:
    """Implements `Conversation`. `raw` are the caller's own bytes, `request` the same, parsed."""

    dropped: tuple[str, ...] = ()

    def __init__(self, request: Mapping[str, Any], raw: bytes, model: ServedModel, dialect: Dialect) -> None:
        self._model = model
        self._dialect = dialect
        body = _laid_over(request, model, dialect)
        self._hide_usage = _ask_for_usage(body, model.capabilities) if dialect == "chat_completions" else False
        self.body = body
        self.exact = raw if body == request else None
        self.effective = sampling_of(body)

    def whole(self, body: bytes) -> Answer:
        try:
            answer = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise unusable(
                f"The server of model '{self._model.name}' answered 200 without JSON.", "invalid_reply"
            ) from error
        if not isinstance(answer, dict):
            raise unusable(f"The server of model '{self._model.name}' answered no JSON object.", "invalid_reply")
        if (failure := error_in(answer, body, self._model.capabilities)) is not None:
            raise unusable(failure.message, failure.code)
        return Answer(body, facts_of(answer, self._dialect))

    def relay(self) -> Relay:
        if self._dialect == "responses":
            return PassedResponse(self._model.capabilities)
        return PassedCompletion(self._model.capabilities, self._hide_usage)


def _laid_over(request: Mapping[str, Any], model: ServedModel, dialect: Dialect) -> dict[str, Any]:
    """Defaults fill what is absent, overrides win (null removes a field). The output limit has a name in each
    dialect, so that one configuration serves both; template arguments are laid over one by one."""
    limit = "max_output_tokens" if dialect == "responses" else model.capabilities.max_tokens_field
    defaults, overrides = (
        {limit if name in _LIMITS else name: value for name, value in fields.items()}
        for fields in (model.settings.defaults, model.settings.overrides)
    )
    body = {name: value for name, value in request.items() if name not in _LIMITS or limit not in overrides}
    for name, value in defaults.items():
        absent = body.get(name) is None and not (name == limit and any(body.get(other) for other in _LIMITS))
        if absent:
            body[name] = value
    layers = [fields[_TEMPLATE] for fields in (defaults, request, overrides) if fields.get(_TEMPLATE)]
    body |= {"model": model.upstream_name, **overrides}
    if len(layers) > 1:
        body[_TEMPLATE] = {name: value for layer in layers for name, value in layer.items()}
    for name in [name for name, value in overrides.items() if value is None]:
        del body[name]
    return body


def _ask_for_usage(body: dict[str, Any], capabilities: Capabilities) -> bool:
    """Have the stream tell its usage, for the capture; True when the caller did not ask for it himself."""
    options = body.get("stream_options") or {}
    if body.get("stream") is not True or not capabilities.stream_usage or "include_usage" in options:
        return False
    body["stream_options"] = {**options, "include_usage": True}
    return True


def error_in(frame: Mapping[str, Any], data: bytes, capabilities: Capabilities) -> Failure | None:
    """The error that a body or event with status 200 holds in place of an answer."""
    if frame.get("object") == "response" or frame.get("choices"):
        return None
    if frame.get("type") == "error" and not frame.get("error"):
        frame = {"error": dict(frame)}
    elif str(frame.get("type", "")).startswith("response."):
        return None
    error = reply_error(frame, capabilities)
    return None if error is None else Failure(error.code, error.message, category_of_code(error.code), data)


class _PassedRelay(ABC):
    """What both dialects share. A subclass reads events along (`_read`) and knows its own ends."""

    def __init__(self, capabilities: Capabilities) -> None:
        self.opened = False
        self.failure: Failure | None = None
        self.final: bytes | None = None
        self._capabilities = capabilities
        self._events = RawEvents()

    def feed(self, chunk: bytes) -> bytes:
        return self._take(self._events.feed(chunk))

    def end(self) -> bytes:
        released = self._take(self._events.end())
        if self.final is None and self.failure is None:
            self._conclude()
        return released

    def fail(self, failure: Failure) -> None:
        if self.final is None:
            self.failure = failure
            self.opened = True
            self.final = self._failed(failure)

    def withdraw(self, failure: Failure) -> None:
        self.failure = failure
        self.final = self._failed(failure)

    def heartbeat(self) -> bytes:
        self.opened = True
        return b": still waiting\n\n"

    def _take(self, events: list[tuple[bytes, bytes]]) -> bytes:
        released = []
        for raw, data in events:
            if self.final is not None or self.failure is not None:
                break
            released.append(self._take_event(raw, data))
        return b"".join(released)

    def _take_event(self, raw: bytes, data: bytes) -> bytes:
        if not data:
            # A comment tells nothing yet: a first data event may still be an error.
            return raw if self.opened else b""
        if data.strip() == DONE:
            return self._done(raw)
        try:
            frame = orjson.loads(data)
        except orjson.JSONDecodeError:
            frame = None
        if not isinstance(frame, dict):
            return self._refused(Failure("invalid_reply", "The upstream sent an event that is no JSON object."))
        if (failure := error_in(frame, data, self._capabilities)) is not None:
            return self._refused(failure, raw)
        self.opened = True
        return self._read(frame, raw)

    def _refused(self, failure: Failure, raw: bytes | None = None) -> bytes:
        """An error: told by an HTTP status before the answer has begun, else by the upstream's own event."""
        self.failure = failure
        if self.opened:
            self.final = raw if raw is not None else self._failed(failure)
        return b""

    def _conclude(self) -> None:
        """The body ended without a final event."""
        cut = Failure("truncated_stream", _CUT, category_of_code("truncated_stream"))
        if self.opened:
            self.fail(cut)
        else:
            self.failure = cut

    @abstractmethod
    def _done(self, raw: bytes) -> bytes: ...

    @abstractmethod
    def _read(self, frame: dict[str, Any], raw: bytes) -> bytes: ...

    @abstractmethod
    def _failed(self, failure: Failure) -> bytes: ...


class PassedCompletion(_PassedRelay):
    """Implements `Relay` for chat chunks. The final event is `[DONE]`."""

    def __init__(self, capabilities: Capabilities, hide_usage: bool) -> None:
        super().__init__(capabilities)
        self._hide_usage = hide_usage
        self._completion = Completion()

    def answer(self) -> Answer:
        completion = self._completion.whole()
        return Answer(orjson.dumps(completion), facts_of(completion, "chat_completions"))

    def _read(self, frame: dict[str, Any], raw: bytes) -> bytes:
        self._completion.take(frame)
        return b"" if self._hide_usage and not frame.get("choices") and frame.get("usage") else raw

    def _done(self, raw: bytes) -> bytes:
        if self._completion.finished:
            self.final = raw
        else:
            self._conclude()
        return b""

    def _conclude(self) -> None:
        if self._completion.finished:
            # Complete but for the end mark, which strict clients wait for.
            self.final = b"data: [DONE]\n\n"
        else:
            super()._conclude()

    def _failed(self, failure: Failure) -> bytes:
        error = {"message": failure.message, "type": "server_error", "param": None, "code": failure.code}
        return b"data: " + orjson.dumps({"error": error}) + b"\n\n"


class PassedResponse(_PassedRelay):
    """Implements `Relay` for Responses events."""

    def __init__(self, capabilities: Capabilities) -> None:
        super().__init__(capabilities)
        self._response: dict[str, Any] = {}
        self._items: list[dict[str, Any]] = []
        self._sequence = -1
        # Heartbeats take numbers of their own; later events move up by as many.
        self._inserted = 0

    def heartbeat(self) -> bytes:
        """The latest `response.in_progress` again; a comment while there is no response to tell of."""
        if not self._response:
            return super().heartbeat()
        self._sequence += 1
        self._inserted += 1
        return encode_event(
            {"type": "response.in_progress", "sequence_number": self._sequence, "response": self._response}
        )

    def answer(self) -> Answer:
        response = self._response
        if not response:
            return Answer(b"null", Facts())
        if not response.get("output") and self._items:
            response = {**response, "output": self._items}
        return Answer(orjson.dumps(response), facts_of(response, "responses"))

    def _read(self, frame: dict[str, Any], raw: bytes) -> bytes:
        kind = frame.get("type")
        if isinstance(frame.get("response"), dict):
            self._response = frame["response"]
        if kind == "response.output_item.done" and isinstance(frame.get("item"), dict):
            self._items.append(frame["item"])
        raw, number = self._numbered(frame, raw)
        if kind not in _TERMINAL:
            self._sequence = number
            return raw
        self.final = raw
        if kind == "response.failed":
            self.failure = facts_of({**self._response, "status": "failed"}, "responses").failure
        return b""

    def _numbered(self, frame: dict[str, Any], raw: bytes) -> tuple[bytes, int]:
        """The event moved up by the heartbeats before it, and its number; without one, that of the event before."""
        number = frame.get("sequence_number")
        if not isinstance(number, int):
            return raw, self._sequence
        if not self._inserted:
            return raw, number
        frame["sequence_number"] = number + self._inserted
        return encode_event(frame), number + self._inserted

    def _done(self, raw: bytes) -> bytes:
        # Some servers end Responses streams like chat streams, but only after the final event.
        self._conclude()
        return b""

    def _failed(self, failure: Failure) -> bytes:
        self._response = {
            **self._response,
            "object": "response",
            "status": "failed",
            "error": {"code": failure.code, "message": failure.message},
        }
        self._sequence += 1
        return encode_event({"type": "response.failed", "sequence_number": self._sequence, "response": self._response})
