"""JSON lines, exactly: integers of any size survive, NaN and Infinity do not exist, only a newline ends a line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

_BOM = b"\xef\xbb\xbf"
# Characters that some readers take for the end of a line; JSON may write them escaped.
_LINE_ENDS = str.maketrans({"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def decode(line: bytes) -> Any:
    """The value of a line.

    Raises:
        ValueError: it is not UTF-8 or not JSON; the message says where.
    """
    try:
        return json.loads(line.decode("utf-8").rstrip("\n"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def encode(value: Any) -> bytes:
    """The value as one line, newline included.

    Raises:
        ValueError: it holds a number that JSON has no form for.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(_LINE_ENDS)
    try:
        return text.encode("utf-8") + b"\n"
    except UnicodeEncodeError:
        # A lone surrogate came escaped and can only go escaped.
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def numbered_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1; a byte order mark at the start is not part of them."""
    for number, line in enumerate(file, start=1):
        content = line.removeprefix(_BOM) if number == 1 else line
        if content.strip():
            yield number, content


def drop_truncated_end(path: Path) -> bool:
    """Cut off what follows the last newline: a write that was killed. True when there was something."""
    if not path.exists():
        return False
    with path.open("r+b") as file:
        end = file.seek(0, 2)
        position = end
        while position > 0:
            start = max(0, position - 65_536)
            file.seek(start)
            found = file.read(position - start).rfind(b"\n")
            if found >= 0:
                position = start + found + 1
                break
            position = start
        if position == end:
            return False
        file.truncate(position)
        return True
