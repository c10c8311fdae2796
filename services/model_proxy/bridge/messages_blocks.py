"""The grammar of a Messages stream: content blocks one after the other, numbered without a gap."""

from typing import Any

from services.model_proxy.bridge.writer import Event

# Block type → what its start says, the type of its deltas, their field.
_STARTS: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class BlockWriter:
    """At most one block is open; it is opened by its first word, so that no block is empty."""

    __slots__ = ("_events", "_key", "_kind", "_pieces", "blocks")

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        """Those that are closed, as the whole message holds them."""
        self._events: list[Event] = []
        self._kind = ""
        self._key: Any = None
        self._pieces: list[str] = []

    @property
    def said(self) -> str:
        """What the open block holds so far."""
        return "".join(self._pieces)

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def say(self, kind: str, key: Any, piece: str) -> None:
        """A piece of text or thinking; another `key` begins another block of text."""
        if not piece:
            return
        if key != self._key:
            self.close_text()
            self.open(kind, key, _STARTS[kind])
        self.delta(piece)

    def open(self, kind: str, key: Any, start: dict[str, Any]) -> None:
        self._kind, self._key, self._pieces = kind, key, []
        self._events.append({"type": "content_block_start", "index": len(self.blocks), "content_block": start})

    def delta(self, piece: str) -> None:
        self._pieces.append(piece)
        kind, field = _DELTAS[self._kind]
        self._put_delta({"type": kind, field: piece})

    def close_text(self) -> None:
        """Close the open block of text, if there is one."""
        if self._kind == "text":
            self.close({"type": "text", "text": self.said})

    def close(self, block: dict[str, Any]) -> None:
        if block["type"] == "thinking":
            self._put_delta({"type": "signature_delta", "signature": block["signature"]})
        self._events.append({"type": "content_block_stop", "index": len(self.blocks)})
        self.blocks.append(block)
        self._kind, self._key, self._pieces = "", None, []

    def as_they_stand(self) -> list[dict[str, Any]]:
        """The closed blocks, and an open one of text or thinking; a call under way is left out."""
        if self._kind == "text":
            return [*self.blocks, {"type": "text", "text": self.said}]
        if self._kind == "thinking":
            return [*self.blocks, {"type": "thinking", "thinking": self.said, "signature": ""}]
        return self.blocks

    def _put_delta(self, delta: dict[str, Any]) -> None:
        self._events.append({"type": "content_block_delta", "index": len(self.blocks), "delta": delta})
