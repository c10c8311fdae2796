"""What a run tells while it goes, and what it came to."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from services.collector.ledger import RowOutcome
from services.collector.options import EXIT_OK, EXIT_ROWS_FAILED, RunError, RunOptions
from services.collector.paths import RunPaths
from services.collector.rows import BadRow
from services.collector.standing import Standing


class Watcher(Protocol):
    """Who is told how a run goes."""

    def note(self, sentence: str) -> None: ...

    def bad_row(self, row: BadRow) -> None: ...

    def begin(self, standing: Standing) -> None: ...

    def ended(self, outcome: RowOutcome) -> None: ...

    def close(self) -> None: ...


class Silence:
    """A watcher that says nothing."""

    def note(self, sentence: str) -> None:
        return

    def bad_row(self, row: BadRow) -> None:
        return

    def begin(self, standing: Standing) -> None:
        return

    def ended(self, outcome: RowOutcome) -> None:
        return

    def close(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a run came to."""

    options: RunOptions
    paths: RunPaths
    run_id: str
    outcomes: tuple[RowOutcome, ...]
    bad_rows: int
    due: int
    """Rows that a resumed run would run."""
    metrics: Mapping[str, Any]
    duration_s: float
    stopped: bool
    """It was told to stop before all rows had an outcome."""
    trouble: RunError | None
    """What ended it early."""

    @property
    def with_result(self) -> int:
        return sum(outcome.rollout.reward is not None for outcome in self.outcomes)

    @property
    def status(self) -> int:
        if self.trouble is not None:
            return self.trouble.status
        complete = self.with_result == len(self.outcomes) and not self.bad_rows
        return EXIT_OK if complete else EXIT_ROWS_FAILED
