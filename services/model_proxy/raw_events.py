"""Server-Sent Events with their own bytes, for streams that pass through unchanged."""

import re
from typing import Final

_EVENT_END: Final = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")


class RawEvents:
    """Whole events out of bytes that are cut anywhere: the event's own bytes and its data."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[tuple[bytes, bytes]]:
        buffer = self._rest + chunk
        events, start = [], 0
        for match in _EVENT_END.finditer(buffer):
            raw = buffer[start : match.end()]
            start = match.end()
            events.append((raw, _data_of(raw)))
        self._rest = buffer[start:]
        return events

    def end(self) -> list[tuple[bytes, bytes]]:
        """The event that no blank line closed before the connection ended."""
        return self.feed(b"\n\n") if self._rest.strip() else []


def _data_of(raw: bytes) -> bytes:
    if b"data:" not in raw:
        return b""
    lines = [line[5:] for line in _LINE_END.split(raw) if line.startswith(b"data:")]
    return b"\n".join(line.removeprefix(b" ") for line in lines)
