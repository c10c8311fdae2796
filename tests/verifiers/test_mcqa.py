"""Multiple choice: what counts as the chosen letter, and what does not."""

import time
from typing import Any

import pytest
from pydantic import ValidationError

from services.resources.answer_text import without_thinking
from services.resources.verifiers.mcqa import MultipleChoice, Options, Task, create
from shared.ports.verifier import Answer

OPTIONS = [{"A": "a red fox"}, {"B": "a blue whale"}, {"C": "10^-4 eV"}, {"D": "the fox"}]


def _task(mode: str = "strict_single_letter_boxed", expected: str = "B", **fields: Any) -> Task:
    return Task.model_validate({"options": OPTIONS, "expected_answer": expected, "grading_mode": mode, **fields})


async def _graded(text: Any, task: Task) -> dict[str, Any]:
    message = {"type": "message", "role": "assistant", "content": text}
    verdict = await create(Options()).verify(task, Answer({}, {"output": [message]}), None)
    return verdict.model_dump()


@pytest.mark.parametrize(
    ("text", "letter", "form"),
    [
        (r"\boxed{B}", "B", "boxed"),
        (r"So \boxed{ [C] }.", "C", "boxed"),
        (r"$$\boxed{\text{B}}$$", "B", "boxed"),
        (r"\boxed{\textbf{(D)}}", "D", "boxed"),
        (r"\boxed{\mathrm{C}}", "C", "boxed"),
        (r"\boxed{B.}", "B", "boxed"),
        (r"\boxed {B}", "B", "boxed"),
        (r"\boxed{\boxed{B}}", "B", "boxed"),
        ("Answer: B", "B", "answer_colon"),
        ("**Answer: B**", "B", "answer_colon"),
        ("**Answer:** B", "B", "answer_colon"),
        ("*Answer*: (C)", "C", "answer_colon"),
        ("Answer:\n\nB", "B", "answer_colon"),
        ("Answer: B.", "B", "answer_colon"),
        ("Answer: B) a blue whale", "B", "answer_colon"),
        ("Answer: **C**: 10^-4 eV", "C", "answer_colon"),
        ("Answer: B - the whale", "B", "answer_colon"),
        ("Answer: B is right", "B", "answer_colon"),
        ("Answer: A is right", "A", "answer_colon"),
        ("Answer: C, because of that", "C", "answer_colon"),
        ("Answer: Option C", "C", "answer_colon"),
        (r"Answer: \text{C}", "C", "answer_colon"),
        (r"Answer: \(C\)", "C", "answer_colon"),
        (r"Answer: $\boxed{C}$", "C", "boxed"),
        ("ANSWER: D", "D", "answer_colon"),
        ("The correct answer is: D", "D", "answer_colon"),
        ("Final Answer: D", "D", "answer_colon"),
        ("Ａｎｓｗｅｒ： Ｂ", "B", "answer_colon"),
    ],
)
async def test_these_are_a_choice(text: str, letter: str, form: str) -> None:
    graded = await _graded(text, _task(expected=letter))
    assert (graded["extracted_answer"], graded["extracted_by"], graded["reward"]) == (letter, form, 1.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "B",
        "I choose B",
        r"\boxed{}",
        r"\boxed{AB}",
        r"\boxed{Both}",
        r"\boxed{5 C}",
        r"\boxed{B",
        r"\boxed{b}",
        "Answer: b",
        "Answer: LETTER",
        "Answer: A good choice is the whale",
        "Answer: I think so",
        "Answer: A's whale",
        "Answer: neither",
        "The last line is 'Answer: LETTER'. Example: 'Answer: B'. I do not know.",
        "<think>Answer: B</think> I do not know.",
        r"<think>unfinished \boxed{B}",
        r"thinking: \boxed{B}</think> I do not know.",
        "My answers: B",
    ],
)
async def test_these_are_no_choice(text: str) -> None:
    graded = await _graded(text, _task())
    assert (graded["extracted_answer"], graded["extracted_by"], graded["reward"]) == (None, None, 0.0)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (r"\boxed{B} no, \boxed{A}", "A"),
        (r"\boxed{A} no, \boxed{B}", "B"),
        ("Answer: A\nwait\nAnswer: B", "B"),
        (r"\boxed{A} so Answer: B", "B"),
        (r"Answer: A, or rather \boxed{B}", "B"),
        (r"\boxed{B} and then \boxed{", "B"),
        (r"Answer: B since \boxed{10^{-4}} eV", "B"),
        (r"\boxed{10^{-4}} eV. Answer: B", "B"),
        (r"<think>\boxed{A}</think>\boxed{B}", "B"),
        (r"Answer: B since \boxed{5 N}", "B"),
    ],
)
async def test_the_last_complete_choice_counts(text: str, letter: str) -> None:
    assert (await _graded(text, _task()))["extracted_answer"] == letter


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{B} \boxed{A, B}",
        r"\boxed{A or B}",
        r"\boxed{A B}",
        "Answer: A or B",
        "Answer: A/B/C/D",
        "Answer: B, C",
        "Answer: B & C",
        r"\boxed{B} \boxed{Z}",
        "Answer: Z",
    ],
)
async def test_several_letters_at_once_or_no_option_earn_nothing(text: str) -> None:
    graded = await _graded(text, _task())
    assert graded["reward"] == 0.0
    assert graded["extracted_by"] is not None
    assert graded["extracted_answer"] in {None, "Z"}


@pytest.mark.parametrize(
    ("mode", "text", "letter"),
    [
        ("lenient_boxed", r"\boxed{b}", "B"),
        ("lenient_boxed", r"\boxed{A Blue  Whale}", "B"),
        ("lenient_boxed", r"\boxed{\text{B: a blue whale}}", "B"),
        ("lenient_boxed", r"\boxed{the fox}", "D"),
        ("lenient_boxed", r"\boxed{fox}", None),
        ("lenient_boxed", r"\boxed{the fox or a blue whale}", None),
        ("lenient_answer_colon", "answer: b", "B"),
        ("lenient_answer_colon", "Answer: a blue whale.", "B"),
        ("lenient_answer_colon_md", "**Answer**: *a red fox*", "A"),
        ("strict_single_letter_boxed", "Answer: a blue whale", None),
        ("strict_single_letter_boxed", r"\boxed{a blue whale}", None),
    ],
)
async def test_lenient_modes_take_small_letters_and_the_text_of_one_option(
    mode: str, text: str, letter: str | None
) -> None:
    assert (await _graded(text, _task(mode)))["extracted_answer"] == letter


async def test_only_the_last_assistant_message_counts() -> None:
    output = [
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": r"\boxed{B}"}]},
        {"type": "function_call", "name": "x", "arguments": "{}", "call_id": "c"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "done"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": r"\boxed{B}"}]},
    ]
    verdict = await MultipleChoice().verify(_task(), Answer({}, {"output": output}), None)
    assert verdict.reward == 0.0
    assert (await MultipleChoice().verify(_task(), Answer({}, {"output": []}), None)).reward == 0.0


@pytest.mark.parametrize(
    "changes",
    [
        {"expected_answer": "E"},
        {"expected_answer": ""},
        {"expected_answer": "AB"},
        {"options": []},
        {"options": [{"A": "x"}, {"A": "y"}, {"B": "z"}]},
        {"options": [{"AB": "x"}, {"B": "z"}]},
        {"options": [{"1": "x"}, {"B": "z"}]},
        {"options": [{"B": 5}]},
        {"grading_mode": "generous"},
        {"template_metadata": {"output_regex": "(.*)"}},
    ],
)
def test_a_row_that_cannot_be_graded_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Task.model_validate({"options": OPTIONS, "expected_answer": "B", **changes})


def test_rows_may_name_letters_small_and_carry_more_fields() -> None:
    task = Task.model_validate(
        {"options": [{"a": "x", "b": "y"}], "expected_answer": " b ", "uuid": "1", "metadata": {}}
    )
    assert (task.letter, task.texts) == ("B", {"A": "x", "B": "y"})


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 200_000,
        "{" * 1_000_000,
        "}" * 1_000_000,
        "answer:" * 200_000,
        "Answer: A" + "," * 1_000_000,
        "<think>" * 500_000,
        "</think>" * 500_000,
        "\\boxed{" * 7_000 + "x y" + "}" * 7_000,
        "\\text{" * 100_000,
        "\\boxed{,, ,,,,,,,,,,,,,,,,,}" * 4_000,
        "\\" * 1_000_000,
    ],
    ids=lambda text: text[:12],
)
async def test_a_hostile_answer_costs_little_time_and_earns_nothing(text: str) -> None:
    started = time.process_time()
    graded = await _graded(text, _task("lenient_boxed"))
    assert graded["reward"] == 0.0
    assert time.process_time() - started < 1.5


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("a<think>b</think>c", "ac"),
        ("b</think>c", "c"),
        ("a<think>b", "a"),
        ("a<think>b<think>c</think>d", "ad"),
        ("a</think>b<think>c</think>d</think>e<think>f", "e"),
        ("<think></think>", ""),
        ("plain", "plain"),
    ],
)
def test_thinking_is_left_out(text: str, left: str) -> None:
    assert without_thinking(text) == left


async def test_a_long_text_does_not_make_thinking_an_answer() -> None:
    long = "word " * 100_000
    assert (await _graded(f"<think>{long} Answer: A</think>Answer: B", _task()))["extracted_answer"] == "B"
    assert (await _graded(f"Answer: B <think>{long} Answer: A", _task()))["extracted_answer"] == "B"
    assert (await _graded(f"<think>{long} Answer: A", _task()))["extracted_answer"] is None


def test_metrics_count_how_answers_were_given() -> None:
    results: list[dict[str, Any]] = [{"extracted_by": "boxed"}, {"extracted_by": "boxed"}, {"extracted_by": None}]
    assert MultipleChoice().aggregate(results) == {"extracted_by": {"boxed": 2, "None": 1}}
