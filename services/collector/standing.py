"""How a run stands while it goes: how many rows have ended, where those under way are, and what they wait for."""

import time
from collections import Counter
from typing import Final

from services.collector.ledger import RowOutcome
from shared.contracts.failure import Stage

_SENT: Final = "sent"


class Standing:
    """Written by the run, read by whoever shows it. `due` is the number of rows that are to be run."""

    def __init__(self, due: int) -> None:
        self.due = due
        self.done = 0
        self._failed = 0
        self._graded = 0
        self._rewards = 0.0
        self._began = time.monotonic()
        self._places: dict[str, str] = {}
        self._waiting: dict[str, str] = {}

    def sent(self, key: str) -> None:
        self._places[key] = _SENT

    def at(self, key: str, stage: Stage) -> None:
        """The environment has the episode, and it is at this stage."""
        self._waiting.pop(key, None)
        self._places[key] = stage

    def waits(self, key: str, what_for: str) -> None:
        """The episode's next request waits until something is better."""
        self._waiting[key] = what_for

    def left(self, key: str) -> None:
        """The episode is not under way any more, as far as this run can tell."""
        self._places.pop(key, None)
        self._waiting.pop(key, None)

    def ended(self, outcome: RowOutcome) -> None:
        self.done += 1
        if outcome.rollout.failure_kind is not None:
            self._failed += 1
        elif outcome.rollout.graded and outcome.rollout.reward is not None:
            self._graded += 1
            self._rewards += outcome.rollout.reward

    @property
    def under_way(self) -> tuple[str, ...]:
        """The keys of the episodes that were sent and have not ended."""
        return tuple(self._places)

    def counts(self) -> str:
        parts = [f"{self.done}/{self.due} rows"]
        if self._graded:
            parts.append(f"mean reward {self._rewards / self._graded:.3f}")
        if self._failed:
            parts.append(f"{self._failed} failed")
        return ", ".join(parts)

    def pace(self) -> str:
        """Empty before the first row has ended."""
        if not self.done:
            return ""
        rate = self.done / max(0.001, time.monotonic() - self._began)
        return f"{rate:.3g} rows/s, about {duration((self.due - self.done) / rate)} left"

    def places(self) -> str:
        """Where the rows under way are, and what they wait for; empty when there are none."""
        at_stages = Counter(place for key, place in self._places.items() if key not in self._waiting)
        parts = []
        if at_stages:
            stages = ", ".join(f"{place} {count}" for place, count in at_stages.most_common())
            parts.append(f"{at_stages.total()} under way ({stages})")
        parts += [f"{count} waiting: {what}" for what, count in Counter(self._waiting.values()).most_common()]
        return ", ".join(parts)


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
