"""String match: where the answer is found, and what is made equal."""

import time
from typing import Any

import pytest
from pydantic import ValidationError

from services.resources.verifiers.string_match import Options, Task, create
from shared.ports.verifier import Answer


async def _graded(text: str, **task: Any) -> dict[str, Any]:
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    verdict = await create(Options()).verify(Task.model_validate(task), Answer({}, {"output": [message]}), None)
    return verdict.model_dump()


@pytest.mark.parametrize(
    ("mode", "text", "extracted"),
    [
        ("boxed", r"It is \boxed{Paris}.", "Paris"),
        ("boxed", r"\boxed{London} no, \boxed{Paris}", "Paris"),
        ("boxed", r"\boxed{Paris} \boxed{Lon", "Paris"),
        ("boxed", r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("boxed", "Final answer: Paris", None),
        ("boxed", r"\boxed{ }", None),
        ("final_answer", "Final answer: Saturn", "Saturn"),
        ("final_answer", "Answer: Venus\nFinal Answer: Saturn\n", "Saturn"),
        ("final_answer", "**Final answer:**\n\nSaturn\nBye", "Saturn"),
        ("final_answer", r"Final answer: $\boxed{Saturn}$", "Saturn"),
        ("final_answer", r"so \boxed{Saturn}", "Saturn"),
        ("final_answer", "Saturn", None),
        ("final_answer", "<think>Final answer: Venus</think>Saturn", None),
        ("final_answer", "Final answer:", None),
        ("last_line", "The largest is\n  Pacific Ocean \n\n", "Pacific Ocean"),
        ("last_line", " \n", None),
        ("full", " Paris\n", "Paris"),
        ("full_response", "Paris", "Paris"),
        ("full", "", None),
    ],
)
async def test_the_answer_is_found_where_the_row_says(mode: str, text: str, extracted: str | None) -> None:
    graded = await _graded(text, expected_answer="nothing else", extraction_mode=mode)
    assert graded["extracted"] == extracted
    assert graded["reward"] == 0.0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Paris", "Paris"),
        ("paris", "Paris"),
        ("  The   Hague ", "The Hague"),
        ("Paris.", "Paris"),
        ("**Paris**", "Paris"),
        ("Paris**", "Paris"),
        ('"Paris."', "Paris"),
        ("“Paris”", "Paris"),
        (r"\text{Paris}", "Paris"),
        (r"\textbf{\text{Paris}}", "Paris"),
        (r"\boxed{Paris}", "Paris"),
        ("$80$", "80"),
        ("80.0", "80"),
        ("1,000", "1000"),
        ("+7", "7"),
        ("-0.50", "-0.5"),
        ("Straße", "STRASSE"),
        ("ﬁn", "fin"),
        ("Ｐａｒｉｓ", "Paris"),
    ],
)
async def test_these_are_equal(answer: str, expected: str) -> None:
    assert (await _graded(answer, expected_answer=expected, extraction_mode="full"))["reward"] == 1.0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Paris, France", "Paris"),
        ("not Paris", "Paris"),
        ("Parisian", "Paris"),
        ("80 km/h", "80"),
        ("1,00", "100"),
        ("80.1", "80"),
        ("1e3", "1000"),
        ("-80", "80"),
        ("0x50", "80"),
        ("New York", "NewYork"),
    ],
)
async def test_these_are_not_equal(answer: str, expected: str) -> None:
    assert (await _graded(answer, expected_answer=expected, extraction_mode="full"))["reward"] == 0.0


async def test_case_counts_where_the_row_says_so() -> None:
    task = {"expected_answer": "pH", "extraction_mode": "full", "case_sensitive": True}
    assert (await _graded("pH", **task))["reward"] == 1.0
    assert (await _graded("PH", **task))["reward"] == 0.0


async def test_any_of_several_expected_answers_will_do() -> None:
    task = {"expected_answer": ["USA", "United States"], "extraction_mode": "full"}
    assert (await _graded("united states.", **task))["reward"] == 1.0
    assert (await _graded("States", **task))["reward"] == 0.0


@pytest.mark.parametrize(
    "task",
    [
        {},
        {"expected_answer": ""},
        {"expected_answer": " . "},
        {"expected_answer": []},
        {"expected_answer": ["Paris", "!"]},
        {"expected_answer": 80},
        {"expected_answer": "x", "extraction_mode": "guess"},
    ],
)
def test_a_row_that_anything_or_nothing_would_match_is_refused(task: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Task.model_validate(task)


@pytest.mark.parametrize(
    "text",
    [
        "final answer:" * 100_000,
        "\\boxed{" * 100_000,
        '"!' * 500_000,
        "$" * 1_000_000,
        "9" * 1_000_000,
        "\n" * 1_000_000,
    ],
    ids=lambda text: text[:6],
)
@pytest.mark.parametrize("mode", ["boxed", "final_answer", "last_line", "full"])
async def test_a_hostile_answer_costs_little_time_and_earns_nothing(text: str, mode: str) -> None:
    started = time.process_time()
    assert (await _graded(text, expected_answer="9", extraction_mode=mode))["reward"] == 0.0
    assert time.process_time() - started < 1.5
