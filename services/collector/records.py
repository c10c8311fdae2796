"""What a run keeps on disk beside its results: materialised inputs and failures, both versioned.

Result lines are open (the verifier's own fields); how one is made is in `outcomes.py`.
"""

from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import model_validator

from shared.contracts.contract import Contract
from shared.contracts.episode import EpisodeId
from shared.contracts.failure import Failure, FailureKind, Stage

TASK_INDEX = "_ng_task_index"
REPEAT_INDEX = "_ng_rollout_index"


class Source(Contract):
    """Where a row stands: file and line, counted from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class MaterialisedRow(Contract):
    """One row and repeat as it is sent, except that a retry counts up the attempt."""

    schema_version: Literal[1] = 1
    run_id: str
    task_index: int
    repeat_index: int
    source: Source
    request: dict[str, Any]

    @property
    def episode_id(self) -> EpisodeId:
        return EpisodeId.model_validate(self.request["episode_id"])

    @property
    def environment(self) -> str:
        """Whose score it is: the environment that the row names, else its agent, else `default`."""
        agent = self.request.get("agent_ref")
        names = (self.request.get("environment"), agent.get("name") if isinstance(agent, dict) else None)
        return next((name for name in names if isinstance(name, str)), "default")


class RunRecord(Contract):
    """What a run was started with. `url` is None where it had services of its own."""

    schema_version: Literal[1] = 1
    run_id: str
    url: str | None = None
    environment: str | None = None
    repeats: int
    limit: int | None = None


class ReportedBy(StrEnum):
    ENVIRONMENT = "environment"
    COLLECTOR = "collector"


class Delivery(StrEnum):
    """Whether the environment has the request."""

    NOT_SENT = "not_sent"
    POSSIBLY_DELIVERED = "possibly_delivered"
    DELIVERED = "delivered"


class FailureRecord(Contract):
    """One failed attempt, or (without ids) a row that could not be read. No reward follows from it."""

    schema_version: Literal[1] = 1
    run_id: str
    episode_id: EpisodeId | None = None
    task_index: int | None = None
    repeat_index: int | None = None
    source: Source
    reported_by: ReportedBy
    delivery: Delivery
    failure: Failure
    http_status: int | None = None
    exception_type: str | None = None
    evidence: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _the_environment_had_the_request(self) -> Self:
        if self.reported_by is ReportedBy.ENVIRONMENT and self.delivery is not Delivery.DELIVERED:
            raise ValueError("a failure that the environment reports was delivered to it")
        return self

    @property
    def had_no_place(self) -> bool:
        """The environment was full, and the episode ended before its first step."""
        return (
            self.ended and self.failure.failure_kind is FailureKind.OVERLOADED and self.failure.stage is Stage.ADMISSION
        )

    @property
    def ended(self) -> bool:
        """The environment has this outcome and would replay it. Of any other failure's id it may know more by now."""
        return self.reported_by is ReportedBy.ENVIRONMENT and self.http_status == 200

    @property
    def was_a_try(self) -> bool:
        """Whether the attempt says anything about the row."""
        return not self.had_no_place and self.failure.failure_kind is not FailureKind.CANCELLED
