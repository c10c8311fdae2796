"""How one attempt ended: an environment's answer → a result line or a failure record.

An answer that is neither, or that is for another episode, is a failure that the collector reports; a
failure is never given a reward.
"""

from dataclasses import dataclass
from math import isfinite
from typing import Any

from pydantic import ValidationError

from services.collector.lines import encode
from services.collector.records import (
    REPEAT_INDEX,
    TASK_INDEX,
    Delivery,
    FailureRecord,
    MaterialisedRow,
    ReportedBy,
    Source,
)
from shared.contracts.episode import EpisodeId
from shared.contracts.failure import Failure, FailureKind, Stage
from shared.errors import PaddockError, ProtocolViolationError

RUN = "_paddock"
_FLAT_FAILURE = "_ng_failure_class"


@dataclass(frozen=True, slots=True)
class Episode:
    """One attempt at one materialised row."""

    row: MaterialisedRow
    episode_id: EpisodeId

    @property
    def request(self) -> dict[str, Any]:
        return {**self.row.request, "episode_id": self.episode_id.model_dump()}

    def next(self) -> "Episode":
        """The next attempt at the row."""
        return Episode(self.row, EpisodeId(rollout_id=self.episode_id.rollout_id, attempt=self.episode_id.attempt + 1))


@dataclass(frozen=True, slots=True)
class Result:
    """A result line: what it says, and how it is written."""

    value: dict[str, Any]
    line: bytes

    @classmethod
    def of(cls, value: dict[str, Any]) -> "Result":
        return cls(value, encode(value))


@dataclass(frozen=True, slots=True)
class Report:
    """What is known about a failure beside the failure itself."""

    reported_by: ReportedBy
    delivery: Delivery
    http_status: int | None = None
    exception_type: str | None = None
    evidence: dict[str, Any] | None = None


def read_answer(episode: Episode, body: Any, duration_s: float) -> Result | FailureRecord:
    """The result line, or the failure record, of an answer with status 200.

    Raises:
        ValueError: it holds a number that JSON has no form for.
    """
    try:
        _check_ids(episode, body)
        answer = _answer(body)
    except ProtocolViolationError as error:
        return failed(episode, of_error(error), Report(ReportedBy.COLLECTOR, Delivery.DELIVERED, 200))
    if isinstance(answer, Failure):
        evidence = body.get("evidence")
        report = Report(
            ReportedBy.ENVIRONMENT, Delivery.DELIVERED, 200, evidence=evidence if isinstance(evidence, dict) else None
        )
        return failed(episode, answer, report)
    line: dict[str, Any] = {
        TASK_INDEX: episode.row.task_index,
        REPEAT_INDEX: episode.row.repeat_index,
        "episode_id": episode.episode_id.model_dump(),
        "environment": episode.row.environment,
    }
    run = {"run_id": episode.row.run_id, "duration_s": round(duration_s, 3)}
    return Result.of({**line, **answer, **line, RUN: run})


def failed(episode: Episode, failure: Failure, report: Report) -> FailureRecord:
    return FailureRecord(
        run_id=episode.row.run_id,
        episode_id=episode.episode_id,
        task_index=episode.row.task_index,
        repeat_index=episode.row.repeat_index,
        source=episode.row.source,
        reported_by=report.reported_by,
        delivery=report.delivery,
        failure=failure,
        http_status=report.http_status,
        exception_type=report.exception_type,
        evidence=report.evidence,
    )


def unread(run_id: str, source: Source, problem: str) -> FailureRecord:
    """The record of a row that never became an episode."""
    failure = Failure(failure_reason=problem, terminal=True, failure_kind=FailureKind.BAD_ROW, stage=Stage.ADMISSION)
    return FailureRecord(
        run_id=run_id,
        source=source,
        reported_by=ReportedBy.COLLECTOR,
        delivery=Delivery.NOT_SENT,
        failure=failure,
    )


def of_error(error: PaddockError) -> Failure:
    return Failure(
        failure_reason=error.message,
        terminal=error.terminal,
        failure_kind=error.kind,
        stage=error.stage or Stage.ADMISSION,
        origin=error.origin,
    )


def _check_ids(episode: Episode, body: Any) -> None:
    """An answer belongs to the episode that was asked for (ids that it leaves out are not held against it)."""
    if not isinstance(body, dict):
        raise ProtocolViolationError("The environment's answer is not a JSON object.")
    theirs = body.get("episode_id")
    if theirs is not None and theirs != episode.episode_id.model_dump():
        raise ProtocolViolationError(f"The environment answered for another episode: {str(theirs)[:200]}.")
    task = episode.row.request.get("task")
    ours = task.get("task_id") if isinstance(task, dict) else None
    if isinstance(ours, dict) and body.get("task_id", ours) != ours:
        raise ProtocolViolationError(f"The environment answered for another task: {str(body['task_id'])[:200]}.")


def _answer(body: dict[str, Any]) -> dict[str, Any] | Failure:
    if body.get("failure") is not None or _FLAT_FAILURE in body:
        return _failure(body)
    result = body.get("result")
    if isinstance(result, dict) and "reward" not in body:
        around = {name: body[name] for name in ("task_id", "evidence") if name in body}
        answer = {**result, **around}
    else:
        answer = body
    reward = answer.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not isfinite(reward):
        raise ProtocolViolationError(
            "The environment's answer has neither a failure nor a finite reward;"
            f" it has: {', '.join(sorted(answer))[:500] or 'nothing'}."
        )
    return answer


def _failure(body: dict[str, Any]) -> Failure:
    given = body.get("failure")
    if given is None:
        given = {
            "failure_reason": str(body.get("_ng_failure_message", "")),
            "terminal": bool(body.get("_ng_failure_terminal", False)),
            "failure_kind": FailureKind.ENVIRONMENT_SERVER_FAILED,
            "stage": body.get("_ng_failure_stage") or Stage.ADMISSION,
        }
    try:
        return Failure.model_validate(given)
    except ValidationError as error:
        raise ProtocolViolationError(f"The environment's failure record cannot be read: {error}") from error
