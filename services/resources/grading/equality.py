"""Whether two readings are the same answer. Runs in a child only.

Walks the structure: equations, relations, sets, tuples, intervals, matrices; scalars go to `scalars`.
The forms that count as the same (an assignment and its value, a list and a set, a tuple written with
round brackets and an open interval) are math-verify's. Nothing here catches an error of the library:
what goes wrong in a comparison is told, not graded.
"""

from typing import Any

from latex2sympy2_extended.sets import FiniteSet as ListedSet
from math_verify.grader import (
    INVERSE_RELATIONS,
    is_assignment_relation,
    is_equation,
    is_relation,
    sympy_compare_symbols,
    take_first_relation,
    take_last_relation,
    unwrap_fcs,
)
from sympy import And, Eq, FiniteSet, Interval, Ne, Set, Symbol, Tuple, Union, cancel, solveset, together
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.matrices import MatrixBase

from services.resources.grading.scalars import exact, same_scalar


def same_value(gold: Any, answer: Any) -> bool:
    """Whether `answer` may stand for `gold`. Not symmetric: the gold side's form leads."""
    if _names_set(gold) and is_relation(answer) and not is_equation(answer):
        answer = _solutions(answer)
    gold, answer = _without_names(gold, answer)
    if is_relation(gold) and isinstance(answer, Set):
        gold = _solutions(gold)
    if is_relation(gold) or is_relation(answer):
        return is_relation(gold) and is_relation(answer) and _same_relation(gold, answer)
    if isinstance(gold, MatrixBase) or isinstance(answer, MatrixBase):
        return isinstance(gold, MatrixBase) and isinstance(answer, MatrixBase) and _same_matrix(gold, answer)
    if isinstance(gold, Set | Tuple) or isinstance(answer, Set | Tuple):
        return _same_collection(gold, answer)
    if isinstance(gold, Symbol) or isinstance(answer, Symbol):
        return bool(sympy_compare_symbols(gold, answer)) or same_scalar(gold, answer)
    return same_scalar(gold, answer)


def _without_names(gold: Any, answer: Any) -> tuple[Any, Any]:
    """Drop `x =` where only one side has it; `2x + y = 1` names nothing and stays an equation."""
    gold, answer = _shortened(gold), _shortened(answer)
    if _names_value(answer) and not is_equation(gold):
        return gold, take_last_relation(answer).rhs
    if is_assignment_relation(gold) and not is_equation(answer):
        return take_last_relation(gold).rhs, answer
    return gold, answer


def _shortened(value: Any) -> Any:
    """`x = 1 + 1 = 2` is `x = 2`."""
    if not is_assignment_relation(value):
        return value
    return Eq(take_first_relation(value).lhs, take_last_relation(value).rhs, evaluate=False)


def _names_value(value: Any) -> bool:
    """Whether an equation is a name or a calculation and, at its end, a value."""
    if not is_equation(value):
        return False
    if is_assignment_relation(value) or isinstance(take_first_relation(value).lhs, AppliedUndef):
        return True
    if value.free_symbols:
        return False
    parts = value.args if isinstance(value, And) else (value,)
    return all(same_value(part.lhs, part.rhs) for part in parts)


def _names_set(value: Any) -> bool:
    """Whether it is `x = {…}`, which is also how `x \\in [1, 2]` is read."""
    return bool(is_assignment_relation(value)) and isinstance(take_last_relation(value).rhs, Set)


def _solutions(relation: Any) -> Any:
    """The set that a relation in one variable describes, else the relation itself."""
    plain = unwrap_fcs(relation)
    return plain.as_set() if len(plain.free_symbols) == 1 and not plain.has(Set) else relation


def _same_relation(gold: Any, answer: Any) -> bool:
    if isinstance(gold, Relational) and isinstance(answer, Relational):
        return _same_pair(gold, answer)
    if is_equation(gold) != is_equation(answer):
        return False
    if not is_equation(gold) and _one_variable(gold, answer):
        return bool(_solutions(gold) == _solutions(answer))
    return isinstance(gold, And) and isinstance(answer, And) and _matched(list(gold.args), list(answer.args))


def _one_variable(gold: Any, answer: Any) -> bool:
    return len(gold.free_symbols) == 1 and gold.free_symbols == answer.free_symbols


def _same_pair(gold: Any, answer: Any) -> bool:
    if any(isinstance(side, Set | Tuple | MatrixBase) for pair in (gold, answer) for side in pair.args):
        same_kind = type(gold) is type(answer)
        return same_kind and same_value(gold.lhs, answer.lhs) and same_value(gold.rhs, answer.rhs)
    if is_assignment_relation(gold) and is_assignment_relation(answer) and gold.lhs == answer.lhs:
        return same_value(gold.rhs, answer.rhs)
    if isinstance(gold, Eq | Ne):
        return type(gold) is type(answer) and _same_equation(gold, answer)
    if isinstance(answer, Eq | Ne):
        return False
    return _same_inequality(gold, answer)


def _same_equation(gold: Any, answer: Any) -> bool:
    """One is a multiple of the other, or both have the same solutions (and some at all)."""
    a, b = _numerator(gold), _numerator(answer)
    if a == 0 or b == 0:
        return bool(a == b)
    factor = cancel(a / b)
    if not factor.free_symbols:
        return True
    if same_scalar(a, b) or same_scalar(a, -b):
        return True
    if not _one_variable(a, b):
        return False
    solved_a, solved_b = (solveset(side, *a.free_symbols) for side in (a, b))
    return isinstance(solved_a, FiniteSet) and isinstance(solved_b, FiniteSet) and _same_finite(solved_a, solved_b)


def _numerator(relation: Any) -> Any:
    return together(exact(unwrap_fcs(relation.lhs)) - exact(unwrap_fcs(relation.rhs))).as_numer_denom()[0]


def _same_inequality(gold: Any, answer: Any) -> bool:
    difference = exact(gold.lhs - gold.rhs)
    if type(answer) is not type(gold):
        if type(answer) is not INVERSE_RELATIONS.get(type(gold)):
            return _one_variable(gold, answer) and bool(_solutions(gold) == _solutions(answer))
        answer = answer.reversed
    other = exact(answer.lhs - answer.rhs)
    if same_scalar(difference, other):
        return True
    factor = cancel(difference / other) if other != 0 else None
    if factor is not None and not factor.free_symbols:
        return bool(factor.is_positive)
    return _one_variable(gold, answer) and bool(_solutions(gold) == _solutions(answer))


def _same_matrix(gold: Any, answer: Any) -> bool:
    return gold.shape == answer.shape and all(map(same_value, gold.flat(), answer.flat()))


def _same_collection(gold: Any, answer: Any) -> bool:
    if isinstance(gold, Interval) and isinstance(answer, Interval):
        same_ends = (gold.left_open, gold.right_open) == (answer.left_open, answer.right_open)
        return same_ends and same_value(gold.start, answer.start) and same_value(gold.end, answer.end)
    a, b = _as_pair(gold, answer), _as_pair(answer, gold)
    if isinstance(a, Tuple) or isinstance(b, Tuple):
        return _same_listing(a, b)
    a, b = (side if isinstance(side, Set) else FiniteSet(side) for side in (a, b))
    if isinstance(a, FiniteSet) and isinstance(b, FiniteSet):
        return _same_finite(a, b)
    return _same_set(a, b)


def _as_pair(side: Any, other: Any) -> Any:
    """`(1,2)` is read as an open interval; beside a list or tuple it is a pair."""
    if isinstance(side, Interval) and side.left_open and side.right_open and isinstance(other, FiniteSet | Tuple):
        return Tuple(side.start, side.end)
    return side


def _same_listing(gold: Any, answer: Any) -> bool:
    """Order counts where the gold side is a tuple, or where a list names its elements."""
    if not all(isinstance(side, FiniteSet | Tuple) for side in (gold, answer)):
        return False
    ordered = isinstance(gold, Tuple) or any(is_relation(element) for element in gold.args)
    if not ordered:
        return _matched(list(gold.args), list(answer.args))
    one, other = _as_written(gold), _as_written(answer)
    return len(one) == len(other) and all(map(same_value, one, other))


def _as_written(side: Any) -> list[Any]:
    return list(side._unsorted_args) if isinstance(side, ListedSet) else list(side.args)


def _same_finite(gold: Any, answer: Any) -> bool:
    return _matched(list(gold.args), list(answer.args))


def _matched(gold: list[Any], answer: list[Any]) -> bool:
    """Each element of one side has its own equal on the other, in any order."""
    if len(gold) != len(answer):
        return False
    for element in gold:
        found = next((i for i, candidate in enumerate(answer) if same_value(element, candidate)), None)
        if found is None:
            return False
        del answer[found]
    return True


def _same_set(gold: Any, answer: Any) -> bool:
    if isinstance(gold, Union) and isinstance(answer, Union) and _matched(list(gold.args), list(answer.args)):
        return True
    a, b = gold.doit(), answer.doit()
    return bool(a == b) or bool(a.symmetric_difference(b).is_empty)
