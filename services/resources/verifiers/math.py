r"""Mathematical answers: the last complete `\boxed{…}` against the row's expected answer.

The algebra library works in killable children (`services/resources/grading`), never in this process. An
answer that it cannot compare within its limits is not shown to be equal: reward 0, and the verdict says
why. An expected answer that it cannot read is a fault of the row and no grade. A configured judge is asked
wherever the library does not say that both are equal.
"""

import asyncio
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from services.resources.answer_text import spoken_text
from services.resources.grading.answers import bare, is_blank, last_box, same_text
from services.resources.grading.judging import Evaluation, judged_equal
from services.resources.grading.pool import SHARED_POOL
from services.resources.grading.process import Request
from services.resources.grading.protocol import (
    GOLD_CRASHED,
    GOLD_MEMORY,
    GOLD_TIMEOUT,
    GOLD_UNREADABLE,
    Outcome,
    Result,
)
from shared.contracts.resources import ReverifyMode, Verdict
from shared.errors import VerifierError
from shared.ports.verifier import Answer, Judge, Verifier

_LONG_TEXT_CHARS = 100_000
_GOLD_FAULTS = {
    GOLD_UNREADABLE: "is not mathematics that the library reads",
    GOLD_TIMEOUT: "cannot be read within the time limit",
    GOLD_MEMORY: "cannot be read within the memory limit",
    GOLD_CRASHED: "crashes the library",
}


class Options(BaseModel):
    """Settings of a `math` entry."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    """Bound of one comparison; its process is killed then."""
    memory_mib: Annotated[int, Field(ge=256)] = 1024
    """Address space of a grading process; an idle one needs about a quarter of the default."""
    children: Annotated[int, Field(ge=1)] = 2
    """Comparisons at once in one process; entries share the processes, the largest number counts."""


class MathTask(BaseModel):
    """What a row must hold; further fields are not looked at."""

    expected_answer: Annotated[str, Field(min_length=1)]
    question: str | None = None


class MathVerifier:
    """One `math` entry. It starts no process before the first answer that needs one, or `warm`."""

    task_data: type[BaseModel] = MathTask
    reverify_mode: ReverifyMode = "stateless"
    needs_session = False

    def __init__(self, options: Options) -> None:
        self._options = options

    async def warm(self) -> None:
        """Start the children ahead of the first need.

        Raises:
            GraderUnavailableError: a child does not start.
        """
        await SHARED_POOL.join(self, self._options.children).warm()

    async def verify(self, task: MathTask, answer: Answer, judge: Judge | None) -> Verdict:
        """Grade the last box.

        Raises:
            JudgeError: the judge could not be asked.
            VerifierError: the expected answer cannot be read, or no child could work.
        """
        extracted = await _extract(spoken_text(answer.response))
        if extracted is None or is_blank(extracted):
            return _verdict(Result(Outcome.NO_ANSWER), extracted, [])
        result = await self._compare(task.expected_answer, extracted)
        if result.word == Outcome.EQUAL:
            return _verdict(result, extracted, [])
        if judge is not None:
            return _verdict(
                result, extracted, await judged_equal(judge, task.question, task.expected_answer, extracted)
            )
        if result.word in _GOLD_FAULTS:
            detail = f" ({result.detail})" if result.detail else ""
            raise VerifierError(
                f"The row's expected_answer {_GOLD_FAULTS[result.word]}{detail}: {task.expected_answer[:200]!r}."
                " Correct the row, or configure a judge."
            )
        return _verdict(result, extracted, [])

    async def _compare(self, expected: str, extracted: str) -> Result:
        if same_text(expected, extracted):
            return Result(Outcome.EQUAL)
        pool = SHARED_POOL.join(self, self._options.children)
        return await pool.compare(
            Request(bare(expected), bare(extracted), self._options.timeout_s, self._options.memory_mib)
        )

    async def close(self) -> None:
        """End the children, unless another entry uses them; idempotent."""
        await SHARED_POOL.leave(self)


def create(options: Options) -> Verifier:
    """A verifier of mathematical answers."""
    return MathVerifier(options)


async def _extract(text: str) -> str | None:
    """The last box; a very long text is searched in a thread, so that the server goes on meanwhile."""
    return last_box(text) if len(text) < _LONG_TEXT_CHARS else await asyncio.to_thread(last_box, text)


def _verdict(result: Result, extracted: str | None, evaluations: list[Evaluation]) -> Verdict:
    by_library = float(result.word == Outcome.EQUAL)
    by_judge = float(bool(evaluations) and all(evaluation.equal for evaluation in evaluations))
    fields: dict[str, Any] = {
        "extracted_answer": extracted,
        "library_reward": by_library,
        "library_outcome": str(Outcome.UNDECIDED if result.word in _GOLD_FAULTS else result.word),
        "library_detail": result.detail,
        "judge_evaluations": [evaluation.told() for evaluation in evaluations],
    }
    return Verdict(reward=max(by_library, by_judge), **fields)
