"""Rows in: read, checked, and given their place in the run.

Checks what can be known without the environment: the outer shape, and names that are reserved for
results. What a verifier needs is checked by the environment.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from services.collector.lines import decode, encode, numbered_lines
from services.collector.options import RunError, RunOptions
from services.collector.records import REPEAT_INDEX, TASK_INDEX, MaterialisedRow, Source
from shared.contracts.episode import FlatRow, NativeRequest
from shared.errors import BadRowError, FieldProblem
from shared.http.problems import bad_row

# Fields that an episode's answer adds; a row that has one is somebody's result.
RESULT_FIELDS = frozenset({"reward", "response", "mask_sample"})
_FAILURE_PREFIX = "_ng_failure_"
_MATERIALISED = frozenset({TASK_INDEX, REPEAT_INDEX, "_ng_rollout_id", "_ng_attempt_index"})


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that is not run, and why."""

    source: Source
    problem: str


@dataclass(frozen=True, slots=True)
class ReadRow:
    """A row whose outer shape is right."""

    source: Source
    row: dict[str, Any]
    native: bool

    @property
    def prepared(self) -> bool:
        """It brings its own episode id."""
        return self.row.get("episode_id") is not None


def read_rows(path: Path) -> Iterator[ReadRow | BadRow]:
    """The rows of a file, one at a time.

    Raises:
        RunError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, line in numbered_lines(file):
                source = Source(file=str(path), line=number)
                try:
                    yield check_row(decode(line), source)
                except BadRowError as error:
                    yield BadRow(source, error.message)
                except ValueError as error:
                    cut = "" if line.endswith(b"\n") else " (the last line; was the file cut off?)"
                    yield BadRow(source, f"{error}{cut}")
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from error


def check_row(value: Any, source: Source) -> ReadRow:
    """Check the outer shape of a row.

    Raises:
        BadRowError: with the path of every wrong field.
    """
    if not isinstance(value, dict):
        raise BadRowError(f"a row is a JSON object, not {_json_name(value)}")
    native = value.get("episode_id") is not None and "task" in value
    problems = _reserved(_native_task_data(value), ("task", "task_input")) if native else _reserved(value, ())
    try:
        if native:
            NativeRequest.model_validate(value)
        else:
            FlatRow.model_validate(value)
    except ValidationError as error:
        problems += bad_row(error).detail
    if problems:
        raise BadRowError.of(problems)
    try:
        encode(value)
    except ValueError as error:
        raise BadRowError("it holds a number that is too large for JSON") from error
    return ReadRow(source, value, native)


def _native_task_data(value: dict[str, Any]) -> dict[str, Any]:
    task = value["task"]
    task_input = task.get("task_input") if isinstance(task, dict) else None
    if not isinstance(task_input, dict):
        return {}
    task_data = task_input.get("task_data")
    return {**task_input, **task_data} if isinstance(task_data, dict) else task_input


def _reserved(fields: dict[str, Any], path: tuple[str, ...]) -> list[FieldProblem]:
    problems = []
    for name in fields:
        if name in RESULT_FIELDS or name.startswith(_FAILURE_PREFIX):
            problems.append(FieldProblem((*path, name), "is reserved for results: is this a results file?", "reserved"))
        elif name in _MATERIALISED:
            problems.append(FieldProblem((*path, name), "is given by the run: this row was materialised", "reserved"))
    return problems


def _json_name(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


class Materialiser:
    """Gives every row and repeat its indexes and its episode id."""

    def __init__(self, options: RunOptions, run_id: str) -> None:
        self._options = options
        self._run_id = run_id
        self._own_ids: dict[str, Source] = {}
        self._tasks = 0

    def rows(self) -> Iterator[MaterialisedRow | BadRow]:
        """All rows of the files in order, the repeats of one row beside each other.

        Raises:
            RunError: a file cannot be read.
        """
        for path in self._options.rows:
            for read in read_rows(path):
                if isinstance(read, BadRow):
                    yield read
                    continue
                if problem := self._problem(read):
                    yield BadRow(read.source, problem)
                    continue
                yield from self._repeats(read)
                self._tasks += 1
                if self._tasks == self._options.limit:
                    return

    def _problem(self, read: ReadRow) -> str | None:
        """What the run's options do not allow: a prepared row is run as it is, or not at all."""
        named, wanted = read.row.get("environment"), self._options.environment
        if wanted is not None and named not in {None, wanted}:
            return f"environment: the row names '{named}', --environment says '{wanted}'; leave one of them out"
        if not read.prepared:
            return None
        if self._options.repeats > 1:
            return "episode_id: a row with its own episode id is run once; leave --repeats or the id out"
        rollout_id = read.row["episode_id"]["rollout_id"]
        if (first := self._own_ids.setdefault(rollout_id, read.source)) is not read.source:
            return f"episode_id.rollout_id: '{rollout_id}' is that of {first} already"
        return None

    def _repeats(self, read: ReadRow) -> Iterator[MaterialisedRow]:
        for repeat in range(self._options.repeats):
            request = dict(read.row)
            if not read.prepared:
                request["episode_id"] = {"rollout_id": f"{self._run_id}-{self._tasks}-{repeat}", "attempt": 0}
            if self._options.environment is not None:
                request["environment"] = self._options.environment
            if not read.native:
                request |= {TASK_INDEX: self._tasks, REPEAT_INDEX: repeat}
            yield MaterialisedRow(
                run_id=self._run_id,
                task_index=self._tasks,
                repeat_index=repeat,
                source=read.source,
                request=request,
            )
