"""One comparison, from two texts to an outcome. Runs in a child only; importing it takes a third of a second."""

from collections.abc import Callable

from services.resources.grading.equality import same_value
from services.resources.grading.protocol import GOLD_UNREADABLE, Outcome, Result
from services.resources.grading.reading import Reading, UnreadableError, read
from services.resources.grading.units import contradict


def compare(gold_text: str, answer_text: str, gold_was_read: Callable[[], None]) -> Result:
    """Compare; `gold_was_read` is called between the gold's part of the work and the answer's.

    Raises:
        MemoryError: the memory limit was met.
    """
    try:
        gold = read(gold_text)
    except (UnreadableError, RecursionError) as error:
        return Result(GOLD_UNREADABLE, str(error))
    gold_was_read()
    try:
        answer = read(answer_text)
    except (UnreadableError, RecursionError) as error:
        return Result(Outcome.UNREADABLE, str(error))
    try:
        return Result(Outcome.EQUAL if _same(gold, answer, answer_text) else Outcome.NOT_EQUAL)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the algebra library raises, equality is not shown
        return Result(Outcome.INCOMPARABLE, f"{type(error).__name__}: {error}"[:500])


def _same(gold: Reading, answer: Reading, answer_text: str) -> bool:
    if contradict(gold.unit, answer.unit):
        return False
    if same_value(gold.value, answer.value):
        return True
    if gold.value.free_symbols:
        return False
    # Where no variable is expected, the letter behind the answer's number is a unit: `5m` for `5`.
    try:
        measured = read(answer_text, letter_units=True)
    except UnreadableError:
        return False
    return not contradict(gold.unit, measured.unit) and same_value(gold.value, measured.value)
