"""Responses events → Messages events, as they arrive.

One stream per answer. It never raises on what the upstream sends: what is no answer ends in the event
`error`. It knows no time and no connection; heartbeats and cuts are told to it.
"""

from collections import deque
from collections.abc import Collection
from typing import Any

from services.model_proxy.bridge.messages_blocks import BlockWriter
from services.model_proxy.bridge.messages_errors import error_body
from services.model_proxy.bridge.messages_reply import (
    block_type,
    failure_of,
    matched_stop_of,
    message_envelope,
    message_usage,
    stop_of,
    text_of_part,
    thinking_block,
    tool_use_block,
)
from services.model_proxy.bridge.messages_thinking import BETWEEN_SUMMARIES, thinking_text
from services.model_proxy.bridge.refusals import UpstreamReplyError
from services.model_proxy.bridge.stream import ChatStream
from services.model_proxy.bridge.writer import Event

# Events that carry a piece → the type of the item that it belongs to, and the field that tells parts apart.
_PIECES = {
    "response.output_text.delta": ("message", "content_index"),
    "response.refusal.delta": ("message", "content_index"),
    "response.reasoning_text.delta": ("reasoning", ""),
    "response.reasoning_summary_text.delta": ("reasoning", "summary_index"),
    "response.function_call_arguments.delta": ("function_call", ""),
}


class _Draft:
    """One output item under way. Pieces wait while an earlier item is not done: blocks do not interleave."""

    __slots__ = ("done", "index", "item", "kind", "part", "pieces_of", "waiting")

    def __init__(self, index: int, item: dict[str, Any]) -> None:
        self.index = index
        self.item = item
        self.kind = block_type(item)
        self.done: dict[str, Any] | None = None
        self.pieces_of = ""
        """The type of the events that brought pieces; of reasoning, the text and its summary may both come."""
        self.part: Any = None
        self.waiting: list[tuple[Any, str]] = []


class MessagesStream:
    """Feed events of a Responses stream between `start` and `end`; `message` is the message as it stands."""

    def __init__(self, *, model: str, message_id: str) -> None:
        self.error: UpstreamReplyError | None = None
        self.closed = False
        """The final event is out; what comes now is ignored."""
        self.matched_stop: str | None = None
        self.response: dict[str, Any] = {}
        """The response as the upstream told it at the end; empty until then."""
        self._message = message_envelope(model, message_id)
        self._writer = BlockWriter()
        self._drafts: dict[int, _Draft] = {}
        self._order: deque[_Draft] = deque()
        self._refused = False

    @property
    def message(self) -> dict[str, Any]:
        return {**self._message, "content": self._writer.as_they_stand()}

    def start(self) -> list[Event]:
        return [{"type": "message_start", "message": self._message}]

    def heartbeat(self) -> Event:
        return {"type": "ping"}

    def feed(self, event: dict[str, Any]) -> list[Event]:
        """The events of one event; the final one when it ends the response."""
        if self.closed:
            return []
        try:
            return self._read(event)
        except UpstreamReplyError as error:
            return self.fail(error.code, error.message)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            return self.fail(
                "invalid_reply",
                f"The upstream sent an event that is not of the Responses API: {type(error).__name__}: {error}",
            )

    def end(self) -> list[Event]:
        """The upstream has no more events: without a final one the answer was cut off and has failed."""
        return self.fail("truncated_stream", "The upstream's answer ended before it was complete.")

    def fail(self, code: str, message: str) -> list[Event]:
        """Close the stream with the event `error`. Whole blocks and text so far stay in the message."""
        if self.closed:
            return []
        self.closed = True
        self.error = UpstreamReplyError(message, code)
        return [*self._writer.take(), error_body(code, message)]

    def _read(self, event: dict[str, Any]) -> list[Event]:
        kind = event["type"]
        if kind in _PIECES:
            self._take_piece(kind, event)
        elif kind == "response.output_item.added":
            self._draft(event["output_index"], event["item"])
        elif kind == "response.output_item.done":
            self._draft(event["output_index"], event["item"]).done = event["item"]
            self._advance()
        elif kind in ("response.completed", "response.incomplete"):
            return self._conclude(event["response"])
        elif kind == "response.failed":
            self.response = event["response"]
            raise failure_of(event["response"])
        elif kind == "error":
            raise failure_of({"error": event.get("error") or event})
        return self._writer.take()

    def _draft(self, index: int, item: dict[str, Any]) -> _Draft:
        draft = self._drafts.get(index)
        if draft is None:
            draft = self._drafts[index] = _Draft(index, item)
            self._order.append(draft)
            if self._order[0] is draft:
                self._begin(draft)
        return draft

    def _take_piece(self, kind: str, event: dict[str, Any]) -> None:
        item_type, part = _PIECES[kind]
        draft, piece = self._drafts[event["output_index"]], event["delta"]
        if draft.item["type"] != item_type or not isinstance(piece, str):
            raise TypeError(f"{kind} for an item of type {draft.item['type']!r} with the delta {piece!r}")
        if item_type == "message":
            self._refused |= kind == "response.refusal.delta"
        elif draft.pieces_of not in ("", kind):
            return
        draft.pieces_of = kind
        key = event[part] if part else None
        if self._order[0] is draft:
            self._write(draft, key, piece)
        else:
            draft.waiting.append((key, piece))

    def _begin(self, draft: _Draft) -> None:
        """It is this item's turn."""
        if draft.kind == "tool_use":
            start = {"type": "tool_use", "id": draft.item["call_id"], "name": draft.item["name"], "input": {}}
            self._writer.open("tool_use", draft.index, start)
        for part, piece in draft.waiting:
            self._write(draft, part, piece)

    def _write(self, draft: _Draft, part: Any, piece: str) -> None:
        if draft.kind == "tool_use":
            self._writer.delta(piece)
        elif draft.kind == "text":
            self._writer.say("text", (draft.index, part), piece)
        else:
            joint = BETWEEN_SUMMARIES if draft.part not in (None, part) else ""
            draft.part = part
            self._writer.say("thinking", draft.index, joint + piece)

    def _advance(self) -> None:
        """Close what is done, in order, and let the next item speak."""
        while self._order and self._order[0].done:
            draft = self._order.popleft()
            self._finish(draft, draft.done or {})
            if self._order:
                self._begin(self._order[0])

    def _finish(self, draft: _Draft, item: dict[str, Any]) -> None:
        writer = self._writer
        if draft.kind == "text":
            self._finish_text(draft, item)
        elif draft.kind == "thinking":
            if not draft.pieces_of:
                writer.say("thinking", draft.index, thinking_text(item))
            block = thinking_block(item, writer.said)
            if block is not None:
                if block["type"] == "redacted_thinking":
                    writer.open("thinking", draft.index, block)
                writer.close(block)
        else:
            if not draft.pieces_of and item.get("arguments"):
                writer.delta(item["arguments"])
            writer.close(tool_use_block(item, writer.said))

    def _finish_text(self, draft: _Draft, item: dict[str, Any]) -> None:
        for index, part in enumerate(item["content"]):
            text = text_of_part(part)
            self._refused |= part["type"] == "refusal"
            if not draft.pieces_of:
                self._writer.say("text", (draft.index, index), text)
        self._writer.close_text()

    def _conclude(self, response: dict[str, Any]) -> list[Event]:
        self.response = response
        for index, item in enumerate(response.get("output") or ()):
            draft = self._draft(index, item)
            draft.done = draft.done or item
        for draft in self._order:
            # Some servers leave the items out of the final event.
            draft.done = draft.done or draft.item
        self._advance()
        calls = any(block["type"] == "tool_use" for block in self._writer.blocks)
        stop = stop_of(response, calls=calls, refused=self._refused, matched_stop=self.matched_stop)
        usage = message_usage(response.get("usage"))
        self._message = {**self._message, **stop, "usage": usage}
        self.closed = True
        return [
            *self._writer.take(),
            {"type": "message_delta", "delta": stop, "usage": usage},
            {"type": "message_stop"},
        ]


class ChatMessagesStream(MessagesStream):
    """The same for chat chunks, by way of the Responses events that they amount to."""

    def __init__(self, chat: ChatStream, *, model: str, message_id: str, stops: Collection[str]) -> None:
        super().__init__(model=model, message_id=message_id)
        self._chat = chat
        self._stops = stops

    def start(self) -> list[Event]:
        self._chat.start()
        return super().start()

    def feed(self, event: dict[str, Any]) -> list[Event]:
        if self.closed:
            return []
        events = self._chat.feed(event)
        if not self._chat.closed:
            for choice in event.get("choices") or ():
                if not choice.get("index"):
                    self.matched_stop = matched_stop_of(choice, self._stops) or self.matched_stop
        return self._through(events)

    def end(self) -> list[Event]:
        return self._through(self._chat.end())

    def _through(self, events: list[Event]) -> list[Event]:
        translated = []
        for event in events:
            translated += super().feed(event)
        return translated
