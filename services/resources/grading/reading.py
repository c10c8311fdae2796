"""What an answer's text means, as an expression of the computer algebra library. Runs in a child only.

The parser is math-verify's. It is given the whole text and must use the whole text: where it would take
only a part of it (the last number of an equation, a fraction cut at a brace, digits behind dots), the
text counts as unreadable instead.
"""

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from latex2sympy2_extended.latex2sympy2 import latex2sympy
from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
from sympy import I, Number, Rational, Symbol, UnevaluatedExpr, nan, zoo
from sympy.matrices import MatrixBase

from services.resources.grading.answers import bare, without_boxes
from services.resources.grading.units import split_unit

# The library's own removal of units and boxes cuts inside braces and takes variables for units.
_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
)
_REPLACEMENTS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<!\\)\\[()]|(?<!\\)\\[\[\]](?!\d*(?:pt|em|ex))|\\?\$", " "),
        (r"\\(?:mathrm|text|rm)\s*\{\s*([ei])\s*\}", r"\1"),
        (r"\\(?:operatorname|mathrm)\s*\{\s*(arc(?:sin|cos|tan|cot|sec|csc)|ln|lg|log|sin|cos|tan)\s*\}", r"\\\1 "),
        (r"\\lg(?![A-Za-z])", r"\\log_{10}"),
        (r"\\varnothing", r"\\emptyset"),
        (r"\*\*", "^"),
        (r"°", r"^{\\circ}"),
        (r"√\s*\(([^()]*)\)|√\s*(\d+|[A-Za-z])", r"\\sqrt{\1\2}"),
        (r"½", r"\\frac{1}{2}"),
        (r"[€£¥₹]", ""),
        (r"\\[,;:!]|\\ |~|\\q?quad(?![A-Za-z])", " "),
        (r"(?<![\d.,])(\d{1,3})((?:\s\d{3})+)(?![\d])", lambda m: m[1] + re.sub(r"\s", "", m[2])),
        (r"(?<![A-Za-z\\])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\d.A-Za-z])", r"\1 \\times 10^{\2}"),
        (r"(\d*)\.(\d*)\\(?:overline|dot|bar|overline)\s*\{(\d+)\}", lambda m: _repeating(m[1], m[2], m[3])),
    )
]
_TRAILING = re.compile(r"(?:\s|\\\\|(?<![.\\])\.(?!\.)|[,;])+$")
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\s*\{\s*(?:percent|%|\\%)\s*\}|\bpercent)\s*$", re.IGNORECASE)
_DOTS = re.compile(r"\\[lcvd]?dots|\\dots[a-z]|\.\.\.|…")
_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]")
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_TWO_NUMBERS = re.compile(r"\d\s+\d")


# Python itself reads no longer number from text.
_LONGEST_CHARS = 4300


class UnreadableError(ValueError):
    """The text is not mathematics that the parser takes as a whole."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A value and, where it is a known one, its unit."""

    value: Any
    unit: str | None


@lru_cache(maxsize=256)
def read(text: str, *, letter_units: bool = False) -> Reading:
    """Read a whole answer; with `letter_units` a letter behind a number is a unit, not a variable.

    Raises:
        UnreadableError: the parser does not take all of it, or it has no value (a division by zero).
    """
    # Full-width and other digits become plain ones: they mean the same number.
    plain = _BEYOND_ASCII.sub(_plain_character, without_boxes(bare(text)))
    for pattern, replacement in _REPLACEMENTS:
        plain = pattern.sub(replacement, plain)
    plain = _TRAILING.sub("", plain.strip())
    if _PERCENT.search(plain):
        # The parser's own mark of a percentage: an unevaluated hundredth.
        number = _parse(_PERCENT.sub("", plain))
        return Reading(number * UnevaluatedExpr(Rational(1, 100)), None)
    measured = split_unit(plain, letters=letter_units)
    return Reading(_parse(measured.body), measured.unit)


def _plain_character(match: re.Match[str]) -> str:
    """Only what means the same: a superscript two or a half is no digit."""
    character = match[0]
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    return chr(ord(character) - 0xFEE0) if "\uff01" <= character <= "\uff5e" else character


def _parse(text: str) -> Any:
    if len(text) > _LONGEST_CHARS:
        raise UnreadableError("it is longer than any answer")
    if _NUMBER.fullmatch(text):
        return Number(text)  # most answers: a tenth of what the parser costs
    if _DOTS.search(text):
        raise UnreadableError("dots leave open what is meant")
    latex = normalize_latex(text, config=_NORMALIZATION)
    if not latex or _TWO_NUMBERS.search(latex):
        raise UnreadableError("there is no number, or two without an operator")
    try:
        value = latex2sympy(latex, is_real=True, convert_degrees=False, normalization_config=None)
    except (MemoryError, RecursionError):
        raise
    except Exception as error:
        # The parser raises bare exceptions for whatever it does not understand.
        raise UnreadableError("the parser does not take all of it") from error
    if value is None or value in (nan, zoo):
        raise UnreadableError("it has no value")
    return _with_plain_symbols(value)


def _with_plain_symbols(value: Any) -> Any:
    """One symbol per name, whatever the parser assumed of it, and `i` as the imaginary unit."""
    if isinstance(value, bool) or not hasattr(value, "free_symbols"):
        raise UnreadableError("it is a statement, not a value")
    found = {symbol: I if symbol.name == "i" else Symbol(symbol.name, real=True) for symbol in value.free_symbols}
    changed = {symbol: new for symbol, new in found.items() if symbol != new}
    if not changed:
        return value
    return value.subs(changed) if isinstance(value, MatrixBase) else value.xreplace(changed)


def _repeating(whole: str, fixed: str, period: str) -> str:
    """A decimal with a period, as a fraction."""
    scale = 10 ** len(fixed)
    nines = 10 ** len(period) - 1
    top = int(f"{whole}{fixed}" or "0") * nines + int(period)
    return rf"\frac{{{top}}}{{{scale * nines}}}"
