r"""The text that answer verifiers read: the last assistant message without its thinking, and the boxes in it.

Everything here takes time linear in the text, and looks at its last `TAIL_CHARS` only: an answer stands at
the end, and a hostile text must not stop the server.
"""

import re
import unicodedata
from dataclasses import dataclass
from typing import Any, Final

from shared.contracts.responses import output_text

TAIL_CHARS: Final = 100_000

_THINK_TAG = re.compile(r"</?think>")
_TOKENS = re.compile(r"\\f?boxed\s*\{|\\.|[{}]", re.DOTALL)
_WRAPPER = re.compile(
    r"\\(?:boxed|text|textbf|textit|texttt|textrm|textsf|mathrm|mathbf|mathit|mathsf|mathtt|operatorname|emph|bf|rm|it)"
    r"\s*\{([^{}]*)\}"
)
# Wrappers nest; deeper ones than this are no answer.
_WRAPPER_DEPTH: Final = 8


@dataclass(frozen=True, slots=True)
class Box:
    """Where a complete box begins and where its content lies; boxes may nest, so contents are not copied."""

    start: int
    content_start: int
    content_end: int

    def content(self, text: str) -> str:
        return text[self.content_start : self.content_end]


def final_text(response: dict[str, Any]) -> str:
    """What the response finally says, in Unicode's compatibility form (full-width letters become plain ones)."""
    text = spoken_text(response)
    return text if text.isascii() else unicodedata.normalize("NFKC", text)


def spoken_text(response: dict[str, Any]) -> str:
    """What the response finally says, character for character: in mathematics `x²` is not `x2`."""
    return without_thinking(_without_open_end(output_text(response))[-TAIL_CHARS:])


def _without_open_end(text: str) -> str:
    """The text up to where thinking begins that never ends; cheap however long the text is.

    After this a tail of the text may be taken: a cut within thinking leaves its closing tag to tell of it.
    """
    closed = text.rfind("</think>")
    opened = text.find("<think>", closed + 1)
    return text if opened == -1 else text[:opened]


def without_thinking(text: str) -> str:
    """The text without `<think>` blocks; what precedes a lone closing tag or follows a lone opening one goes, too."""
    kept: list[str] = []
    at, thinking = 0, False
    for tag in _THINK_TAG.finditer(text):
        if tag.group() == "<think>":
            if not thinking:
                kept.append(text[at : tag.start()])
            thinking = True
            continue
        if not thinking:
            kept.clear()
        at, thinking = tag.end(), False
    return "".join(kept) if thinking else "".join([*kept, text[at:]])


def boxes(text: str) -> list[Box]:
    r"""All complete `\boxed{…}` in the order in which they begin; braces inside must balance."""
    found: list[Box] = []
    open_braces: list[tuple[int, int] | None] = []
    for match in _TOKENS.finditer(text):
        token = match.group()
        if token == "}":
            opened = open_braces.pop() if open_braces else None
            if opened is not None:
                start, content_start = opened
                found.append(Box(start, content_start, match.start()))
        elif token == "{":
            open_braces.append(None)
        elif token.endswith("{") and len(token) > 2:
            open_braces.append((match.start(), match.end()))
    return sorted(found, key=lambda box: box.start)


def unwrapped(text: str) -> str:
    r"""The text with `\text{…}`, `\mathrm{…}`, `\boxed{…}` and the like unwrapped, and `$` taken off."""
    for _ in range(_WRAPPER_DEPTH):
        plain = _WRAPPER.sub(r"\1", text)
        if plain == text:
            break
        text = plain
    return text.strip().strip("$").strip()
