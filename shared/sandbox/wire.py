"""How a command is asked for and its end told, between a provider and the supervisor's `once` in the sandbox.

Both directions of `shared/supervisor/once.c`, as pure functions. Arguments, variables and input go over stdin, so
that they stand on no command line and in no engine's record.
"""

import errno
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

FRAME_BYTES: Final = 64 << 10
REQUEST_LIMIT_BYTES: Final = 8 << 20
END_OF_INPUT: Final = struct.pack(">I", 0)
_MARK: Final = b"\0PDK"
_END_LIMIT: Final = 512
Ended = Literal["exit", "signal", "timeout", "left", "unkillable", "cwd", "exec", "fork", "replaced"]


@dataclass(frozen=True, slots=True)
class CommandRequest:
    """One command. `boot` is the start of the sandbox that is meant, empty for any."""

    nonce: str
    boot: str
    argv: tuple[str, ...]
    timeout_s: float
    cwd: str
    cwd_optional: bool
    env: tuple[tuple[str, str], ...]

    @classmethod
    def of(
        cls,
        argv: Sequence[str],
        *,
        boot: str,
        timeout_s: float,
        cwd: str,
        cwd_optional: bool,
        env: Mapping[str, str],
    ) -> "CommandRequest":
        """Raises ValueError for what no operating system takes: nothing to run, zero bytes, a `=` in a name."""
        fields = [*argv, cwd, *env, *env.values()]
        if not argv or not argv[0]:
            raise ValueError("a command needs at least the name of a program")
        if any("\0" in field for field in fields):
            raise ValueError("a zero byte cannot stand in a command, a folder or a variable")
        if any(not name or "=" in name for name in env):
            raise ValueError("the name of a variable is not empty and has no `=` in it")
        pairs = tuple(env.items())
        return cls(os.urandom(16).hex(), boot, tuple(argv), timeout_s, cwd, cwd_optional, pairs)

    def encoded(self) -> bytes:
        """The request as it goes to `once`; raises ValueError when it is too large."""
        fields = [self.nonce, self.boot, str(max(1, round(self.timeout_s * 1000))), self.cwd, f"{self.cwd_optional:d}"]
        fields += [str(len(self.argv)), *self.argv]
        fields += [str(len(self.env)), *(f"{name}={value}" for name, value in self.env)]
        body = b"".join(field.encode(errors="surrogateescape") + b"\0" for field in fields)
        if len(body) > REQUEST_LIMIT_BYTES:
            raise ValueError(f"a command with its variables is at most {REQUEST_LIMIT_BYTES >> 20} MiB")
        return struct.pack(">I", len(body)) + body


def input_frames(data: bytes) -> Iterator[bytes]:
    """Input in frames; `END_OF_INPUT` ends it."""
    for at in range(0, len(data), FRAME_BYTES):
        part = data[at : at + FRAME_BYTES]
        yield struct.pack(">I", len(part)) + part


@dataclass(frozen=True, slots=True)
class End:
    """How it ended. `value` is the exit code, the signal's or the error's number; `boot` names the sandbox's start."""

    how: Ended
    value: int
    oom_kills: int | None
    boot: str

    @classmethod
    def parse(cls, text: bytes) -> "End | None":
        """None when the text is none that `once` writes."""
        parts = text.decode(errors="replace").split(" ")
        if len(parts) != 4 or parts[0] not in Ended.__args__:  # type: ignore[attr-defined]
            return None
        try:
            value, oom = int(parts[1]), int(parts[2])
        except ValueError:
            return None
        return cls(parts[0], value, None if oom < 0 else oom, parts[3])  # type: ignore[arg-type]


class StreamReader:
    """One output stream: what the command wrote, up to the mark behind it."""

    def __init__(self, nonce: str) -> None:
        self._mark = _MARK + nonce.encode()
        self._held = b""
        self.ended = False
        self.end_text = b""

    def feed(self, data: bytes) -> bytes:
        """The command's own bytes among what came; those that may be the beginning of the mark are held back."""
        if self.ended:
            return b""
        held = self._held + data
        at = held.find(self._mark)
        if at < 0:
            keep = self._may_begin(held)
            self._held = held[len(held) - keep :]
            return held[: len(held) - keep]
        stop = held.find(b"\0", at + 1, at + _END_LIMIT)
        if stop < 0:
            self._held = held[at:]
            return held[:at]
        self.ended, self._held = True, b""
        self.end_text = held[at + len(self._mark) : stop].strip()
        return held[:at]

    def rest(self) -> bytes:
        """What was held back when the stream ended without a mark."""
        held, self._held = self._held, b""
        return held

    def _may_begin(self, held: bytes) -> int:
        longest = min(len(held), len(self._mark) - 1)
        return next((size for size in range(longest, 0, -1) if self._mark.startswith(held[-size:])), 0)


def refusal(end: End, request: CommandRequest) -> tuple[str, str] | None:
    """Why the command was not started: reason and sentence; None when it was."""
    why = os.strerror(end.value)
    if end.how == "cwd":
        return "cwd_missing", f"The folder '{request.cwd}' cannot be worked in inside the sandbox: {why}."
    if end.how == "fork":
        return "no_processes", f"The sandbox can start no further process: {why}."
    if end.how != "exec":
        return None
    program = request.argv[0]
    if end.value == errno.ENOENT:
        return "command_missing", f"There is no program '{program}' in the sandbox, or not what it needs to run."
    return "not_executable", f"The program '{program}' cannot be run in the sandbox: {why}."
