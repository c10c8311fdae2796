"""A Responses caller before a Chat Completions upstream: the pure bridge, applied to bytes."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import orjson

from services.model_proxy.bridge.capabilities import Profile
from services.model_proxy.bridge.refusals import RequestError, UpstreamReplyError
from services.model_proxy.bridge.request import ChatRequest, to_chat
from services.model_proxy.bridge.response import reply_error, to_responses
from services.model_proxy.bridge.stream import DONE, ChatStream, SseDecoder, encode_event
from services.model_proxy.bridge.writer import Event
from services.model_proxy.conversation import Answer, Failure, Relay, facts_of
from services.model_proxy.failures import ModelCallError, category_of_code, refused, unusable
from services.model_proxy.models import ServedModel


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


class BridgedConversation:
    """Implements `Conversation`."""

    exact: bytes | None = None

    def __init__(self, request: Mapping[str, Any], model: ServedModel, profile: Profile) -> None:
        """
        Raises:
            ModelCallError: a field of the request has no form in Chat Completions.
        """
        self._model = model
        self._chat = _translated(request, model, profile)
        self.body = self._chat.body
        self.effective = self._chat.effective
        self.dropped = self._chat.dropped
        # The answer tells the values that were used, whether the caller or the configuration set them.
        self._echoed = {**request, **self.effective}

    def whole(self, body: bytes) -> Answer:
        try:
            response = to_responses(
                orjson.loads(body),
                request=self._echoed,
                names=self._chat.names,
                capabilities=self._model.capabilities,
                new_id=new_id,
                created_at=time.time(),
            )
        except orjson.JSONDecodeError as error:
            raise unusable(
                f"The server of model '{self._model.name}' answered 200 without JSON.", "invalid_reply"
            ) from error
        except UpstreamReplyError as error:
            raise unusable(error.message, error.code) from error
        return Answer(orjson.dumps(response), facts_of(response, "responses"))

    def relay(self) -> Relay:
        stream = ChatStream(
            request=self._echoed,
            names=self._chat.names,
            capabilities=self._model.capabilities,
            new_id=new_id,
            created_at=time.time(),
        )
        return ResponsesRelay(stream, self._model)


class AnswerStream(Protocol):
    """A machine of the bridge: frames of the upstream in, events for the caller out."""

    @property
    def closed(self) -> bool: ...

    def start(self) -> list[Event]: ...

    def feed(self, frame: dict[str, Any], /) -> list[Event]: ...

    def end(self) -> list[Event]: ...

    def fail(self, code: str, message: str) -> list[Event]: ...

    def heartbeat(self) -> Event: ...


class BridgedRelay(ABC):
    """Implements `Relay` around a stream of the bridge. A subclass knows what its stream's answer is."""

    def __init__(self, stream: AnswerStream, model: ServedModel) -> None:
        self.opened = False
        self.failure: Failure | None = None
        self.final: bytes | None = None
        self._stream = stream
        self._model = model
        self._decoder = SseDecoder()
        self._final_event: Event = {}

    def feed(self, chunk: bytes) -> bytes:
        return self._take(self._decoder.feed(chunk))

    def end(self) -> bytes:
        released = self._take(self._decoder.end())
        if self.final is not None or self.failure is not None:
            return released
        return released + self._conclude()

    def fail(self, failure: Failure) -> None:
        if self.final is not None:
            return
        self.failure = failure
        started = [] if self.opened else self._stream.start()
        self.opened = True
        self.final = _encoded([*started, *self._stream.fail(failure.code, failure.message)])

    def withdraw(self, failure: Failure) -> None:
        self.failure = failure
        self.final = encode_event(self._failed(failure, self._final_event))

    def heartbeat(self) -> bytes:
        started = [] if self.opened else self._stream.start()
        self.opened = True
        return _encoded([*started, self._stream.heartbeat()])

    @abstractmethod
    def answer(self) -> Answer: ...

    @abstractmethod
    def _failure(self) -> Failure | None:
        """How the closed stream ended badly."""

    @abstractmethod
    def _failed(self, failure: Failure, final: Event) -> Event:
        """What tells of a failure in the place of the final event."""

    def _error_in(self, frame: dict[str, Any], data: bytes) -> Failure | None:
        """The error that a frame holds in place of an answer."""
        error = reply_error(frame, self._model.capabilities)
        return None if error is None else Failure(error.code, error.message, category_of_code(error.code), data)

    def _take(self, frames: list[bytes]) -> bytes:
        released: list[bytes] = []
        for data in frames:
            if self.final is not None or self.failure is not None:
                break
            released.append(self._conclude() if data.strip() == DONE else self._take_frame(data))
        return b"".join(released)

    def _take_frame(self, data: bytes) -> bytes:
        try:
            frame = orjson.loads(data)
        except orjson.JSONDecodeError:
            frame = None
        if not isinstance(frame, dict):
            return self._refused(Failure("invalid_reply", "The upstream sent an event that is no JSON object."))
        if (failure := self._error_in(frame, data)) is not None:
            return self._refused(failure)
        started = [] if self.opened else self._stream.start()
        self.opened = True
        return self._released([*started, *self._stream.feed(frame)])

    def _refused(self, failure: Failure) -> bytes:
        """Before the answer has begun, its HTTP status can still tell the caller; after that, only `fail` can."""
        self.failure = failure
        if self.opened:
            self.fail(failure)
        return b""

    def _conclude(self) -> bytes:
        if not self.opened:
            return self._refused(
                Failure(
                    "truncated_stream",
                    "The upstream's answer ended before it began.",
                    category_of_code("truncated_stream"),
                )
            )
        return self._released(self._stream.end())

    def _released(self, events: list[Event]) -> bytes:
        """All but the final event, which waits for the record."""
        if not self._stream.closed:
            return _encoded(events)
        self.failure = self._failure()
        *earlier, self._final_event = events
        self.final = encode_event(self._final_event)
        return _encoded(earlier)


class ResponsesRelay(BridgedRelay):
    """The events are those of the Responses API."""

    _stream: ChatStream

    def __init__(self, stream: ChatStream, model: ServedModel) -> None:
        super().__init__(stream, model)

    def answer(self) -> Answer:
        response = self._stream.response
        return Answer(orjson.dumps(response), facts_of(response, "responses"))

    def _failure(self) -> Failure | None:
        error = self._stream.response.get("error")
        return Failure(error["code"], error["message"], category_of_code(error["code"])) if error else None

    def _failed(self, failure: Failure, final: Event) -> Event:
        error = {"code": failure.code, "message": failure.message}
        return {
            **final,
            "type": "response.failed",
            "response": {**final["response"], "status": "failed", "error": error},
        }


def _encoded(events: list[Event]) -> bytes:
    return b"".join(map(encode_event, events))


def _translated(request: Mapping[str, Any], model: ServedModel, profile: Profile) -> ChatRequest:
    try:
        return to_chat(
            request,
            model=model.upstream_name,
            capabilities=model.capabilities,
            profile=profile,
            defaults=model.settings.defaults,
            overrides=model.settings.overrides,
        )
    except RequestError as error:
        raise refused(error) from error
    except (AttributeError, KeyError, TypeError) as error:
        raise ModelCallError(
            f"The request is not of the form of the Responses API: {type(error).__name__}: {error}",
            status=400,
            code="invalid_request",
        ) from error
