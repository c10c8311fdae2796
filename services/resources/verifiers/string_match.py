r"""Compares the answer with the expected text.

Where the answer stands is the row's `extraction_mode`: `boxed` (the last complete `\boxed{…}`),
`final_answer` (what follows the last `Final answer:` or `Answer:`, to the end of the line, else the last box),
`last_line` (the last line that is not blank), `full` or `full_response` (the whole message).

Both sides are made alike before they are compared: Unicode's compatibility form, `\text{…}` and other
font commands unwrapped, `$`, markdown emphasis and quotes around the whole taken off, white space
collapsed, closing `.`, `!`, `?`, `,`, `;`, `:` dropped, and, unless `case_sensitive`, case folded. Two plain
decimal numbers are compared by value, so that `80` is `80.0` and `1,000` is `1000`. Nothing else is made
equal: no units, no synonyms, no parts of a longer text.
"""

import re
import unicodedata
from decimal import Decimal
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.resources.answer_text import boxes, final_text, unwrapped
from shared.contracts.resources import ReverifyMode, Verdict
from shared.ports.verifier import Answer, Judge

_LABEL = re.compile(r"\b(?:final[ \t]+)?answer[ \t*_]*[:：][ \t*_]*", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d{1,400})(?:\.\d{1,400})?")
_QUOTES: Final = "\"'“”‘’"
_CLOSING: Final = ".!?,;:"
# How many labels are looked at, from the last one backwards.
_CANDIDATES: Final = 100
# Punctuation, emphasis and quotes may lie around each other; more layers than this are no answer.
_LAYERS: Final = 8


class Options(BaseModel):
    """None."""

    model_config = ConfigDict(extra="forbid")


class Task(BaseModel):
    """What a row needs."""

    model_config = ConfigDict(frozen=True)

    expected_answer: Annotated[str, Field(min_length=1)] | Annotated[list[str], Field(min_length=1)]
    extraction_mode: Literal["boxed", "final_answer", "last_line", "full", "full_response"] = "final_answer"
    case_sensitive: bool = False

    @property
    def expected(self) -> list[str]:
        return [self.expected_answer] if isinstance(self.expected_answer, str) else self.expected_answer

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not all(alike(text, case_sensitive=True) for text in self.expected):
            raise ValueError("an expected answer is empty once punctuation and spaces are taken off")
        return self


class StringMatch:
    """Implements `shared.ports.verifier.Verifier`."""

    task_data = Task
    reverify_mode: ReverifyMode = "stateless"
    needs_session = False

    async def verify(self, task: Task, answer: Answer, judge: Judge | None) -> Verdict:
        extracted = _extracted(final_text(answer.response), task.extraction_mode)
        right = extracted is not None and any(
            same(extracted, expected, case_sensitive=task.case_sensitive) for expected in task.expected
        )
        fields: dict[str, Any] = {"reward": float(right), "extracted": extracted}
        return Verdict.model_validate(fields)

    async def close(self) -> None:
        return


def create(options: Options) -> StringMatch:
    return StringMatch()


def _extracted(text: str, mode: str) -> str | None:
    """The answer as it stands in the text; None when there is none."""
    if mode == "boxed":
        return _last_box(text)
    if mode == "final_answer":
        return _labelled(text) or _last_box(text)
    if mode == "last_line":
        return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), None)
    return text.strip() or None


def _last_box(text: str) -> str | None:
    found = boxes(text)
    return (found[-1].content(text).strip() or None) if found else None


def _labelled(text: str) -> str | None:
    """What follows the last label, on its line or else on the next one that is not blank."""
    for match in list(_LABEL.finditer(text))[: -_CANDIDATES - 1 : -1]:
        rest = text[match.end() :].lstrip("*_ \t\r\n").split("\n", 1)[0].strip()
        if rest:
            found = boxes(rest)
            return found[-1].content(rest).strip() if found else rest
    return None


def same(answer: str, expected: str, *, case_sensitive: bool) -> bool:
    """Whether the two are equal once made alike, or are equal numbers."""
    left, right = alike(answer, case_sensitive=case_sensitive), alike(expected, case_sensitive=case_sensitive)
    if left == right:
        return True
    numbers = _number(left), _number(right)
    return None not in numbers and numbers[0] == numbers[1]


def alike(text: str, *, case_sensitive: bool) -> str:
    """The form in which two answers are compared."""
    plain = " ".join(unwrapped(unicodedata.normalize("NFKC", text)).split())
    for _ in range(_LAYERS):
        shorter = plain.rstrip(_CLOSING).strip("*` ")
        if len(shorter) > 1 and shorter[0] in _QUOTES and shorter[-1] in _QUOTES:
            shorter = shorter[1:-1].strip()
        if shorter == plain:
            break
        plain = shorter
    return plain if case_sensitive else plain.casefold()


def _number(text: str) -> Decimal | None:
    return Decimal(text.replace(",", "")) if _NUMBER.fullmatch(text) else None
