"""What the server and its children say to each other: one line of JSON each way, on the child's pipes.

A child first says `ready`. To a request it answers `gold_read` as soon as the gold side was read, and
then the result, so that the server can tell on whose account the time ran out.
"""

from dataclasses import dataclass
from enum import StrEnum

READY = "ready"
BROKEN = "broken"
GOLD_READ = "gold_read"
GOLD_UNREADABLE = "gold_unreadable"
GOLD_MEMORY = "gold_memory"
GOLD_TIMEOUT = "gold_timeout"
GOLD_CRASHED = "gold_crashed"


class Outcome(StrEnum):
    """How the library's look at an answer ended. Only `equal` earns the reward."""

    EQUAL = "equal"
    NOT_EQUAL = "not_equal"
    NO_ANSWER = "no_answer"
    """There is no complete box, or it is blank."""
    UNREADABLE = "unreadable"
    """The answer is not mathematics that the parser takes as a whole."""
    INCOMPARABLE = "incomparable"
    """The library gave up on the comparison."""
    TIMEOUT = "timeout"
    """The comparison did not end in time; its process was killed."""
    MEMORY = "memory"
    """The comparison met the memory limit."""
    CRASHED = "crashed"
    """The comparison brought its process down, twice."""
    UNDECIDED = "undecided"
    """The gold side cannot be read; only a judge can tell."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a child found: an `Outcome`, or one of the words above about the gold side."""

    word: str
    detail: str | None = None
