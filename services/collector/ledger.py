"""How every row of a run stands, from its result lines and failure records, old and new.

Decides what is still to run: a row with a result, with a terminal failure, or with three failed tries is
left alone; every other one runs. Its attempt is one more than the last that the environment ended; an
attempt that has no outcome of the environment, because it could not be reached, is asked for again.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from services.collector.metrics import Rollout
from services.collector.options import RunError
from services.collector.outcomes import RUN, Episode
from services.collector.records import FailureRecord, MaterialisedRow
from shared.contracts.episode import EpisodeId

ATTEMPTS_AT_MOST: Final = 3
_ANSWER_FIELDS: Final = ("extracted_answer", "extracted")


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """How one row and repeat stands, for people and for metrics."""

    rollout: Rollout
    task: str
    status: str
    """`graded`, `masked`, `failed` or `no outcome`."""
    tokens: int | None = None
    duration_s: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Place:
    environment: str
    task_index: int
    repeat_index: int


class Ledger:
    """All rows of one run."""

    def __init__(self) -> None:
        self.run_id = ""
        self.bad_rows = 0
        self._places: dict[str, _Place] = {}
        self._results: dict[str, RowOutcome] = {}
        self._failures: dict[str, RowOutcome] = {}
        self._tries: Counter[str] = Counter()
        self._next_attempts: dict[str, int] = {}
        self._given_up: set[str] = set()

    @property
    def rows(self) -> int:
        return len(self._places)

    @property
    def one_environment(self) -> bool:
        """Whether all rows go to the same environment."""
        return len({place.environment for place in self._places.values()}) == 1

    def add_row(self, row: MaterialisedRow) -> None:
        self.run_id = row.run_id
        self._places[row.episode_id.rollout_id] = _Place(row.environment, row.task_index, row.repeat_index)

    def add_bad_row(self) -> None:
        self.bad_rows += 1

    def add_result(self, line: Mapping[str, Any], where: str = "The answer") -> RowOutcome:
        """The row's outcome.

        Raises:
            RunError: the line is no result of a row of this run.
        """
        try:
            rollout_id = EpisodeId.model_validate(line["episode_id"]).rollout_id
            outcome = _graded(self._place(rollout_id), line)
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{where} is no result line: {type(error).__name__}: {error}.") from error
        self._results[rollout_id] = outcome
        return outcome

    def add_failure(self, record: FailureRecord) -> RowOutcome:
        """The row's outcome.

        Raises:
            RunError: the record is of no row of this run.
        """
        if record.episode_id is None:
            raise RunError(f"A failure record of {record.source} names no episode.")
        rollout_id = record.episode_id.rollout_id
        outcome = _failed(self._place(rollout_id), record)
        self._failures[rollout_id] = outcome
        self._tries[rollout_id] += record.was_a_try
        self._next_attempts[rollout_id] = record.episode_id.attempt + record.ended
        if record.failure.terminal:
            self._given_up.add(rollout_id)
        return outcome

    def _place(self, rollout_id: str) -> _Place:
        place = self._places.get(rollout_id)
        if place is None:
            raise RunError(f"The episode '{rollout_id}' is of no row in the inputs of this run: were files mixed up?")
        return place

    def to_run(self, rows: Iterable[MaterialisedRow]) -> Iterator[Episode]:
        """The attempts that are due, in the order of the rows."""
        for row in rows:
            if (episode := self.attempt_due(row)) is not None:
                yield episode

    def attempt_due(self, row: MaterialisedRow) -> Episode | None:
        """The row's next attempt; None when it has a result or is given up."""
        first = row.episode_id
        if not self._is_due(first.rollout_id):
            return None
        attempt = self._next_attempts.get(first.rollout_id, first.attempt)
        return Episode(row, EpisodeId(rollout_id=first.rollout_id, attempt=attempt))

    def due(self) -> int:
        return sum(self._is_due(rollout_id) for rollout_id in self._places)

    def _is_due(self, rollout_id: str) -> bool:
        return (
            rollout_id not in self._results
            and rollout_id not in self._given_up
            and self._tries[rollout_id] < ATTEMPTS_AT_MOST
        )

    def outcomes(self) -> Iterator[RowOutcome]:
        """Every row as it stands now; of several failures the last."""
        for rollout_id, place in self._places.items():
            if (outcome := self._results.get(rollout_id)) is not None:
                yield outcome
            elif (failed := self._failures.get(rollout_id)) is not None:
                yield failed
            else:
                yield RowOutcome(
                    Rollout(place.environment, place.task_index, place.repeat_index),
                    str(place.task_index),
                    "no outcome",
                )


def _graded(place: _Place, line: Mapping[str, Any]) -> RowOutcome:
    usage = _usage(line.get("response"))
    components = line.get("reward_components")
    named = [field for field in _ANSWER_FIELDS if field in line]
    answer = line[named[0]] if named else None
    masked = line.get("mask_sample") is True
    rollout = Rollout(
        environment=place.environment,
        task_index=place.task_index,
        repeat_index=place.repeat_index,
        reward=float(line["reward"]),
        masked=masked,
        components=_numbers(components) if isinstance(components, dict) else None,
        has_answer=bool(named),
        answer=None if answer is None else str(answer),
        usage=usage,
    )
    run = line.get(RUN)
    return RowOutcome(
        rollout=rollout,
        task=_task(line, place),
        status="masked" if masked else "graded",
        tokens=_whole(usage.get("total_tokens")),
        duration_s=run.get("duration_s") if isinstance(run, dict) else None,
        reason=str(line.get("failure_reason") or ""),
    )


def _failed(place: _Place, record: FailureRecord) -> RowOutcome:
    failure = record.failure
    usage = _usage(failure.partial_response)
    return RowOutcome(
        rollout=Rollout(
            environment=place.environment,
            task_index=place.task_index,
            repeat_index=place.repeat_index,
            usage=usage,
            failure_kind=str(failure.failure_kind),
        ),
        task=str(place.task_index),
        status="failed",
        tokens=_whole(usage.get("total_tokens")),
        reason=f"{record.source}: {failure.failure_reason}",
    )


def _task(line: Mapping[str, Any], place: _Place) -> str:
    task_id = line.get("task_id")
    return str(task_id["task_id"]) if isinstance(task_id, dict) and "task_id" in task_id else str(place.task_index)


def _usage(response: Any) -> dict[str, float]:
    """Token counts that are known; details are named after their field."""
    usage = response.get("usage") if isinstance(response, dict) else None
    if not isinstance(usage, dict):
        return {}
    counts = _numbers(usage)
    for details in ("input_tokens_details", "output_tokens_details"):
        if isinstance(usage.get(details), dict):
            counts |= _numbers(usage[details])
    return counts


def _numbers(fields: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value for name, value in fields.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
