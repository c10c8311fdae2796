"""One attempt at one row: its names, its request and its answer (design: `POST /run`)."""

import re
from enum import StrEnum
from typing import Annotated, Any, NewType, Self

from pydantic import AfterValidator, Field, StrictInt, model_validator

from shared.contracts.contract import Contract, OpenContract
from shared.contracts.failure import CleanupError, Failure
from shared.contracts.responses import ResponsesCreateParams

EpisodeKey = NewType("EpisodeKey", str)

_ROLLOUT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ATTEMPT_SUFFIX = re.compile(r"-a[1-9][0-9]*$")
ROLLOUT_ID_MAX_CHARS = 200


def _rollout_id(value: str) -> str:
    if not _ROLLOUT_ID.fullmatch(value) or len(value) > ROLLOUT_ID_MAX_CHARS:
        raise ValueError(
            "a rollout id starts with a letter or digit and then holds only letters, digits, '.', '_' and '-'"
            f" ({ROLLOUT_ID_MAX_CHARS} characters at most)"
        )
    if _ATTEMPT_SUFFIX.search(value):
        raise ValueError("a rollout id may not end in '-a' and a number: that form is reserved for attempts")
    return value


RolloutId = Annotated[str, AfterValidator(_rollout_id)]


class EpisodeId(Contract):
    rollout_id: RolloutId
    attempt: Annotated[StrictInt, Field(ge=0)] = 0

    @property
    def key(self) -> EpisodeKey:
        """`rollout_id` for attempt 0, else `rollout_id-aN`: the episode's name everywhere."""
        return EpisodeKey(f"{self.rollout_id}-a{self.attempt}" if self.attempt else self.rollout_id)


class TaskId(Contract):
    taskset: Annotated[str, Field(min_length=1)]
    task_id: Annotated[str, Field(min_length=1)]


AgentTimeout = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class TaskInput(OpenContract):
    """What the row holds. Fields beside the declared ones are merged into `task_data`."""

    responses_create_params: ResponsesCreateParams
    task_data: dict[str, Any] = {}
    agent_timeout_s: AgentTimeout | None = Field(
        default=None, description="The agent wall limit in seconds; bounds the activation only."
    )

    @model_validator(mode="after")
    def _merge(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if self.task_data.get(name, value) != value:
                raise ValueError(f"{name} stands in task_input and in task_data with different values")
        return self

    def merged_task_data(self) -> dict[str, Any]:
        return {**self.task_data, **(self.model_extra or {})}


class Task(Contract):
    task_id: TaskId
    task_input: TaskInput


class NativeRequest(Contract):
    episode_id: EpisodeId
    task: Task
    environment: str | None = None


class FlatRow(OpenContract):
    """A prepared row with its task fields at top level. Bookkeeping keys stay out of the task data."""

    responses_create_params: ResponsesCreateParams
    environment: str | None = None
    episode_id: EpisodeId | None = None
    agent_ref: dict[str, Any] | None = None
    task_source: str | None = None
    skills_ref: Any = None
    agent_timeout_s: AgentTimeout | None = None


class Action(StrEnum):
    """What the outcome policy does with an agent's response."""

    VERIFY = "verify"
    RETRY = "retry"
    MASK = "mask"
    ZERO = "zero"
    FAIL = "fail"


class Outcome(Contract):
    """What the policy did and why. `selected_by` is e.g. `status:429`, `kind:model_auth`, `default`."""

    action: Action
    selected_by: str
    cause: dict[str, Any] | None = None


class Evidence(Contract):
    """What is known beside the verdict, gathered after all cleanup, for results and failures alike.

    `takeovers` counts the environment servers that died, or stopped, while the episode ran.
    """

    outcome: Outcome | None = None
    agent_observations: dict[str, Any] | None = None
    agent_trajectory: dict[str, Any] | None = None
    close_receipt: dict[str, Any] | None = None
    timings_s: dict[str, float] = {}
    cleanup_errors: tuple[CleanupError, ...] = ()
    takeovers: int = 0
    gaps: tuple[str, ...] = ()


class EpisodeReply(Contract):
    """Exactly one of `result` and `failure`."""

    episode_id: EpisodeId
    task_id: TaskId
    result: dict[str, Any] | None = None
    failure: Failure | None = None
    evidence: Evidence = Evidence()

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.result is None) == (self.failure is None):
            raise ValueError("a reply has exactly one of result and failure")
        return self
