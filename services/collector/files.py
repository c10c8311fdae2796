"""A run's files: which they are, how they are begun, written, and read again.

One process writes a run (it locks the results file). What the run is and all of its episode ids are on disk
before the first row is sent. After that a line is written whole and flushed at once, so that a killed run
loses at most the line it was writing, and a resumed run cuts such a rest off.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, Self

from pydantic import BaseModel

from services.collector.lines import drop_truncated_end, encode
from services.collector.options import RunError
from services.collector.outcomes import Result
from services.collector.paths import RunPaths
from services.collector.reading import read_lines, read_records, require_run
from services.collector.records import FailureRecord, MaterialisedRow, RunRecord


class RunFiles:
    """The open results and failures of one run; use it as a context manager."""

    def __init__(self, paths: RunPaths, *, resume: bool) -> None:
        """Open and lock them.

        Raises:
            RunError: there is another run's output, nothing to resume, another writer, or no place to write.
        """
        self.paths = paths
        self.cut: list[Path] = []
        left_over = _check_there(paths, resume=resume)
        try:
            paths.results.parent.mkdir(parents=True, exist_ok=True)
            self._results = paths.results.open("ab")
        except OSError as error:
            raise _unwritable(paths, error) from error
        try:
            _lock(self._results, paths)
            if resume:
                self.cut = [path for path in (paths.results, paths.failures) if drop_truncated_end(path)]
            self._failures = paths.failures.open("wb" if left_over else "ab")
        except OSError as error:
            self._results.close()
            raise _unwritable(paths, error) from error
        except RunError:
            self._results.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._failures.close()
        self._results.close()

    def write_result(self, result: Result) -> None:
        self._write(self._results, result.line)

    def write_failure(self, record: FailureRecord) -> None:
        self._write(self._failures, _line(record))

    def _write(self, file: BinaryIO, line: bytes) -> None:
        try:
            file.write(line)
            file.flush()
        except OSError as error:
            raise _unwritable(self.paths, error) from error

    def write_metrics(self, metrics: dict[str, Any]) -> None:
        self._write_whole(self.paths.metrics, metrics)

    def write_run(self, record: RunRecord) -> None:
        self._write_whole(self.paths.run, record.model_dump(mode="json"))

    def _write_whole(self, path: Path, value: dict[str, Any]) -> None:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2) + "\n"
        temporary = path.with_suffix(".json.tmp")
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                _put_in_place(file, path)
        except OSError as error:
            raise _unwritable(self.paths, error) from error

    def discard(self) -> None:
        """Take away the files of a run in which nothing was run."""
        for path in (self.paths.results, self.paths.failures, self.paths.inputs, self.paths.run):
            path.unlink(missing_ok=True)

    def read_results(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The result lines with their numbers.

        Raises:
            RunError: a line is no result.
        """
        yield from read_lines(self.paths.results)

    def read_failures(self) -> Iterator[FailureRecord]:
        """The failure records.

        Raises:
            RunError: a line is of another version or form; nothing is dropped in silence.
        """
        yield from read_records(self.paths.failures, FailureRecord)

    def read_inputs(self) -> Iterator[MaterialisedRow]:
        """The materialised rows.

        Raises:
            RunError: a line is of another version or form.
        """
        yield from read_records(self.paths.inputs, MaterialisedRow)


class InputsWriter:
    """Writes materialised inputs beside their place; only `commit` puts them there, whole."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._temporary = paths.inputs.with_suffix(".jsonl.tmp")

    def __enter__(self) -> Self:
        try:
            self._file = self._temporary.open("wb")
        except OSError as error:
            raise _unwritable(self._paths, error) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def write(self, row: MaterialisedRow) -> None:
        try:
            self._file.write(_line(row))
        except OSError as error:
            raise _unwritable(self._paths, error) from error

    def commit(self) -> None:
        try:
            _put_in_place(self._file, self._paths.inputs)
        except OSError as error:
            raise _unwritable(self._paths, error) from error


def _check_there(paths: RunPaths, *, resume: bool) -> bool:
    """Whether what is there fits; True when it is left over from a run that was killed before it began."""
    if resume:
        require_run(paths)
        return False
    left_over = paths.results.exists() and not paths.results.stat().st_size and not paths.inputs.exists()
    there = [] if left_over else [path for path in (paths.results, paths.failures, paths.inputs) if path.exists()]
    if paths.metrics.exists():
        there.append(paths.metrics)
    if there:
        raise RunError(
            f"{there[0]} exists already and is not overwritten: go on with that run by --resume, or name another"
            " file with -o."
        )
    return left_over


def _put_in_place(file: IO[Any], path: Path) -> None:
    """Give a file that was written beside its place that place, whole, also after a loss of power."""
    file.flush()
    os.fsync(file.fileno())
    os.replace(file.name, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _lock(file: BinaryIO, paths: RunPaths) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RunError(
            f"Another run is writing {paths.results}: wait for its end, or name another file with -o."
        ) from error


def _line(record: BaseModel) -> bytes:
    return encode(_plain(record))


def _plain(value: Any) -> Any:
    """A record without its absent fields; what a row or an answer says itself, nulls too, stays as it is."""
    if isinstance(value, BaseModel):
        return {name: _plain(field) for name, field in value if field is not None}
    return value


def _unwritable(paths: RunPaths, error: OSError) -> RunError:
    return RunError(
        f"Cannot write {error.filename or paths.results}: {error.strerror}. What is written already can be resumed"
        " with --resume."
    )
