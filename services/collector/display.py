"""What a person sees of a run: progress on standard error, the outcome on standard output.

On a terminal progress is a bar, elsewhere a plain line every few seconds. Text of rows and answers is
shown as it is, never read as markup.
"""

import asyncio
import time
from collections import defaultdict
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from services.collector.ledger import RowOutcome
from services.collector.metrics import COMBINATORIAL, REWARD
from services.collector.options import command_name
from services.collector.rows import BadRow
from services.collector.watching import RunSummary
from shared.contracts.failure import FailureKind

ROW_TABLE_AT_MOST: Final = 20
BAD_ROWS_SHOWN: Final = 20
LINE_EVERY_S: Final = 5.0
PLAIN_WIDTH: Final = 120
_REASON_CHARS: Final = 400


class Display:
    """Implements the `Watcher` of a run, and shows its summary."""

    def __init__(self) -> None:
        self._err = Console(stderr=True, highlight=False)
        self._out = Console(highlight=False)
        if not self._out.is_terminal:
            self._out.width = PLAIN_WIDTH
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._bad_lines: set[str] = set()
        self._due = 0
        self._done = 0
        self._failed = 0
        self._rewards: list[float] = []
        self._began = time.monotonic()

    def note(self, sentence: str) -> None:
        self._say(sentence)

    def refuse(self, sentence: str) -> None:
        self._say(sentence)

    def bad_row(self, row: BadRow) -> None:
        self._say_bad(f"{row.source}: {row.problem}")

    def _say_bad(self, line: str) -> None:
        """Once for all repeats of a row, and for so many rows."""
        if line in self._bad_lines or len(self._bad_lines) > BAD_ROWS_SHOWN:
            return
        self._bad_lines.add(line)
        many = len(self._bad_lines) > BAD_ROWS_SHOWN
        self._say("More rows are bad; all of them are in the failures file." if many else line)

    def begin(self, rows: int, due: int) -> None:
        self._due, self._began = due, time.monotonic()
        if self._err.is_terminal:
            self._bar = Progress(
                BarColumn(),
                TextColumn("{task.description}", markup=False),
                TimeElapsedColumn(),
                console=self._err,
                transient=True,
            )
            self._task = self._bar.add_task(self._standing(), total=max(1, due))
            self._bar.start()
        elif due:
            self._ticker = asyncio.create_task(self._tell_now_and_then())

    def ended(self, outcome: RowOutcome) -> None:
        self._done += 1
        if outcome.rollout.failure_kind is not None:
            self._failed += 1
            if outcome.rollout.failure_kind == FailureKind.BAD_ROW:
                self._say_bad(outcome.reason)
        elif outcome.rollout.graded and outcome.rollout.reward is not None:
            self._rewards.append(outcome.rollout.reward)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done, description=self._standing())

    def close(self) -> None:
        """End the progress; may be called again."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None

    async def _tell_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(LINE_EVERY_S)
            self._say(self._standing())

    def _standing(self) -> str:
        parts = [f"{self._done}/{self._due} rows"]
        if self._rewards:
            parts.append(f"mean reward {sum(self._rewards) / len(self._rewards):.3f}")
        if self._failed:
            parts.append(f"{self._failed} failed")
        if self._done:
            rate = self._done / max(0.001, time.monotonic() - self._began)
            parts.append(f"{rate:.3g} rows/s")
            parts.append(f"about {_duration((self._due - self._done) / rate)} left")
        return ", ".join(parts)

    def _say(self, sentence: str) -> None:
        self._err.print(Text(sentence), soft_wrap=True)

    def show(self, summary: RunSummary) -> None:
        """The outcome of the run."""
        self._out.print()
        if 0 < len(summary.outcomes) <= ROW_TABLE_AT_MOST:
            self._out.print(_row_table(summary))
        self._out.print(_environment_table(summary))
        for line in (*_failure_lines(summary), *_file_lines(summary)):
            self._out.print(Text(line), soft_wrap=True)
        for line in _end_lines(summary):
            self._say(line)


def _row_table(summary: RunSummary) -> Table:
    table = Table(title="Rows", title_justify="left")
    for name in ("environment", "task", "repeat"):
        table.add_column(name)
    table.add_column("reward", justify="right")
    table.add_column("status")
    table.add_column("tokens", justify="right")
    table.add_column("seconds", justify="right")
    for outcome in summary.outcomes:
        rollout = outcome.rollout
        cells = (
            rollout.environment,
            outcome.task,
            str(rollout.repeat_index),
            _number(rollout.reward if rollout.graded else None),
            rollout.failure_kind or outcome.status,
            "–" if outcome.tokens is None else str(outcome.tokens),
            _number(outcome.duration_s, digits=2),
        )
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _environment_table(summary: RunSummary) -> Table:
    table = Table(title=f"Rewards ({_duration(summary.duration_s)})", title_justify="left")
    table.add_column("environment")
    for name in ("rows", "mean reward", "± 95 % over repeats", "pass@k", "masked", "failed", "no outcome"):
        table.add_column(name, justify="right")
    for name, metrics in summary.metrics["environments"].items():
        coverage, score = metrics["coverage"], metrics["scores"].get(REWARD)
        cells = (
            name,
            str(coverage["rows"]),
            _number(score["mean"] if score else None),
            _number(_reach(score), digits=3),
            _pass_at_k(score),
            str(coverage["masked"]),
            str(coverage["failed"]),
            str(coverage["without_outcome"]),
        )
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _reach(score: dict[str, Any] | None) -> float | None:
    interval = score["confidence_95"] if score else None
    return None if interval is None else (interval[1] - interval[0]) / 2


def _pass_at_k(score: dict[str, Any] | None) -> str:
    """For 0/1 scores in percent; else the best of the first k, as it is."""
    if not score:
        return "–"
    percent = score["pass_at_k_rule"] == COMBINATORIAL
    return "  ".join(f"@{k} {value:.1%}" if percent else f"@{k} {value:.3f}" for k, value in score["pass_at_k"].items())


def _failure_lines(summary: RunSummary) -> list[str]:
    by_kind: dict[str, list[RowOutcome]] = defaultdict(list)
    for outcome in summary.outcomes:
        if outcome.rollout.failure_kind is not None:
            by_kind[outcome.rollout.failure_kind].append(outcome)
    lines = [] if not by_kind else ["Failures:"]
    for kind, outcomes in sorted(by_kind.items(), key=lambda item: -len(item[1])):
        reason = outcomes[0].reason
        lines.append(f"  {len(outcomes)} {kind}, e.g. {reason[:_REASON_CHARS]}")
    if summary.bad_rows:
        lines.append(f"Bad rows, not run: {summary.bad_rows}. The failures file names them by line.")
    return lines


def _file_lines(summary: RunSummary) -> list[str]:
    paths = summary.paths
    return [
        f"Results   {paths.results}",
        f"Failures  {paths.failures}",
        f"Inputs    {paths.inputs}",
        f"Metrics   {paths.metrics}",
    ]


def _end_lines(summary: RunSummary) -> list[str]:
    open_rows = sum(outcome.status == "no outcome" for outcome in summary.outcomes)
    lines = [] if summary.trouble is None else [str(summary.trouble)]
    if summary.stopped:
        lines.append(
            f"Stopped. {open_rows} rows have no outcome yet. A resumed run asks the environment for those under way"
            " and runs those that it does not know."
        )
    if summary.due:
        lines.append(
            f"To run those that may be tried again ({summary.due}): {command_name()} run --resume"
            f" -o {summary.paths.results} (and the same --url, if any)."
        )
    return lines


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
