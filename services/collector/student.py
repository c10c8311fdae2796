"""Student's t distribution for whole degrees of freedom, without a numerics library.

The probability within ±t is a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4); the quantile is
found by bisection.
"""

from functools import lru_cache
from math import atan, cos, pi, sin, sqrt


def probability_within(t: float, degrees: int) -> float:
    """P(|T| <= t) for `degrees` >= 1."""
    angle = atan(t / sqrt(degrees))
    square = cos(angle) ** 2
    if degrees == 1:
        return 2 * angle / pi
    odd = degrees % 2 == 1
    term = cos(angle) if odd else 1.0
    total = term
    for step in range(3 if odd else 2, degrees - 1, 2):
        term *= square * (step - 1) / step
        total += term
    if odd:
        return 2 / pi * (angle + sin(angle) * total)
    return sin(angle) * total


@lru_cache(maxsize=256)
def t_quantile_975(degrees: int) -> float:
    """The t that 95 % lie within, on both sides."""
    low, high = 0.0, 20.0
    for _ in range(80):
        middle = (low + high) / 2
        if probability_within(middle, degrees) < 0.95:
            low = middle
        else:
            high = middle
    return (low + high) / 2
