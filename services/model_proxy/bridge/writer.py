"""The grammar of a Responses stream: items and parts opened and closed in order, numbered without a gap."""

from collections.abc import Callable
from typing import Any

from services.model_proxy.bridge.calls import CallDraft
from services.model_proxy.bridge.items import (
    CALL_PAYLOADS,
    call_item,
    message_item,
    reasoning_item,
    reasoning_part,
    refusal_part,
    text_part,
)

Event = dict[str, Any]

# Part type → its item's type, its id prefix, the stem of its events, the field with its text.
_PARTS = {
    "output_text": ("message", "msg", "response.output_text", "text"),
    "refusal": ("message", "msg", "response.refusal", "refusal"),
    "reasoning_text": ("reasoning", "rs", "response.reasoning_text", "text"),
}
_CALL_STEMS = {"function": "response.function_call_arguments", "custom": "response.custom_tool_call_input"}


class ItemWriter:
    """Writes into `events`, which the stream takes away after each step.

    At most one item of text is open; calls stay open until the end, since their fragments may interleave.
    """

    __slots__ = (
        "_content_index", "_delta_type", "_item_id", "_item_type", "_logprobs", "_new_id", "_output_index",
        "_part_type", "_parts", "_pieces", "events", "items", "sequence",
    )  # fmt: skip

    def __init__(self, new_id: Callable[[str], str]) -> None:
        self._new_id = new_id
        self.events: list[Event] = []
        self.items: list[dict[str, Any] | None] = []
        """By output index; null while an item is open."""
        self.sequence = 0
        self._item_type = ""
        self._item_id = ""
        self._output_index = 0
        self._parts: list[dict[str, Any]] = []
        self._part_type = ""
        self._content_index = 0
        self._delta_type = ""
        self._pieces: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def emit(self, kind: str, **fields: Any) -> None:
        self.events.append({"type": kind, "sequence_number": self.sequence, **fields})
        self.sequence += 1

    def take(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def say(self, part_type: str, text: str, logprobs: list[dict[str, Any]]) -> None:
        """A piece of text, reasoning or refusal; opens and closes what it has to."""
        if part_type != self._part_type:
            self._open_part(part_type)
        self._pieces.append(text)
        event = {
            "type": self._delta_type,
            "sequence_number": self.sequence,
            "item_id": self._item_id,
            "output_index": self._output_index,
            "content_index": self._content_index,
            "delta": text,
        }
        if part_type == "output_text":
            event["logprobs"] = logprobs
            self._logprobs += logprobs
        self.events.append(event)
        self.sequence += 1

    def close_text(self, status: str = "completed", extra: dict[str, Any] | None = None) -> None:
        """Close the open item of text, if there is one."""
        if not self._item_type:
            return
        self._close_part()
        item = {**self._text_item(self._parts, status), **(extra or {})}
        self._finish(self._output_index, item)
        self._item_type = ""

    def unfinished_text(self) -> dict[str, Any] | None:
        """The open item of text as it stands."""
        if not self._item_type:
            return None
        return self._text_item([*self._parts, self._part()], "incomplete")

    def open_call(self, call: CallDraft) -> None:
        self.close_text()
        assert call.tool is not None
        call.output_index = self._add(
            call_item(
                call.tool, call.item_id, call.call_id, {} if call.tool.kind == "tool_search" else "", "in_progress"
            )
        )

    def call_delta(self, call: CallDraft, delta: str) -> None:
        assert call.tool is not None
        stem = _CALL_STEMS.get(call.tool.kind)
        if stem and delta:
            self.emit(f"{stem}.delta", item_id=call.item_id, output_index=call.output_index, delta=delta)

    def close_call(self, call: CallDraft, payload: Any, status: str, extra: dict[str, Any] | None = None) -> None:
        """A call that is not whole is never announced as done: some clients run it then."""
        assert call.tool is not None
        item = {**call_item(call.tool, call.item_id, call.call_id, payload, status), **(extra or {})}
        if status != "completed":
            self.items[call.output_index] = item
            return
        stem = _CALL_STEMS.get(call.tool.kind)
        if stem:
            fields = {CALL_PAYLOADS[call.tool.kind]: payload}
            self.emit(
                f"{stem}.done", item_id=call.item_id, output_index=call.output_index, name=call.tool.name, **fields
            )
        self._finish(call.output_index, item)

    def _open_part(self, part_type: str) -> None:
        item_type, prefix, stem, _ = _PARTS[part_type]
        if self._item_type == item_type:
            self._close_part()
        else:
            self.close_text()
            self._item_type, self._item_id, self._parts = item_type, self._new_id(prefix), []
            self._output_index = self._add(self._text_item([], "in_progress"))
        self._part_type, self._delta_type = part_type, f"{stem}.delta"
        self._content_index = len(self._parts)
        self._part_event("response.content_part.added", part=self._part())

    def _close_part(self) -> None:
        part = self._part()
        _, _, stem, field = _PARTS[self._part_type]
        fields = {field: part[field]}
        if self._part_type == "output_text":
            fields["logprobs"] = part["logprobs"]
        self._part_event(f"{stem}.done", **fields)
        self._part_event("response.content_part.done", part=part)
        self._parts.append(part)
        self._part_type, self._pieces, self._logprobs = "", [], []

    def _part(self) -> dict[str, Any]:
        text = "".join(self._pieces)
        if self._part_type == "output_text":
            return text_part(text, list(self._logprobs))
        return refusal_part(text) if self._part_type == "refusal" else reasoning_part(text)

    def _part_event(self, kind: str, **fields: Any) -> None:
        self.emit(
            kind,
            item_id=self._item_id,
            output_index=self._output_index,
            content_index=self._content_index,
            **fields,
        )

    def _text_item(self, parts: list[dict[str, Any]], status: str) -> dict[str, Any]:
        build = message_item if self._item_type == "message" else reasoning_item
        return build(self._item_id, parts, status)

    def _add(self, item: dict[str, Any]) -> int:
        self.items.append(None)
        self.emit("response.output_item.added", output_index=len(self.items) - 1, item=item)
        return len(self.items) - 1

    def _finish(self, output_index: int, item: dict[str, Any]) -> None:
        self.items[output_index] = item
        self.emit("response.output_item.done", output_index=output_index, item=item)
