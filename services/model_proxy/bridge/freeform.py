"""The raw input of a custom tool, out of the JSON in which a function call carries it: `{"input": "…"}`.

Reads pieces cut anywhere, also within an escape. Lenient where models are sloppy: raw line breaks in the
string and unknown escapes stay as they are. Arguments of another form are the input themselves.
"""

import re

import orjson

_HEAD = '{"input":"'
_BLANK_BEFORE = frozenset({0, 1, 8, 9})  # positions in _HEAD before which JSON allows blanks
_RUN = re.compile(r'(?:[^"\\]++|\\(?:u[0-9a-fA-F]{4}|[^u]))*+', re.DOTALL)
_CUT_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_HIGH_SURROGATE_LAST = re.compile(r"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})$")
_ESCAPE = re.compile(
    r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\(.)", re.DOTALL
)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "\\": "\\", "/": "/"}


class FreeformInput:
    """`feed` gives text as soon as it is certain, `end` the rest."""

    __slots__ = ("_at", "_held", "_state", "cut")

    def __init__(self) -> None:
        self._state = "head"
        self._at = 0
        self._held = ""
        self.cut = False
        """Set by `end`: the JSON stopped in the middle, so the input is not whole."""

    def feed(self, arguments: str) -> str:
        if self._state == "body":
            return self._body(arguments)
        if self._state == "done":
            return ""
        self._held += arguments
        if self._state == "raw":
            return ""
        rest = self._head(arguments)
        if rest is None:
            return ""
        self._held = ""
        return self._body(rest)

    def end(self) -> str:
        """The rest, when no more arguments come."""
        held, self._held = self._held, ""
        if self._state == "raw":
            return _own_input(held)
        self.cut = self._state == "body" or (self._state == "head" and self._at > 0)
        return ""

    def _head(self, arguments: str) -> str | None:
        """What follows the opening quote; null when that has not come, or will not."""
        for index, char in enumerate(arguments):
            if char == _HEAD[self._at]:
                self._at += 1
            elif self._at not in _BLANK_BEFORE or char not in " \t\r\n":
                self._state = "raw"
                return None
            if self._at == len(_HEAD):
                self._state = "body"
                return arguments[index + 1 :]
        return None

    def _body(self, arguments: str) -> str:
        text = self._held + arguments
        self._held = ""
        decoded = []
        while text:
            run = _RUN.match(text)
            end = run.end() if run else 0
            good, text = text[:end], text[end:]
            if not text or _CUT_ESCAPE.fullmatch(text):
                surrogate = _HIGH_SURROGATE_LAST.search(good)
                good, half = (good[: surrogate.start(1)], surrogate[1]) if surrogate else (good, "")
                self._held, text = half + text, ""
            decoded.append(_ESCAPE.sub(_unescaped, good) if "\\" in good else good)
            if text.startswith('"'):
                self._state = "done"
                break
            decoded.append(text[:1])
            text = text[1:]
        return "".join(decoded)


def _unescaped(match: re.Match[str]) -> str:
    high, low, plain, short = match.groups()
    if high:
        return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + (int(low, 16) - 0xDC00))
    if plain:
        code = int(plain, 16)
        # Half a surrogate pair is no character and cannot be sent on.
        return "�" if 0xD800 <= code <= 0xDFFF else chr(code)
    return _ESCAPED.get(short, f"\\{short}")


def _own_input(arguments: str) -> str:
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    given = value.get("input") if isinstance(value, dict) else None
    return given if isinstance(given, str) else arguments
