"""What happened when: the tests' own notes beside the services' logs, so that a breach can be traced to its cause."""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

NOTES = "journal.log"
_NOT_TOLD = frozenset({"time", "instance", "trace_id", "exception"})
LINES_MAX = 120
_EXCERPT = 800


class Journal:
    def __init__(self, folder: Path) -> None:
        self._file = (folder / NOTES).open("ab", buffering=0)

    def note(self, message: str, **fields: Any) -> None:
        self._file.write(orjson.dumps({"time": stamp(), "message": message, **fields}) + b"\n")

    def close(self) -> None:
        self._file.close()


def stamp() -> str:
    """Now, as services write it into their logs."""
    now = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"


def history(folder: Path, key: str) -> list[str]:
    """All lines about an episode, in their order, and the faults in between."""
    about = [(line["time"], name, line) for name, line in _lines(folder) if line.get("key") == key]
    if not about:
        return []
    first, last = min(about)[0], max(about)[0]
    faults = [
        (line["time"], name, line) for name, line in _lines(folder) if "fault" in line and first <= line["time"] <= last
    ]
    told = [f"{at} {name}: {_told(line)}" for at, name, line in sorted([*about, *faults], key=lambda each: each[0])]
    return told[:LINES_MAX]


def errors(folder: Path, after: str = "") -> Iterator[str]:
    """What services logged as an error of their own making, and what they said that is no log line."""
    for name, line in _lines(folder):
        if line.get("level") in {"error", "critical"} and line["time"] >= after:
            yield f"{name}: {line['time']} {line['message'][-_EXCERPT:]} {line.get('exception', '')[-_EXCERPT:]}"


def _lines(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(folder.glob("*.log")):
        if path.stem in {"redis", "nursery"}:
            continue
        yield from _read(path.stem, path.read_bytes().splitlines())


def _read(name: str, lines: Iterable[bytes]) -> Iterator[tuple[str, dict[str, Any]]]:
    for line in lines:
        try:
            yield name, orjson.loads(line)
        except orjson.JSONDecodeError:
            yield name, {"time": "", "level": "error", "message": f"no log line: {line.decode(errors='replace')}"}


def _told(line: dict[str, Any]) -> str:
    return orjson.dumps({name: value for name, value in line.items() if name not in _NOT_TOLD}).decode()
