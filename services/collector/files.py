"""A run's files: which they are, how they are begun, written, and read again.

One process writes a run (it locks the results file). A line is written whole and flushed at once, so
that a killed run loses at most the line it was writing, and a resumed run cuts such a rest off.
"""

import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

from pydantic import BaseModel, ValidationError

from services.collector.lines import decode, drop_truncated_end, encode, numbered_lines
from services.collector.options import RunError, RunOptions
from services.collector.outcomes import Result
from services.collector.records import FailureRecord, MaterialisedRow

_Record = TypeVar("_Record", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Results, and beside them failures, materialised inputs and metrics."""

    results: Path

    def _beside(self, what: str) -> Path:
        return self.results.with_name(f"{self.results.stem}_{what}")

    @property
    def failures(self) -> Path:
        return self._beside("failures.jsonl")

    @property
    def inputs(self) -> Path:
        return self._beside("inputs.jsonl")

    @property
    def metrics(self) -> Path:
        return self._beside("metrics.json")


def paths_of(options: RunOptions) -> RunPaths:
    if options.out is not None:
        return RunPaths(options.out)
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    path = Path("results") / f"{options.rows[0].stem}-{stamp}.jsonl"
    # Two runs within one second get two files.
    return RunPaths(path.with_stem(f"{path.stem}-{secrets.token_hex(2)}") if path.exists() else path)


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
        text = json.dumps(metrics, ensure_ascii=False, allow_nan=False, indent=2) + "\n"
        temporary = self.paths.metrics.with_suffix(".json.tmp")
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, self.paths.metrics)
        except OSError as error:
            raise _unwritable(self.paths, error) from error

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
            self._file.close()
            os.replace(self._temporary, self._paths.inputs)
        except OSError as error:
            raise _unwritable(self._paths, error) from error


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with path.open("rb") as file:
            for number, line in numbered_lines(file):
                try:
                    value = decode(line)
                except ValueError as error:
                    raise _unreadable(path, number, str(error)) from error
                if not isinstance(value, dict):
                    raise _unreadable(path, number, "not an object")
                yield number, value
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from error


def read_records(path: Path, model: type[_Record]) -> Iterator[_Record]:
    for number, value in read_lines(path):
        try:
            yield model.model_validate(value)
        except ValidationError as error:
            where = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
            raise _unreadable(path, number, where) from error


def _check_there(paths: RunPaths, *, resume: bool) -> bool:
    """Whether what is there fits; True when it is left over from a run that was killed before it began."""
    if resume:
        _require_run(paths)
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


def _require_run(paths: RunPaths) -> None:
    if not (paths.results.exists() or paths.inputs.exists()):
        raise RunError(f"There is no run to resume at {paths.results}. Check -o, or leave --resume out.")
    if not paths.inputs.exists():
        raise RunError(
            f"{paths.results} cannot be resumed: {paths.inputs}, which says what its rows were, is missing."
            " Start anew with another -o."
        )


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


def _unreadable(path: Path, number: int, why: str) -> RunError:
    return RunError(
        f"{path}:{number} is not a line of a run: {why}. Repair or remove it, or start anew with another -o."
    )
