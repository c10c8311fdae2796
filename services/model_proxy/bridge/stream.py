"""Chat chunks → Responses events, as they arrive; and Server-Sent Events in both directions.

One `ChatStream` per answer. It never raises on what the upstream sends: a reply that is no answer ends in
`response.failed`. It knows no time and no connection; heartbeats and cuts are told to it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from services.model_proxy.bridge.calls import CallDraft, CallTable, call_payload
from services.model_proxy.bridge.capabilities import Capabilities, Ending
from services.model_proxy.bridge.items import text_logprobs, usage_of
from services.model_proxy.bridge.names import NameMap
from services.model_proxy.bridge.refusals import UpstreamReplyError
from services.model_proxy.bridge.response import (
    concluded,
    ending_or_failure,
    envelope,
    legacy_calls,
    plain_text,
    reasoning_of,
    reply_error,
)
from services.model_proxy.bridge.think import ThinkSplitter
from services.model_proxy.bridge.tokens import TokenRecord
from services.model_proxy.bridge.writer import Event, ItemWriter

DONE = b"[DONE]"


class ChatStream:
    """The state of one answer. Feed chunks between `start` and `end`; `response` is the object as it stands.

    Nothing is announced as finished before the end, except text that other items follow: a stream that is
    cut off leaves no finished call behind.
    """

    def __init__(
        self,
        *,
        request: Mapping[str, Any],
        names: NameMap,
        capabilities: Capabilities,
        new_id: Callable[[str], str],
        created_at: float,
    ) -> None:
        self._capabilities = capabilities
        self._response = envelope(request, "", new_id("resp"), created_at)
        self._writer = ItemWriter(new_id)
        self._calls = CallTable(names, new_id)
        self._think: ThinkSplitter | None = None
        if capabilities.think_tags != "off":
            self._think = ThinkSplitter(capabilities.think_tags == "opened")
        self._tokens = TokenRecord()
        self._logprobs: list[dict[str, Any]] = []
        self._usage: Any = None
        self._finish_reason: str | None = None
        self._closed = False

    @property
    def response(self) -> dict[str, Any]:
        return self._response

    @property
    def closed(self) -> bool:
        """The final event is out; what comes now is ignored."""
        return self._closed

    def start(self) -> list[Event]:
        self._writer.emit("response.created", response=self._response)
        self._writer.emit("response.in_progress", response=self._response)
        return self._writer.take()

    def heartbeat(self) -> Event:
        """A sign of life that clients count, as comments are not."""
        self._writer.emit("response.in_progress", response=self._response)
        return self._writer.take()[0]

    def feed(self, chunk: dict[str, Any]) -> list[Event]:
        """The events of one chunk; the final one when the chunk holds an error."""
        if self._closed:
            return []
        try:
            self._read(chunk)
        except UpstreamReplyError as error:
            return self.fail(error.code, error.message)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            return self.fail(
                "invalid_reply",
                f"The upstream sent a chunk that is not of Chat Completions: {type(error).__name__}: {error}",
            )
        return self._writer.take()

    def end(self) -> list[Event]:
        """The upstream has no more chunks: the closing events and the final one.

        Without a finish reason the answer was cut off and has failed, however its connection ended.
        """
        if self._closed:
            return []
        try:
            self._conclude(ending_or_failure(self._finish_reason, self._capabilities))
        except UpstreamReplyError as error:
            return self.fail(error.code, error.message)
        return self._writer.take()

    def fail(self, code: str, message: str) -> list[Event]:
        """Close the stream with `response.failed`. Text so far stays in the response, calls do not."""
        if self._closed:
            return []
        items = [item for item in self._writer.items if item is not None]
        unfinished = self._writer.unfinished_text()
        self._close(
            "response.failed",
            {
                **self._response,
                "status": "failed",
                "error": {"code": code, "message": message},
                "output": [*items, unfinished] if unfinished else items,
                "usage": usage_of(self._usage),
            },
        )
        return self._writer.take()

    def _read(self, chunk: dict[str, Any]) -> None:
        if error := reply_error(chunk, self._capabilities):
            raise error
        if chunk.get("usage"):
            self._usage = chunk["usage"]
        if not self._response["model"] and chunk.get("model"):
            self._response = {**self._response, "model": str(chunk["model"])}
        for choice in chunk.get("choices") or ():
            if not choice.get("index"):
                self._tokens.take(chunk, choice)
                self._read_choice(choice)

    def _read_choice(self, choice: dict[str, Any]) -> None:
        if choice.get("logprobs"):
            self._logprobs += text_logprobs(choice["logprobs"].get("content") or [])
        delta = choice.get("delta") or {}
        if reasoning := reasoning_of(delta):
            self._writer.say("reasoning_text", reasoning, [])
        if content := delta.get("content"):
            self._read_content(plain_text(content))
        if delta.get("refusal"):
            self._flush_think()
            self._writer.say("refusal", plain_text(delta["refusal"]), [])
        for entry in delta.get("tool_calls") or legacy_calls(delta):
            self._read_call(entry)
        if choice.get("finish_reason"):
            self._finish_reason = choice["finish_reason"]

    def _read_content(self, text: str) -> None:
        if self._think is None:
            self._say_text(text)
            return
        reasoning, text = self._think.feed(text)
        if self._think.over:
            self._think = None
        self._say_split(reasoning, text)

    def _flush_think(self) -> None:
        if self._think is not None:
            self._say_split(*self._think.end())
            self._think = None

    def _say_split(self, reasoning: str, text: str) -> None:
        if reasoning:
            self._writer.say("reasoning_text", reasoning, [])
        if text:
            self._say_text(text)

    def _say_text(self, text: str) -> None:
        logprobs, self._logprobs = self._logprobs, []
        self._writer.say("output_text", text, logprobs)

    def _read_call(self, entry: dict[str, Any]) -> None:
        self._flush_think()
        call, piece = self._calls.fragment(entry)
        if call.tool is None:
            call.unsent += piece
            return
        if call.output_index < 0:
            self._writer.open_call(call)
        piece = call.unsent + piece
        call.unsent = ""
        if call.freeform is not None:
            self._writer.call_delta(call, call.freeform.feed(piece))
        elif piece.strip() or not call.blank:
            self._writer.call_delta(call, piece)
        else:
            # Arguments of blanks only become an empty object, so they wait for more.
            call.unsent = piece

    def _conclude(self, ending: Ending) -> None:
        truncated = ending != "completed"
        self._flush_think()
        calls = self._calls.named()
        payloads = [call_payload(call, truncated) for call in calls]
        extra = self._tokens.fields()
        writer = self._writer
        if not writer.items:
            writer.say("output_text", "", [])
            truncated = False
        last = len(writer.items) - 1
        writer.close_text("incomplete" if truncated else "completed", extra)
        for call, (payload, status) in zip(calls, payloads, strict=True):
            self._close_call(call, payload, status, extra if call.output_index == last else {})
        output = [item for item in writer.items if item is not None]
        final = concluded(self._response, ending, output, usage_of(self._usage))
        self._close("response.incomplete" if final["incomplete_details"] else "response.completed", final)

    def _close_call(self, call: CallDraft, payload: Any, status: str, extra: dict[str, Any]) -> None:
        if call.freeform is not None:
            self._writer.call_delta(call, call.freeform.end())
        elif call.blank and status == "completed":
            self._writer.call_delta(call, "{}")
        self._writer.close_call(call, payload, status, extra)

    def _close(self, kind: str, response: dict[str, Any]) -> None:
        self._response = response
        self._closed = True
        self._writer.emit(kind, response=response)


class SseDecoder:
    """Bytes cut anywhere → the data of each event, in order. Comments and other fields are passed over."""

    __slots__ = ("_after_cr", "_data", "_line")

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[bytes] = []
        self._after_cr = False

    def feed(self, received: bytes) -> list[bytes]:
        if self._after_cr or b"\r" in received:
            received = self._with_plain_ends(received)
        if b"\n" not in received:
            self._line += received
            return []
        lines = (bytes(self._line) + received).split(b"\n")
        self._line = bytearray(lines.pop())
        events: list[bytes] = []
        for line in lines:
            self._read(line, events)
        return events

    def end(self) -> list[bytes]:
        """The data of an event that no blank line closed before the connection ended."""
        return self.feed(b"\n\n")

    def _read(self, line: bytes, events: list[bytes]) -> None:
        if line.startswith(b"data:"):
            self._data.append(line[6:] if line[5:6] == b" " else line[5:])
        elif not line and self._data:
            events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
            self._data = []

    def _with_plain_ends(self, received: bytes) -> bytes:
        """A CR ends a line at once; an LF right after it, perhaps in the next bytes, belongs to it."""
        if self._after_cr and received:
            received = received.removeprefix(b"\n")
            self._after_cr = False
        if received:
            self._after_cr = received.endswith(b"\r")
        return received.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def encode_event(event: Event) -> bytes:
    """The event as Server-Sent Event bytes."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event))
