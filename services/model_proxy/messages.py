"""A caller of the Messages API, before an upstream of either dialect: the pure bridge, applied to bytes."""

from collections.abc import Mapping
from dataclasses import replace
from time import time
from typing import Any

import orjson

from services.model_proxy.bridge.capabilities import Profile
from services.model_proxy.bridge.messages_errors import error_body
from services.model_proxy.bridge.messages_reply import matched_stop_of, to_message
from services.model_proxy.bridge.messages_request import MessagesRequest, from_messages, messages_to_chat
from services.model_proxy.bridge.messages_stream import ChatMessagesStream, MessagesStream
from services.model_proxy.bridge.refusals import RequestError, UpstreamReplyError
from services.model_proxy.bridge.request import ChatRequest
from services.model_proxy.bridge.response import to_responses
from services.model_proxy.bridge.stream import ChatStream
from services.model_proxy.bridge.writer import Event
from services.model_proxy.bridged import BridgedRelay, new_id
from services.model_proxy.conversation import Answer, Conversation, Facts, Failure, Relay, facts_of
from services.model_proxy.failures import category_of_code, refused, unusable
from services.model_proxy.models import ServedModel
from services.model_proxy.passed import PassedConversation, error_in


def messages_conversation(request: Mapping[str, Any], model: ServedModel, profile: Profile) -> Conversation:
    """
    Raises:
        ModelCallError: a field of the request has no form in the upstream's dialect.
    """
    try:
        speaks = model.upstream.dialect
        messages = from_messages(request, speaks=speaks, capabilities=model.capabilities, profile=profile)
        if speaks == "responses":
            return _OverResponses(messages, model)
        chat = messages_to_chat(
            messages,
            model=model.upstream_name,
            capabilities=model.capabilities,
            profile=profile,
            defaults=model.settings.defaults,
            overrides=model.settings.overrides,
        )
    except RequestError as error:
        raise refused(error) from error
    return _OverChat(messages, chat, model)


class _OverChat:
    """Implements `Conversation` for an upstream that speaks Chat Completions."""

    exact: bytes | None = None

    def __init__(self, messages: MessagesRequest, chat: ChatRequest, model: ServedModel) -> None:
        self.body = chat.body
        self.effective = chat.effective
        self.dropped = chat.dropped
        self._request = messages.request
        self._names = chat.names
        self._model = model

    def whole(self, body: bytes) -> Answer:
        try:
            chat = orjson.loads(body)
            response = to_responses(
                chat,
                request=self._request,
                names=self._names,
                capabilities=self._model.capabilities,
                new_id=new_id,
                created_at=time(),
            )
            matched_stop = matched_stop_of(chat["choices"][0], self._stops)
            return _answer(response, self._model_name, matched_stop)
        except orjson.JSONDecodeError as error:
            raise unusable(
                f"The server of model '{self._model.name}' answered 200 without JSON.", "invalid_reply"
            ) from error
        except UpstreamReplyError as error:
            raise unusable(error.message, error.code) from error

    def relay(self) -> Relay:
        chat = ChatStream(
            request=self._request,
            names=self._names,
            capabilities=self._model.capabilities,
            new_id=new_id,
            created_at=time(),
        )
        stream = ChatMessagesStream(chat, model=self._model_name, message_id=new_id("msg"), stops=self._stops)
        return MessagesRelay(stream, self._model)

    @property
    def _stops(self) -> list[str]:
        stops: list[str] = self._request.get("stop") or []
        return stops

    @property
    def _model_name(self) -> str:
        return self._request["model"] or self._model.name


class _OverResponses:
    """Implements `Conversation` for an upstream that speaks the Responses API."""

    exact: bytes | None = None

    def __init__(self, messages: MessagesRequest, model: ServedModel) -> None:
        request = dict(messages.request)
        if messages.top_k is not None:
            request["top_k"] = messages.top_k
        self._passed = PassedConversation(request, b"", model, "responses")
        self.body = self._passed.body
        self.effective = self._passed.effective
        self.dropped = messages.dropped
        self._model = model
        self._model_name = request["model"] or model.name

    def whole(self, body: bytes) -> Answer:
        response = orjson.loads(self._passed.whole(body).body)
        try:
            return _answer(response, self._model_name, None)
        except UpstreamReplyError as error:
            raise unusable(error.message, error.code) from error

    def relay(self) -> Relay:
        stream = MessagesStream(model=self._model_name, message_id=new_id("msg"))
        return MessagesRelay(stream, self._model)


class MessagesRelay(BridgedRelay):
    """The same with Messages events; fed with the events of either dialect."""

    _stream: MessagesStream

    def __init__(self, stream: MessagesStream, model: ServedModel) -> None:
        super().__init__(stream, model)

    def answer(self) -> Answer:
        stream = self._stream
        status = "failed" if stream.error is not None else stream.response.get("status")
        message = stream.message
        return Answer(orjson.dumps(message), _facts({**stream.response, "status": status}, message))

    def _error_in(self, frame: dict[str, Any], data: bytes) -> Failure | None:
        return error_in(frame, data, self._model.capabilities)

    def _failure(self) -> Failure | None:
        error = self._stream.error
        return None if error is None else Failure(error.code, error.message, category_of_code(error.code))

    def _failed(self, failure: Failure, final: Event) -> Event:
        return error_body(failure.code, failure.message)


def _answer(response: dict[str, Any], model: str, matched_stop: str | None) -> Answer:
    message = to_message(response, model=model, message_id=new_id("msg"), matched_stop=matched_stop)
    return Answer(orjson.dumps(message), _facts(response, message))


def _facts(response: dict[str, Any], message: dict[str, Any]) -> Facts:
    """Status and usage are the response's; what joins a harness's records to the call is the message's."""
    calls = tuple(block["id"] for block in message["content"] if block["type"] == "tool_use")
    facts = facts_of(response, "responses")
    return replace(facts, response_id=message["id"], output_ids=(), call_ids=calls, failure=None)
