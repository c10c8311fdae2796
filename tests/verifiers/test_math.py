"""What the mathematical verifier answers: rewards, what it tells beside them, and the judge's part."""

from collections.abc import AsyncIterator

import pytest
from pydantic import ValidationError

from services.resources.grading.judging import DIFFERENT_LABEL, EQUAL_LABEL
from services.resources.grading.pool import SHARED_POOL
from services.resources.verifiers.math import MathTask, MathVerifier, Options
from shared.errors import JudgeError, VerifierError
from shared.plugins import PluginFolder
from shared.ports.verifier import Answer
from tests.verifiers.math_answers import boxed, said


class ScriptedJudge:
    """Gives its replies in turn and keeps the prompts."""

    def __init__(self, *replies: str | JudgeError) -> None:
        self._replies = list(replies)
        self.prompts: list[str] = []

    async def ask(self, prompt: str, *, system: str | None = None, timeout_s: float | None = None) -> str:
        self.prompts.append(prompt)
        reply = self._replies.pop(0)
        if isinstance(reply, JudgeError):
            raise reply
        return reply


@pytest.fixture
async def verifier() -> AsyncIterator[MathVerifier]:
    verifier = MathVerifier(Options())
    yield verifier
    await verifier.close()


@pytest.mark.behaviour("MA-1")
async def test_the_last_complete_box_is_graded_and_told(verifier: MathVerifier) -> None:
    verdict = await verifier.verify(
        MathTask(expected_answer=r"\(\frac{1}{2}\)"), said(r"not \boxed{3} but \boxed{0.5} or \boxed{7"), None
    )
    assert verdict.model_dump(exclude_none=True) == {
        "reward": 1.0,
        "mask_sample": False,
        "extracted_answer": "0.5",
        "library_reward": 1.0,
        "library_outcome": "equal",
        "judge_evaluations": [],
    }


@pytest.mark.behaviour("MA-1")
@pytest.mark.parametrize("text", ["It is 4.", r"\boxed{}", r"\boxed{4} no, \boxed{ }", ""])
async def test_no_box_or_a_blank_one_earns_nothing_and_asks_no_judge(verifier: MathVerifier, text: str) -> None:
    judge = ScriptedJudge()
    verdict = (await verifier.verify(MathTask(expected_answer="4"), said(text), judge)).model_dump()
    assert (verdict["reward"], verdict["library_outcome"], judge.prompts) == (0.0, "no_answer", [])


async def test_a_response_without_a_message_earns_nothing(verifier: MathVerifier) -> None:
    verdict = await verifier.verify(MathTask(expected_answer="4"), Answer(params={}, response={"output": []}), None)
    assert verdict.reward == 0.0


async def test_text_that_is_no_mathematics_still_equals_itself_without_a_child(verifier: MathVerifier) -> None:
    task = MathTask(expected_answer=r"\Im f \ldots \heartsuit")
    assert (await verifier.verify(task, boxed(r"\Im f \ldots  \heartsuit"), None)).reward == 1.0
    assert SHARED_POOL.join(verifier, 1).pids == []


async def test_an_answer_that_cannot_be_read_is_told_and_earns_nothing(verifier: MathVerifier) -> None:
    verdict = (await verifier.verify(MathTask(expected_answer="4"), boxed(r"4 \heartsuit )("), None)).model_dump()
    assert (verdict["reward"], verdict["library_outcome"]) == (0.0, "unreadable")


async def test_an_expected_answer_that_cannot_be_read_is_no_grade(verifier: MathVerifier) -> None:
    with pytest.raises(VerifierError, match=r"expected_answer is not mathematics .*Correct the row"):
        await verifier.verify(MathTask(expected_answer=r"\heartsuit )("), boxed("4"), None)


@pytest.mark.behaviour("MA-1", "RS-3")
async def test_the_judge_is_asked_in_both_orders_where_the_library_says_different(verifier: MathVerifier) -> None:
    judge = ScriptedJudge(f"They agree. {EQUAL_LABEL}", EQUAL_LABEL)
    task = MathTask(expected_answer="77 percent or so", question="How much?")
    verdict = (await verifier.verify(task, boxed("about three quarters"), judge)).model_dump()
    assert (verdict["reward"], verdict["library_reward"]) == (1.0, 0.0)
    assert [entry["order"] for entry in verdict["judge_evaluations"]] == ["expected_first", "answer_first"]
    assert [entry["verdict_label"] for entry in verdict["judge_evaluations"]] == [EQUAL_LABEL, EQUAL_LABEL]
    first, second = judge.prompts
    assert first.index("77 percent") < first.index("three quarters")
    assert second.index("three quarters") < second.index("77 percent")
    assert "How much?" in first


@pytest.mark.behaviour("MA-1")
@pytest.mark.parametrize(
    ("replies", "reward", "asked"),
    [
        ([EQUAL_LABEL, DIFFERENT_LABEL], 0.0, 2),
        ([DIFFERENT_LABEL], 0.0, 1),
        ([f"{EQUAL_LABEL} or rather {DIFFERENT_LABEL}", f"{EQUAL_LABEL}, not {DIFFERENT_LABEL}"], 1.0, 2),
        ([f"{DIFFERENT_LABEL}, or {EQUAL_LABEL}"], 0.0, 1),
        (["I cannot tell."], 0.0, 1),
        ([EQUAL_LABEL, ""], 0.0, 2),
    ],
)
async def test_the_first_label_wins_and_both_orders_must_agree(
    verifier: MathVerifier, replies: list[str], reward: float, asked: int
) -> None:
    judge = ScriptedJudge(*replies)
    verdict = await verifier.verify(MathTask(expected_answer="4"), boxed("5"), judge)
    assert (verdict.reward, len(judge.prompts)) == (reward, asked)


async def test_the_judge_is_not_asked_where_the_library_says_equal(verifier: MathVerifier) -> None:
    judge = ScriptedJudge()
    assert (await verifier.verify(MathTask(expected_answer="4"), boxed("8/2"), judge)).reward == 1.0
    assert judge.prompts == []


async def test_the_judge_decides_where_the_expected_answer_cannot_be_read(verifier: MathVerifier) -> None:
    judge = ScriptedJudge(EQUAL_LABEL, EQUAL_LABEL)
    task = MathTask(expected_answer=r"\heartsuit )(")
    verdict = (await verifier.verify(task, boxed("a heart"), judge)).model_dump()
    assert (verdict["reward"], verdict["library_outcome"]) == (1.0, "undecided")


@pytest.mark.behaviour("RS-3")
async def test_a_judge_that_fails_is_an_error_and_no_grade(verifier: MathVerifier) -> None:
    judge = ScriptedJudge(EQUAL_LABEL, JudgeError("the judge answered 503"))
    with pytest.raises(JudgeError, match="503"):
        await verifier.verify(MathTask(expected_answer="4"), boxed("5"), judge)


@pytest.mark.behaviour("RS-4")
def test_it_is_a_plugin_whose_verdict_needs_the_row_alone() -> None:
    folder = PluginFolder("services.resources.verifiers", "verifier")
    verifier = folder.module("math").create(folder.options("math", {"timeout_s": 5}))
    assert (verifier.reverify_mode, verifier.needs_session) == ("stateless", False)


def test_a_row_needs_an_expected_answer_and_may_hold_more() -> None:
    assert MathTask.model_validate({"expected_answer": "4", "source": "own"}).question is None
    for row in ({}, {"expected_answer": ""}, {"expected_answer": 4}):
        with pytest.raises(ValidationError, match="expected_answer"):
            MathTask.model_validate(row)


@pytest.mark.parametrize("values", [{"timeout_s": 0}, {"memory_mib": 16}, {"children": 0}, {"timeout": 5}])
def test_settings_that_make_no_sense_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        Options.model_validate(values)
