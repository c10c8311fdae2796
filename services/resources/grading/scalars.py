"""Whether two scalar expressions are the same number or the same function. Runs in a child only.

Exact by kind: decimals are read as the fractions that they are, a difference is refuted by its size
relative to the terms (never by an absolute tolerance, under which all tiny numbers are equal), and
shown to be zero by algebra. Only a value written as a decimal may be a rounding of the other side.
"""

from typing import Any

from sympy import Add, Float, Integer, Mul, N, Rational, UnevaluatedExpr, nan, oo, simplify, zoo

LEAST_DIGITS = 6
"""A decimal with fewer significant digits is no approximation of a value, it is another value."""
MOST_DIGITS = 12
"""Digits beyond are the noise of floating-point arithmetic."""
_DIGITS = 40
_AGREE = Rational(1, 10**30)
_SURE_DIGITS = 300
_SURE_AGREE = Rational(1, 10**250)
_HUNDREDTH = UnevaluatedExpr(Rational(1, 100))
_LEAST_POINTS = 4
_PRIMES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)


def same_scalar(gold: Any, answer: Any) -> bool:
    """Equal as numbers, or at all values of their variables."""
    if _percent_against_integer(gold, answer):
        return True
    a, b = exact(gold), exact(answer)
    if a == b:
        return a not in (nan, zoo)
    if any(side.has(nan, zoo, oo, -oo) for side in (a, b)):
        return False
    if a.is_Rational and b.is_Rational:
        return _rounded(gold, a, answer, b)
    if a.free_symbols | b.free_symbols:
        return _same_function(a, b)
    return _rounded(gold, a, answer, b) or _same_constant(a, b)


def exact(expression: Any) -> Any:
    """Evaluated, with every decimal replaced by the fraction that was written."""
    decimals = {number: Rational(str(number)) for number in expression.atoms(Float)}
    return (expression.xreplace(decimals) if decimals else expression).doit()


def _percent_against_integer(gold: Any, answer: Any) -> bool:
    """`9%` answers a question for a percentage that expects `9`."""
    numbers = [side.args[0] if _is_percent(side) else side for side in (gold, answer)]
    one_sided = _is_percent(gold) != _is_percent(answer)
    return one_sided and all(isinstance(number, Integer) for number in numbers) and numbers[0] == numbers[1]


def _is_percent(expression: Any) -> bool:
    return isinstance(expression, Mul) and len(expression.args) == 2 and expression.args[1] == _HUNDREDTH


def _rounded(gold: Any, a: Any, answer: Any, b: Any) -> bool:
    """Whether one side is a decimal and the other the value that it was rounded or cut from."""
    gold_digits, answer_digits = _decimal_digits(gold, a), _decimal_digits(answer, b)
    if gold_digits and (not answer_digits or gold_digits < answer_digits):
        return _approximates(a, gold_digits, b)
    if answer_digits and (not gold_digits or answer_digits < gold_digits):
        return _approximates(b, answer_digits, a)
    return False


def _decimal_digits(written: Any, value: Any) -> int:
    """Significant digits of a value that was written as a decimal; 0 for any other."""
    if not value.is_Rational or not written.has(Float):
        return 0
    top, bottom = abs(int(value.p)), int(value.q)
    while bottom != 1:
        factor = next((f for f in (10, 5, 2) if bottom % f == 0), None)
        if factor is None:
            return 0
        top, bottom = top * 10 // factor, bottom // factor
    return len(str(top).rstrip("0")) or 1


def _approximates(decimal: Any, digits: int, value: Any) -> bool:
    """Within half of the last digit, or a whole one when the rest was cut off. An integer is exact."""
    if digits < LEAST_DIGITS or value.is_Integer or value.is_extended_real is False:
        return False
    size = N(value, _DIGITS)
    if not size.is_Float and not size.is_Rational:
        return False
    size = Rational(size)
    if size == 0 or (size > 0) != (decimal > 0):
        return False
    unit = Rational(10) ** (_exponent(abs(decimal)) - min(digits, MOST_DIGITS) + 1)
    error = abs(decimal - size)
    return bool(error <= unit / 2 or (error < unit and abs(decimal) < abs(size)))


def _exponent(number: Any) -> int:
    """The power of ten of the leading digit of a positive fraction."""
    exponent = len(str(int(number.p))) - len(str(int(number.q)))
    return exponent if number >= Rational(10) ** exponent else exponent - 1


def _same_constant(a: Any, b: Any) -> bool:
    verdict = _agree(a, b, _DIGITS, _AGREE)
    if verdict is not True:
        return verdict is None and bool(simplify(a - b) == 0)
    if simplify(a - b) == 0:
        return True
    proven = (a - b).equals(0)
    return bool(_agree(a, b, _SURE_DIGITS, _SURE_AGREE)) if proven is None else bool(proven)


def _agree(a: Any, b: Any, digits: int, tolerance: Any) -> bool | None:
    """Whether the difference vanishes beside its largest term; None when it is no number."""
    difference = N(a - b, digits, maxn=4 * digits)
    if not difference.is_number or difference.has(nan, zoo, oo):
        return None
    terms = [abs(N(term, digits)) for term in (*Add.make_args(a), *Add.make_args(b))]
    if not all(term.is_Float or term.is_Rational for term in terms):
        return None
    return bool(abs(difference) <= tolerance * max(terms))


def _same_function(a: Any, b: Any) -> bool:
    """Refuted at a point, else shown by algebra, else taken from agreement at all points."""
    symbols = sorted(a.free_symbols | b.free_symbols, key=lambda symbol: symbol.name)
    agreed = 0
    for point in _points(len(symbols)):
        values = dict(zip(symbols, point, strict=True))
        verdict = _agree(a.subs(values), b.subs(values), _DIGITS, _AGREE)
        if verdict is False:
            return False
        agreed += verdict is True
    difference = simplify(a - b)
    if difference == 0:
        return True
    if difference.is_number or difference.is_zero is False:
        return False
    proven = difference.equals(0)
    return agreed >= _LEAST_POINTS if proven is None else bool(proven)


def _points(dimensions: int) -> list[tuple[Any, ...]]:
    """Fixed points with both signs; fractions that no formula is likely to single out."""
    signs = ("++", "++", "--", "+-", "-+", "++")
    return [
        tuple(
            Rational(_PRIMES[(3 * row + 5 * column) % len(_PRIMES)], 4 + row + column)
            * (1 if pattern[column % 2] == "+" else -1)
            for column in range(dimensions)
        )
        for row, pattern in enumerate(signs)
    ]
