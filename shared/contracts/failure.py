"""What a failed episode says: a closed vocabulary and one record.

Kinds that mean the same as in NeMo Gym 0.7's registry (`nemo_gym/failure_kinds.py`) carry its names,
so that its collector groups ours. A kind names what went wrong and never decides about a retry.
"""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from shared.contracts.contract import Contract

REASON_MAX_CHARS = 2000
EXCERPT_MAX_CHARS = 1000


class Stage(StrEnum):
    """Which step of the episode was running."""

    ADMISSION = "admission"
    SEED = "seed"
    AGENT = "agent"
    VERIFICATION = "verification"
    CLEANUP = "cleanup"


class FailureKind(StrEnum):
    """The closed list; low cardinality, safe as a metric label."""

    TRANSPORT_UNREACHABLE = "transport_unreachable"
    TRANSPORT_PEER_DROP = "transport_peer_drop"
    TRANSPORT_TIMEOUT = "transport_timeout"
    TRANSPORT_LOCAL_RESOURCE = "transport_local_resource"
    AGENT_RUN_ERROR = "agent_run_error"
    AGENT_REQUEST_FAILED = "agent_request_failed"
    AGENT_TIMEOUT = "agent_timeout"
    AGENT_COMMAND_NOT_ALLOWED = "agent_command_not_allowed"
    ENVIRONMENT_SERVER_FAILED = "environment_server_failed"
    PROTOCOL_VIOLATION = "protocol_violation"
    JUDGE_FAILED = "judge_failed"
    JUDGE_UNPARSEABLE = "judge_unparseable"
    VERIFIER_ERROR = "verifier_error"
    PROVIDER_UNAVAILABLE = "provider_unavailable"
    PROVIDER_QUOTA_EXHAUSTED = "provider_quota_exhausted"
    PROVIDER_OOM_KILLED = "provider_oom_killed"
    PROVIDER_LOST = "provider_lost"
    SESSION_LOST = "session_lost"
    SESSION_EXPIRED = "session_expired"
    SESSION_RELEASE_FAILED = "session_release_failed"
    CANCELLED = "cancelled"
    KILL_SHAPED = "kill_shaped"
    SHUTDOWN = "shutdown"
    PERSISTENCE_FAILED = "persistence_failed"
    COHORT_INCOMPLETE = "cohort_incomplete"
    MODEL_BAD_REQUEST = "model_bad_request"
    MODEL_AUTH = "model_auth"
    MODEL_QUOTA = "model_quota"
    MODEL_RATE_LIMITED = "model_rate_limited"
    MODEL_OVERLOADED = "model_overloaded"
    MODEL_ERROR = "model_error"
    CLEANUP_UNPROVEN = "cleanup_unproven"
    DEADLINE = "deadline"
    BAD_ROW = "bad_row"
    CONFLICT = "conflict"
    UNAUTHORIZED = "unauthorized"
    NOT_FOUND = "not_found"
    OVERLOADED = "overloaded"


def _cut(limit: int) -> AfterValidator:
    return AfterValidator(lambda text: text if len(text) <= limit else text[: limit - 1] + "…")


Reason = Annotated[str, _cut(REASON_MAX_CHARS)]
Excerpt = Annotated[str, _cut(EXCERPT_MAX_CHARS)]


class Origin(Contract):
    """Where a failure began: the service or upstream that answered first.

    `status` is the HTTP status it gave, `code` its own error code, `body_excerpt` at most
    1,000 characters of its body with secrets removed.
    """

    service: str
    status: int | None = None
    code: str | None = None
    body_excerpt: Excerpt | None = None


class FailureCause(Contract):
    """Why an agent's response has the status `failed`, when that is known."""

    failure_kind: FailureKind
    reason: Reason = ""
    origin: Origin | None = None


class CleanupError(Contract):
    """A cleanup that did not succeed within its budget."""

    what: str
    type: str
    message: Reason


class Failure(Contract):
    """The record of an episode that has no result. Absent optional fields are left out, not null."""

    failure_reason: Reason
    terminal: bool = Field(description="Do not try this row again.")
    failure_kind: FailureKind
    stage: Stage
    origin: Origin | None = None
    partial_response: dict[str, Any] | None = None
    cleanup_error: CleanupError | None = None
