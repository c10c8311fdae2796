"""A point in time that all waits below it respect."""

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """A monotonic time in seconds; infinite means none."""

    at: float

    @classmethod
    def after(cls, seconds: float | None) -> "Deadline":
        return cls(math.inf if seconds is None else time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        """Seconds left; 0 or less when it has passed."""
        return self.at - time.monotonic()

    @property
    def passed(self) -> bool:
        return self.left_s <= 0

    def within(self, seconds: float) -> float:
        """`seconds`, or what is left of the deadline when that is less; never negative."""
        return max(0.0, min(seconds, self.left_s))
