"""What a run can be told, and how it can be refused."""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

EXIT_OK = 0
EXIT_ROWS_FAILED = 1
EXIT_USAGE = 2


@dataclass(frozen=True, slots=True)
class RunOptions:
    """One call of `paddock run`."""

    rows: tuple[Path, ...]
    """JSONL files; may be empty when a run is resumed."""
    out: Path | None = None
    """The results file; by default `results/<stem of the first file>-<time>.jsonl`."""
    environment: str | None = None
    """Fills in the environment of rows that name none."""
    repeats: int = 1
    """How often each row is run."""
    concurrency: int = 32
    """Episodes at once."""
    limit: int | None = None
    """Only that many rows, counted without the bad ones."""
    resume: bool = False
    """Continue the run whose results are in `out`."""
    patience_s: float = 300.0
    """How long one row is tried again while the environment, or the way to it, is away."""
    busy_patience_s: float = 21_600.0
    """How long one row is tried again while the environment is full: as long as an episode may take by default."""
    stop_wait_s: float = 3.0
    """How long rows under way may still end after the run was told to stop."""
    cancel_on_stop: bool = False
    """Cancel the episodes under way when the run is told to stop."""
    own_services: bool = False
    """The services live for this run only: what it leaves unfinished ends with them."""


class RunError(Exception):
    """The run cannot start or go on. The message is a sentence that names the remedy."""

    status = EXIT_USAGE


class RefusedError(RunError):
    """The environment takes no row of this run."""


class EnvironmentGoneError(RunError):
    """The environment stopped answering in the middle of a run. Rows without an answer are left as they were."""

    status = EXIT_ROWS_FAILED


def command_name() -> str:
    """How this command was called, so that what is printed can be typed again."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "paddock" and shutil.which("paddock") is None else "paddock"


def check_options(options: RunOptions) -> None:
    """Refuse what no run can do.

    Raises:
        RunError: a number is out of range, a file is missing, or there is nothing to run or resume.
    """
    if not options.patience_s > 0:
        raise RunError(f"--patience must be more than 0 seconds, not {options.patience_s:g}.")
    numbers = (("--repeats", options.repeats), ("--concurrency", options.concurrency), ("--limit", options.limit))
    for name, value in numbers:
        if value is not None and value < 1:
            raise RunError(f"{name} must be at least 1, not {value}.")
    if options.resume and options.out is None:
        raise RunError("--resume needs -o with the results file of the run to continue.")
    if not options.resume and not options.rows:
        raise RunError("Name at least one JSONL file with rows.")
    _check_files(options)


def _check_files(options: RunOptions) -> None:
    for path in options.rows:
        if path.is_dir():
            raise RunError(f"{path} is a folder: name the JSONL files in it.")
        if not path.exists():
            raise RunError(f"{path} does not exist.")
    if options.out is not None and options.out.is_dir():
        raise RunError(f"{options.out} is a folder: -o names the results file.")
