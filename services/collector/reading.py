"""A run's files, read again. Nothing is dropped in silence: what cannot be read is named with its line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from services.collector.lines import decode, numbered_lines
from services.collector.options import RunError, RunOptions
from services.collector.paths import RunPaths, paths_of
from services.collector.records import RunRecord

_Record = TypeVar("_Record", bound=BaseModel)


def require_run(paths: RunPaths) -> None:
    """See that there is a run that can go on.

    Raises:
        RunError: there is none, or a file of it is missing.
    """
    if not (paths.results.exists() or paths.inputs.exists()):
        raise RunError(f"There is no run to resume at {paths.results}. Check -o, or leave --resume out.")
    for path, what in ((paths.inputs, "its rows were"), (paths.run, "it was started with")):
        if not path.exists():
            raise RunError(
                f"{paths.results} cannot be resumed: {path}, which says what {what}, is missing."
                " Start anew with another -o."
            )


def read_run(paths: RunPaths) -> RunRecord:
    """What the run was started with.

    Raises:
        RunError: there is no run, or a file of it is missing or of another version or form.
    """
    require_run(paths)
    try:
        return RunRecord.model_validate(decode(paths.run.read_bytes()))
    except OSError as error:
        raise RunError(f"{paths.run} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise RunError(f"{paths.run} does not say how a run was started: {error}") from error


def url_of_run(options: RunOptions) -> str | None:
    """Where the run is that is to be continued; None for a fresh one, and for one with services of its own.

    Raises:
        RunError: see `read_run`.
    """
    return read_run(paths_of(options)).url if options.resume else None


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


def _unreadable(path: Path, number: int, why: str) -> RunError:
    return RunError(
        f"{path}:{number} is not a line of a run: {why}. Repair or remove it, or start anew with another -o."
    )
