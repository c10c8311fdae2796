r"""Multiple choice: finds the chosen letter in the answer and compares it with the expected one.

Two forms count in every mode: a letter alone in `\boxed{…}`, and a letter after `Answer:`. Where both or
several stand, the last one is the answer; `extracted_by` says which form it had. Around the letter, font
commands (`\text{B}`), brackets, markdown and closing punctuation are allowed; after `Answer:` also the
option's text behind a delimiter (`Answer: B) text`). An answer that names several letters at once (`A or B`)
is no choice, a letter that is no option is a wrong one. What the model only thought does not count.

`strict_single_letter_boxed` takes capital letters only. The lenient modes also take small letters, and the
text of exactly one option in the place of its letter: `lenient_boxed` in the box, `lenient_answer_colon`
and `lenient_answer_colon_md` after `Answer:`.
"""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from services.resources.answer_text import boxes, final_text, unwrapped
from shared.contracts.resources import ReverifyMode, Verdict
from shared.ports.verifier import Answer, Judge

GradingMode = Literal["strict_single_letter_boxed", "lenient_boxed", "lenient_answer_colon", "lenient_answer_colon_md"]
Form = Literal["boxed", "answer_colon"]

_LABEL = re.compile(r"\banswer(?:[ \t]+is)?[ \t]*[*_]{0,3}[ \t]*[:：]", re.IGNORECASE)
# A prompt's own example, repeated by the model, is no answer.
_EXAMPLE = re.compile(r"(?:example|e\.g\.?|format|such as)[:,]?\s*['\"‘“`]*$", re.IGNORECASE)
_EXAMPLE_CHARS: Final = 24
# Letters stand at the beginning of an answer; the patterns below see no more of it.
_HEAD_CHARS: Final = 200
# How many boxes and labels are looked at, from the last one backwards.
_CANDIDATES: Final = 500
_AROUND: Final = " \t\r\n*_`'\"“”‘’$()[]{}<>\\.,;:!"
_WORD_BEFORE = re.compile(r"(?:option|choice|letter)\s+(?=\W*\w\b)", re.IGNORECASE)
_LABELLED = re.compile(r"^\s*\(?[A-Za-z]\s*[:.)]\s+")
_NEXT_LETTER = re.compile(
    r"[\s,;/&|.()\-–—]*(?:(?:or|and|maybe|perhaps|possibly|also)\b[\s,]*)*\(?([A-Z])(?=\s*(?:[).,;*]|$))"
)
_LONE_LETTER = re.compile(r"\b[^\W\d_]\b")
_SEVERAL_BOXED = re.compile(r"[^\W\d_](?:\W*(?:,|/|&|\+|\||\bor\b|\band\b|\s)\W*[^\W\d_]\b)+", re.IGNORECASE)
_SEVERAL = re.compile(r"\W*[^\W\d_](?:\W*(?:,|/|&|\+|\||\bor\b|\band\b)\W*[^\W\d_]\b(?!['’]))+", re.IGNORECASE)
# The letter, then the end, or what parts it from words that follow. Capitals but A and I are no words of their own.
_LETTER_FIRST = re.compile(
    r"[\s*_`'\"“‘$(\[{<\\]*([^\W\d_])"
    r"(?:[*_`'\"”’$\s]*(?:$|\\|[)\].:,;}>–—-](?![^\W_]))|\s+(?:[^\w\s]|\d|(?:is|because|since|as)\b)|(?<=[B-HJ-Z])\s)"
)


class Options(BaseModel):
    """None."""

    model_config = ConfigDict(extra="forbid")


class Task(BaseModel):
    """What a row needs. Letters are compared as capitals."""

    model_config = ConfigDict(frozen=True)

    options: Annotated[list[dict[str, str]], Field(min_length=1)]
    expected_answer: str
    grading_mode: GradingMode = "strict_single_letter_boxed"
    template_metadata: dict[str, Any] | None = None

    @field_validator("template_metadata")
    @classmethod
    def _no_pattern_of_its_own(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value and value.get("output_regex") is not None:
            # To ignore it would grade the row by another rule than its author's.
            raise ValueError("output_regex is not supported: use a grading_mode")
        return value

    @model_validator(mode="after")
    def _answer_is_an_option(self) -> Self:
        letters = [letter for option in self.options for letter in option]
        if wrong := [letter for letter in letters if len(letter) != 1 or not letter.isalpha()]:
            raise ValueError(f"options are named by single letters, not by {wrong[0]!r}")
        if twice := [letter for letter, count in Counter(map(str.upper, letters)).items() if count > 1]:
            raise ValueError(f"the option {twice[0]} stands there twice")
        if self.letter not in self.texts:
            raise ValueError(f"expected_answer {self.expected_answer!r} is no option; options: {''.join(self.texts)}")
        return self

    @property
    def letter(self) -> str:
        return self.expected_answer.strip().upper()

    @property
    def texts(self) -> dict[str, str]:
        """Each option's text by its letter."""
        return {letter.upper(): text for option in self.options for letter, text in option.items()}


@dataclass(frozen=True, slots=True)
class Choice:
    """An answer as found; no letter when it names several."""

    at: int
    form: Form
    letter: str | None


class MultipleChoice:
    """Implements `shared.ports.verifier.Verifier`."""

    task_data = Task
    reverify_mode: ReverifyMode = "stateless"
    needs_session = False

    async def verify(self, task: Task, answer: Answer, judge: Judge | None) -> Verdict:
        choice = last_choice(final_text(answer.response), task)
        letter = choice.letter if choice is not None else None
        fields: dict[str, Any] = {
            "reward": float(letter == task.letter),
            "expected_answer": task.letter,
            "extracted_answer": letter,
            "extracted_by": choice.form if choice is not None else None,
        }
        return Verdict.model_validate(fields)

    def aggregate(self, results: list[dict[str, Any]]) -> dict[str, Any]:
        """How often a letter was found, by form."""
        return {"extracted_by": dict(Counter(str(result.get("extracted_by")) for result in results))}

    async def close(self) -> None:
        return


def create(options: Options) -> MultipleChoice:
    return MultipleChoice()


def last_choice(text: str, task: Task) -> Choice | None:
    """The answer that stands last in the text."""
    found = [choice for choice in (_last_boxed(text, task), _last_labelled(text, task)) if choice is not None]
    return max(found, key=lambda choice: choice.at) if found else None


def _last_boxed(text: str, task: Task) -> Choice | None:
    limit = _answer_chars(task)
    for box in boxes(text)[: -_CANDIDATES - 1 : -1]:
        if box.content_end - box.content_start > limit:
            continue
        content = unwrapped(box.content(text))
        core = content.strip(_AROUND)
        if len(core) == 1 and core.isalpha() and (letter := _capital(core, task)):
            return Choice(box.start, "boxed", letter)
        if _names_several(_SEVERAL_BOXED.fullmatch(core[:_HEAD_CHARS]), task):
            return Choice(box.start, "boxed", None)
        if task.grading_mode == "lenient_boxed" and (letter := _option_with(content, task)):
            return Choice(box.start, "boxed", letter)
    return None


def _last_labelled(text: str, task: Task) -> Choice | None:
    limit = _answer_chars(task)
    for match in list(_LABEL.finditer(text))[: -_CANDIDATES - 1 : -1]:
        if _EXAMPLE.search(text[max(0, match.start() - _EXAMPLE_CHARS) : match.start()]):
            continue
        line = text[match.end() : match.end() + limit].lstrip(" \t\r\n*_").split("\n", 1)[0]
        content = _WORD_BEFORE.sub("", unwrapped(line), count=1)
        head = content[:_HEAD_CHARS]
        if _names_several(_SEVERAL.match(head), task):
            return Choice(match.start(), "answer_colon", None)
        if (first := _LETTER_FIRST.match(head)) and (letter := _capital(first.group(1), task)):
            said = letter if _says_no_other(content[first.end(1) :], letter, task) else None
            return Choice(match.start(), "answer_colon", said)
        if task.grading_mode.startswith("lenient_answer_colon") and (letter := _option_with(content, task)):
            return Choice(match.start(), "answer_colon", letter)
    return None


def _names_several(match: re.Match[str] | None, task: Task) -> bool:
    """Whether these are several different options at once."""
    letters = {letter.upper() for letter in _LONE_LETTER.findall(match.group())} if match else set()
    return len(letters) > 1 and letters <= task.texts.keys()


def _says_no_other(rest: str, letter: str, task: Task) -> bool:
    """Whether no other option is named in the same breath: `B, or possibly C` is no choice, `B) A dog` is one."""
    other = _NEXT_LETTER.match(rest)
    return other is None or other.group(1) == letter or other.group(1) not in task.texts


def _answer_chars(task: Task) -> int:
    """What is looked at of one answer: enough for the longest option with its dressing."""
    return _HEAD_CHARS + 2 * max(len(text) for text in task.texts.values())


def _capital(letter: str, task: Task) -> str | None:
    """The letter as options are named; None for a small one where only capitals count."""
    strict = task.grading_mode == "strict_single_letter_boxed"
    return None if strict and letter != letter.upper() else letter.upper()


def _option_with(content: str, task: Task) -> str | None:
    """The only option whose text this is. A text that merely holds it may say something else: `25` is not `5`."""
    wanted = {_plain(content), _plain(_LABELLED.sub("", content, count=1))}
    texts = {letter: _plain(text) for letter, text in task.texts.items()}
    matching = [letter for letter, text in texts.items() if text and text in wanted]
    return matching[0] if len(matching) == 1 else None


def _plain(text: str) -> str:
    return " ".join(unwrapped(text).casefold().split()).strip(_AROUND)
