"""Reasoning that a server leaves in the answer's text: one block of think tags, at the start of the text.

A tag further down is text: an answer may speak of tags. All bytes between and after the tags are kept.
"""

from typing import Literal

OPEN = "<think>"
CLOSE = "</think>"


class ThinkSplitter:
    """Takes text in pieces. Holds back only what may still become a tag.

    `opened`: the prompt has opened the block already, so the text begins inside.
    """

    __slots__ = ("_held", "_state")

    def __init__(self, opened: bool) -> None:
        self._state: Literal["before", "inside", "after"] = "inside" if opened else "before"
        self._held = ""

    @property
    def over(self) -> bool:
        """Nothing more can be reasoning."""
        return self._state == "after"

    def feed(self, text: str) -> tuple[str, str]:
        """The reasoning and the text that are certain now. Not to be fed once it is over."""
        text = self._held + text
        self._held = ""
        if self._state == "before":
            start = text.lstrip()
            if start.startswith(OPEN):
                self._state = "inside"
                text = start[len(OPEN) :]
            elif OPEN.startswith(start):
                self._held = text
                return "", ""
            else:
                self._state = "after"
                return "", text
        return self._inside(text)

    def end(self) -> tuple[str, str]:
        """What is held back still, when no more text comes."""
        held, self._held = self._held, ""
        reasoning = self._state == "inside"
        self._state = "after"
        return (held, "") if reasoning else ("", held)

    def _inside(self, text: str) -> tuple[str, str]:
        reasoning, tag, rest = text.partition(CLOSE)
        if tag:
            self._state = "after"
            return reasoning, rest
        held = next((n for n in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:n])), 0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], ""
