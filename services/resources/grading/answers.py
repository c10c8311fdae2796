"""The answer in a text: the last complete box, its delimiters stripped, and equality as text.

Pure string work, cheap enough for the server's own process. What an answer means is read by the children.
"""

import re

_TOKEN = re.compile(r"\\boxed\s*\{|\\.|\{|\}", re.DOTALL)
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_INVISIBLE = re.compile(r"\\[,;:!> ]|~|\\(?:left|right|displaystyle|quad|qquad)(?![A-Za-z])")
_FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_SPACE = re.compile(r"(?<![A-Za-z0-9])\s+|\s+(?![A-Za-z0-9])")


def last_box(text: str) -> str | None:
    r"""What stands in the `\boxed{…}` that is closed last; None when no box is closed.

    Braces count balanced, escaped ones do not count. Boxes within that box are opened, too.
    """
    found = _closed_boxes(text)
    if not found:
        return None
    _, start, end = found[-1]
    return without_boxes(text[start:end])


def without_boxes(text: str) -> str:
    r"""The text with every complete `\boxed{…}` replaced by what it holds."""
    cuts = [cut for opening, start, end in _closed_boxes(text) for cut in ((opening, start), (end, end + 1))]
    kept, position = [], 0
    for start, end in sorted(cuts):
        kept.append(text[position:start])
        position = end
    return " ".join([*kept, text[position:]]).strip()


def _closed_boxes(text: str) -> list[tuple[int, int, int]]:
    """Where each complete box opens, and its content starts and ends, in the order in which they are closed."""
    open_braces: list[tuple[int, int] | None] = []
    boxes: list[tuple[int, int, int]] = []
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token == "}":
            opened = open_braces.pop() if open_braces else None
            if opened is not None:
                boxes.append((*opened, match.start()))
        elif token[-1] == "{" and token != "\\{":
            open_braces.append(match.span() if len(token) > 1 else None)
    return boxes


def bare(text: str) -> str:
    r"""The text without the delimiters of mathematics around it: `$…$`, `\(…\)`, `\[…\]`."""
    text = text.strip()
    for opening, closing in _DELIMITERS:
        inner = text[len(opening) : -len(closing)]
        wrapped = text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing)
        if wrapped and opening not in inner and closing not in inner:
            return bare(inner)
    return text


def is_blank(text: str) -> bool:
    """Whether nothing but spacing stands there."""
    return not _INVISIBLE.sub("", text).strip(" \n\t${}")


def same_text(expected: str, answer: str) -> bool:
    """Equal but for spacing and the size of fractions: equal whatever it means."""
    return _canonical(expected) == _canonical(answer)


def _canonical(text: str) -> str:
    plain = _INVISIBLE.sub(" ", _FRACTION.sub(r"\\frac", bare(text)))
    return _SPACE.sub("", plain.strip().rstrip("."))
