"""Units after a value: split off, and compared only where both sides name known ones.

`12\\text{ cm}` and `12` are the same answer; `12\\text{ cm}` and `12\\text{ m}` are not. A bare letter
is a variable, a bare word is a unit only when it stands in the table. Values are not converted.
"""

import re
from dataclasses import dataclass

_NAMES = {
    "mm": "millimeter millimetre",
    "cm": "centimeter centimetre",
    "dm": "decimeter decimetre",
    "m": "meter metre",
    "km": "kilometer kilometre",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "mg": "milligram",
    "g": "gram gm",
    "kg": "kilogram",
    "lb": "pound lbs",
    "oz": "ounce",
    "s": "second sec",
    "min": "minute",
    "h": "hour hr",
    "day": "",
    "week": "",
    "month": "",
    "year": "yr",
    "ml": "milliliter millilitre",
    "l": "liter litre",
    "km/h": "kmh kmph kph km/hr",
    "m/s": "mps",
    "mph": "",
    "°": "degree deg",
    "rad": "radian",
    "dollar": "usd",
    "cent": "",
    "am": "a.m.",
    "pm": "p.m.",
    "unit": "",
}
_CANONICAL = {
    spelling: unit
    for unit, others in _NAMES.items()
    for name in (unit, *others.split())
    for spelling in (name, f"{name}s", f"{name}es")
}
_BARE_WORDS = "|".join(
    sorted((re.escape(w) for w in _CANONICAL if len(w) > 2 or w in {"cm", "mm", "km", "kg"}), key=len)
)
_LETTERS = "m|g|s|h|l|L"
_BODY = r"(?P<body>.*(?:[\d})]|\\pi|\\infty|π))"
_POWER = r"(?P<power>\s*\^\s*(?:\{\s*-?\d\s*\}|\d))?"
_SHAPE = r"(?P<shape>(?:square|cubic|sq\.?|cu\.?)\s+)?"
_SPACE = r"(?:\s|\\[,;:! ]|~)*"

_IN_TEXT = re.compile(
    rf"{_BODY}{_SPACE}\\(?:text|mbox|textrm|textbf|textit|mathrm)\s*\{{(?P<unit>[^{{}}]*)\}}{_POWER}\s*", re.DOTALL
)
_BARE = re.compile(rf"{_BODY}{_SPACE}{_SHAPE}(?P<unit>{_BARE_WORDS}){_POWER}\.?\s*", re.DOTALL | re.IGNORECASE)
_LETTER = re.compile(rf"{_BODY}{_SPACE}(?P<unit>{_LETTERS}){_POWER}\s*", re.DOTALL)
_NUMERAL_SYSTEM = re.compile(r"(?P<body>\s*[0-9A-Fa-f]+)\s*_\s*(?:\{\s*)?(?P<unit>\d+)(?:\s*\})?\s*")
_SHAPES = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}


@dataclass(frozen=True, slots=True)
class Measured:
    """A text without the unit at its end; `unit` is None when there is none or it is no known one."""

    body: str
    unit: str | None


def split_unit(text: str, *, letters: bool = False) -> Measured:
    """Take the unit off; with `letters` a single bare letter counts as one, too."""
    numeral = _NUMERAL_SYSTEM.fullmatch(text)
    if numeral:
        return Measured(numeral["body"], f"numerals to the base {numeral['unit']}")
    match = _IN_TEXT.fullmatch(text) or _BARE.fullmatch(text) or (_LETTER.fullmatch(text) if letters else None)
    if match is None or _is_symbol(match["unit"]) or not _closed(match["body"]):
        return Measured(text, None)
    groups = match.groupdict()
    return Measured(match["body"], _known(match["unit"], groups.get("shape"), groups["power"]))


def _is_symbol(name: str) -> bool:
    """`\\mathrm{e}` and `\\mathrm{i}` are numbers, a connective is part of the value."""
    return name.strip().lower() in {"e", "i", "d", "or", "and", "th"}


def _closed(body: str) -> bool:
    return body.count("{") == body.count("}")


def _known(name: str, shape: str | None, power: str | None) -> str | None:
    words = name.strip().lower().split()
    if shape is None and len(words) == 2 and words[0].rstrip(".") in _SHAPES:
        shape, words = words[0], words[1:]
    unit = _CANONICAL.get(" ".join(words))
    if unit is None:
        return None
    exponent = _SHAPES[shape.strip().rstrip(".").lower()] if shape else "".join(re.findall(r"-|\d", power or ""))
    return f"{unit}^{exponent}" if exponent not in {"", "1"} else unit


def contradict(one: str | None, other: str | None) -> bool:
    """Whether both units are known and differ; "units" alone fits any."""
    return None not in (one, other) and one != other and not {one, other} & {"unit", "unit^2", "unit^3"}
