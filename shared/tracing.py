"""W3C trace context (https://www.w3.org/TR/trace-context/) and the spans of this process.

Where spans go is the recorder's affair (`shared/otel.py`). Without one nothing is recorded, and a caller's
context goes on as it came: a parent that nobody recorded would be a hole in the trace.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from contextvars import ContextVar, Token
from functools import lru_cache
from types import TracebackType
from typing import Final, Literal, NamedTuple, Protocol

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
# Vendors keep it under 512; what is longer than this is dropped as a whole rather than cut.
STATE_MAX_CHARS: Final = 4096

_NOT_SAMPLED: Final = "00"
_IDS = r"((?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16})-([0-9a-f]{2})"
_PARENT = re.compile(f"00-{_IDS}")
_LATER_PARENT = re.compile(f"(?!00|ff)[0-9a-f]{{2}}-{_IDS}(?:-.*)?")

Kind = Literal["internal", "server", "client"]
Value = str | int | float | bool


class Trace(NamedTuple):
    """What is passed on to whoever is called: a valid `traceparent`, and the `tracestate` that came with it."""

    parent: str
    state: str | None = None

    @property
    def trace_id(self) -> str:
        return self.parent[3:35]

    @property
    def span_id(self) -> str:
        return self.parent[36:52]

    @property
    def flags(self) -> int:
        return int(self.parent[53:55], 16)

    @property
    def text(self) -> str:
        """As records and tokens keep it; `trace_from` reads it."""
        return self.parent if self.state is None else f"{self.parent} {self.state}"

    def headers(self) -> dict[str, str]:
        return {TRACEPARENT: self.parent} if self.state is None else {TRACEPARENT: self.parent, TRACESTATE: self.state}


current_trace: ContextVar[Trace | None] = ContextVar("current_trace", default=None)


def new_trace() -> Trace:
    """A trace of which nothing is recorded here, and which asks nobody to record it."""
    return Trace(f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{_NOT_SAMPLED}")


@lru_cache(maxsize=1024)
def read_trace(parent: str, state: str | None = None) -> Trace | None:
    """The context of a `traceparent` and its `tracestate`; None where the first is malformed.

    Remembered, since a service meets the same context several times in an episode.
    """
    if _PARENT.fullmatch(parent) is None:
        later = _LATER_PARENT.fullmatch(parent)
        if later is None:
            return None
        # Only these parts are known, and what is passed on is of the version that we know.
        parent = f"00-{later[1]}-{int(later[2], 16) & 1:02x}"
    if state is not None and not (0 < len(state) <= STATE_MAX_CHARS and state.isascii() and state.isprintable()):
        state = None
    return Trace(parent, state)


def trace_from(text: str) -> Trace | None:
    """The context that `Trace.text` was made of; None for any other text."""
    parent, _, state = text.partition(" ")
    return read_trace(parent, state or None)


def trace_text() -> str:
    """The current context as text; empty outside of any."""
    trace = current_trace.get()
    return "" if trace is None else trace.text


def trace_of(headers: Sequence[tuple[bytes, bytes]], given: Mapping[bytes, bytes]) -> Trace | None:
    """The context that a request came with; None where there is no valid one, or more than one.

    `given` are the same headers by their names.
    """
    parent = given.get(b"traceparent")
    if parent is None:
        return None
    state = given.get(b"tracestate")
    if len(given) != len(headers):
        # Some header came more than once: two parents are none, and the parts of a state belong together.
        if sum(name == b"traceparent" for name, _ in headers) > 1:
            return None
        state = b",".join(value for name, value in headers if name == b"tracestate") or None
    return read_trace(parent.decode("latin-1"), None if state is None else state.decode("latin-1"))


def fresh_trace() -> Trace | None:
    """For a request that came without a context; None where the recorder is to begin the trace."""
    return new_trace() if _recorder is None else None


def trace_headers() -> dict[str, str]:
    """The headers that carry the current context on, or a fresh one outside of any request."""
    return (current_trace.get() or new_trace()).headers()


class RecordedSpan(Protocol):
    """One span that a recorder has begun; `trace` is what is passed on while it is the current one."""

    trace: Trace

    def rename(self, name: str) -> None: ...

    def set(self, name: str, value: Value) -> None: ...

    def end(self, error: str | None) -> None:
        """`error` names the kind of failure, never its text."""


class Recorder(Protocol):
    """Where spans go."""

    def begin(self, name: str, kind: Kind, parent: Trace | None) -> RecordedSpan: ...


_recorder: Recorder | None = None


def record_with(recorder: Recorder | None) -> None:
    """From now on the spans of this process go there; None ends it."""
    global _recorder
    _recorder = recorder


def recording() -> bool:
    """Whether spans go anywhere; asked where even an unrecorded one would cost too much."""
    return _recorder is not None


class Span:
    """What a step is told about while it runs; this one is not recorded. Use as a context manager."""

    recorded: bool = False

    def rename(self, name: str) -> None:
        """Once more is known than when it began."""

    def set(self, name: str, value: Value) -> None:
        """An attribute."""

    def fail(self, kind: str) -> None:
        """The step ended badly without raising."""

    def __enter__(self) -> "Span":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return


class _Recorded(Span):
    recorded = True

    def __init__(self, span: RecordedSpan) -> None:
        self._span = span
        self._error: str | None = None
        self._before: Token[Trace | None] | None = None

    def rename(self, name: str) -> None:
        self._span.rename(name)

    def set(self, name: str, value: Value) -> None:
        self._span.set(name, value)

    def fail(self, kind: str) -> None:
        self._error = kind

    def __enter__(self) -> Span:
        self._before = current_trace.set(self._span.trace)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._before is not None
        current_trace.reset(self._before)
        if error is not None:
            self._error = _kind_of(error)
        self._span.end(self._error)


_UNRECORDED: Final = Span()


def span(name: str, kind: Kind = "internal") -> Span:
    """A step below the current one; it is the current one inside its `with` block."""
    return _UNRECORDED if _recorder is None else _Recorded(_recorder.begin(name, kind, current_trace.get()))


class StageSpans:
    """Spans of steps that follow one another, where no `with` block can surround each.

    Use as a context manager around all of them: they lie side by side below what is current there.
    """

    def __init__(self) -> None:
        self._around: Trace | None = None
        self._span: RecordedSpan | None = None

    def __enter__(self) -> "StageSpans":
        self._around = current_trace.get()
        return self

    def enter(self, name: str) -> None:
        """End the step that runs, begin the next."""
        if _recorder is not None:
            self._end(None)
            self._span = _recorder.begin(name, "internal", self._around)
            current_trace.set(self._span.trace)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end(None if error is None else _kind_of(error))

    def _end(self, error: str | None) -> None:
        if self._span is not None:
            self._span.end(error)
            self._span = None
            current_trace.set(self._around)


def _kind_of(error: BaseException) -> str:
    return str(getattr(error, "kind", type(error).__name__))
