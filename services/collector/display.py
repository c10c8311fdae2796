"""What a person sees of a run: notes and progress on standard error, the outcome on standard output.

Text of rows and answers is shown as it is, never read as markup.
"""

from collections import defaultdict
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.collector.ledger import RowOutcome
from services.collector.metrics import COMBINATORIAL, REWARD
from services.collector.options import command_name
from services.collector.progress import Progress
from services.collector.rows import BadRow
from services.collector.standing import Standing, duration
from services.collector.watching import RunSummary
from shared.contracts.failure import FailureKind

ROW_TABLE_AT_MOST: Final = 20
BAD_ROWS_SHOWN: Final = 20
PLAIN_WIDTH: Final = 120
_REASON_CHARS: Final = 400


class Display:
    """Implements the `Watcher` of a run, and shows its summary."""

    def __init__(self) -> None:
        self._err = Console(stderr=True, highlight=False)
        self._out = Console(highlight=False)
        if not self._out.is_terminal:
            self._out.width = PLAIN_WIDTH
        self._progress: Progress | None = None
        self._bad_lines: set[str] = set()

    def note(self, sentence: str) -> None:
        self._err.print(Text(sentence), soft_wrap=True)

    def bad_row(self, row: BadRow) -> None:
        self._say_bad(f"{row.source}: {row.problem}")

    def _say_bad(self, line: str) -> None:
        """Once for all repeats of a row, and for so many rows."""
        if line in self._bad_lines or len(self._bad_lines) > BAD_ROWS_SHOWN:
            return
        self._bad_lines.add(line)
        many = len(self._bad_lines) > BAD_ROWS_SHOWN
        self.note("More rows are bad; all of them are in the failures file." if many else line)

    def begin(self, standing: Standing) -> None:
        self._progress = Progress(self._err, standing)

    def ended(self, outcome: RowOutcome) -> None:
        if outcome.rollout.failure_kind == FailureKind.BAD_ROW:
            self._say_bad(outcome.reason)

    def close(self) -> None:
        """End the progress; may be called again."""
        if self._progress is not None:
            self._progress.close()
            self._progress = None

    def show(self, summary: RunSummary) -> None:
        """The outcome of the run."""
        self._out.print()
        if 0 < len(summary.outcomes) <= ROW_TABLE_AT_MOST:
            self._out.print(_row_table(summary))
        self._out.print(_environment_table(summary))
        for line in (*_failure_lines(summary), *_file_lines(summary)):
            self._out.print(Text(line), soft_wrap=True)
        for line in _end_lines(summary):
            self.note(line)


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
    table = Table(title=f"Rewards ({duration(summary.duration_s)})", title_justify="left")
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
    lines = [] if summary.trouble is None else [str(summary.trouble)]
    if summary.stopped:
        open_rows = sum(outcome.status == "no outcome" for outcome in summary.outcomes)
        lines.append(f"Stopped. {open_rows} rows have no outcome yet. {_after_stop(summary)}")
    if summary.due:
        same = " (and the same --config, if any)" if summary.options.own_services else ""
        lines.append(
            f"To run those that may be tried again ({summary.due}): {command_name()} run --resume"
            f" -o {summary.paths.results}{same}."
        )
    return lines


def _after_stop(summary: RunSummary) -> str:
    if summary.options.own_services:
        return "Those under way end with the services of this run; a resumed run starts them again."
    if summary.options.cancel_on_stop:
        return "Those under way were cancelled; a resumed run tries them again."
    return (
        "Those under way go on in the environment; a resumed run joins them, or fetches what came of them, under the"
        " same ids."
    )


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
