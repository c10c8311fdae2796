"""Every failure the mesh raises itself.

    PaddockError                 kind                    HTTP  terminal
    ├── BadRowError              bad_row                  422  yes   detail: field paths
    │   └── UnknownNameError     bad_row                  422  yes   names the known ones and the nearest
    ├── ConflictError            conflict                 409  yes
    ├── UnauthorizedError        unauthorized             401  yes
    ├── ForbiddenError           unauthorized             403  yes
    ├── NotFoundError            not_found                404  yes
    ├── TooLargeError            bad_row                  413  yes
    ├── OverloadedError          overloaded               429  no    retry_after_s
    ├── DrainingError            shutdown                 503  no    retry_after_s
    ├── StoreUnavailableError    persistence_failed       503  no    retry_after_s
    ├── SessionLostError         session_lost             410  no
    ├── DeadlineError            deadline                 504  no
    ├── CancelledEpisodeError    cancelled                499  no
    ├── ProtocolViolationError   protocol_violation       502  yes   a peer answered what it may not
    ├── AgentRunError            agent_run_error          502  no
    ├── CleanupUnprovenError     cleanup_unproven         502  no
    ├── VerifierError            verifier_error           500  yes
    │   └── JudgeError           judge_failed             502  no
    ├── ProviderError            provider_unavailable     503  no    the sandbox's engine, or the sandbox itself
    │   ├── ProviderQuotaError   provider_quota_exhausted 503  no
    │   ├── ProviderLostError    provider_lost            502  no    dead, restarted, replaced, removed
    │   │   ├── ProviderOomError provider_oom_killed      502  no
    │   │   └── ExitUnknownError provider_lost            502  no    nobody can say how a command ended
    │   ├── SandboxRefusedError  provider_unavailable     422  yes   what was asked for cannot be had
    │   ├── CommandNotStartedError  provider_unavailable  502  yes   no program, no folder; `reason`
    │   └── SandboxFileError     provider_unavailable     502  yes   an upload or download that cannot be done
    ├── TransportError           transport_*          502/504  no
    ├── ServiceError             as the peer said      as it was
    └── ConfigurationError       -                          -  -     the service does not start

The kind says what went wrong, `terminal` whether trying the row again is pointless; neither decides
the other. Plug-ins raise plain Python errors; whoever calls a plug-in turns them into one of these,
always `from` the cause. How errors look on the wire is in `shared/http/problems.py`, in both directions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from shared.contracts.failure import FailureKind, Origin, Stage

RETRYABLE_STATUSES = frozenset({408, 425, 429})


def terminal_by_status(status: int) -> bool:
    """408, 425, 429 and everything from 500 may be tried again (ES-40); all other statuses may not."""
    return status < 500 and status not in RETRYABLE_STATUSES


def model_failure_kind(status: int, code: str | None) -> FailureKind:
    """What an upstream's error means; a quota error is told from a rate limit by its code."""
    if status == 402 or code in {"insufficient_quota", "quota_exceeded", "usage_not_included"}:
        return FailureKind.MODEL_QUOTA
    if status in {401, 403}:
        return FailureKind.MODEL_AUTH
    if status == 429:
        return FailureKind.MODEL_RATE_LIMITED
    if status in {503, 529}:
        return FailureKind.MODEL_OVERLOADED
    return FailureKind.MODEL_BAD_REQUEST if 400 <= status < 500 and status != 408 else FailureKind.MODEL_ERROR


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """One wrong field: where it is and what is wrong with it."""

    loc: tuple[str | int, ...]
    msg: str
    type: str = "value_error"

    @property
    def path(self) -> str:
        return ".".join(str(part) for part in self.loc)


class PaddockError(Exception):
    """Base of all. `message` is a sentence for a person; it never holds a secret."""

    kind: FailureKind = FailureKind.ENVIRONMENT_SERVER_FAILED
    status: int = 500
    terminal: bool = True

    def __init__(
        self,
        message: str,
        *,
        stage: Stage | None = None,
        origin: Origin | None = None,
        detail: Sequence[FieldProblem] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.stage = stage
        self.origin = origin
        self.detail = tuple(detail)
        self.retry_after_s = retry_after_s


class BadRowError(PaddockError):
    kind = FailureKind.BAD_ROW
    status = 422

    @classmethod
    def of(cls, problems: Sequence[FieldProblem]) -> "BadRowError":
        """One error that names every wrong field."""
        return cls("; ".join(f"{problem.path}: {problem.msg}" for problem in problems), detail=problems)


class UnknownNameError(BadRowError):
    @classmethod
    def among(cls, what: str, name: str, known: Iterable[str], loc: tuple[str | int, ...]) -> "UnknownNameError":
        """`name` is no configured `what`; the message gives the known names and the nearest."""
        message = unknown_name(what, name, known)
        return cls(message, detail=[FieldProblem(loc, message, "unknown_name")])


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """The sentence for a name that is not configured."""
    names = sorted(known)
    near = get_close_matches(name, names, n=1)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return f"There is no {what} '{name}'.{hint} Known: {', '.join(names) or 'none'}."


class ConflictError(PaddockError):
    kind = FailureKind.CONFLICT
    status = 409


class UnauthorizedError(PaddockError):
    kind = FailureKind.UNAUTHORIZED
    status = 401


class ForbiddenError(UnauthorizedError):
    status = 403


class NotFoundError(PaddockError):
    kind = FailureKind.NOT_FOUND
    status = 404


class TooLargeError(PaddockError):
    kind = FailureKind.BAD_ROW
    status = 413


class OverloadedError(PaddockError):
    kind = FailureKind.OVERLOADED
    status = 429
    terminal = False


class DrainingError(PaddockError):
    kind = FailureKind.SHUTDOWN
    status = 503
    terminal = False


class StoreUnavailableError(PaddockError):
    kind = FailureKind.PERSISTENCE_FAILED
    status = 503
    terminal = False


class SessionLostError(PaddockError):
    kind = FailureKind.SESSION_LOST
    status = 410
    terminal = False


class DeadlineError(PaddockError):
    kind = FailureKind.DEADLINE
    status = 504
    terminal = False


class CancelledEpisodeError(PaddockError):
    kind = FailureKind.CANCELLED
    status = 499
    terminal = False


class ProtocolViolationError(PaddockError):
    kind = FailureKind.PROTOCOL_VIOLATION
    status = 502


class AgentRunError(PaddockError):
    kind = FailureKind.AGENT_RUN_ERROR
    status = 502
    terminal = False


class CleanupUnprovenError(PaddockError):
    kind = FailureKind.CLEANUP_UNPROVEN
    status = 502
    terminal = False


class VerifierError(PaddockError):
    kind = FailureKind.VERIFIER_ERROR


class JudgeError(VerifierError):
    kind = FailureKind.JUDGE_FAILED
    status = 502
    terminal = False


class ProviderError(PaddockError):
    """What a command in a sandbox did is never one of these: they tell of the sandbox and of who provides it."""

    kind = FailureKind.PROVIDER_UNAVAILABLE
    status = 503
    terminal = False


class ProviderQuotaError(ProviderError):
    kind = FailureKind.PROVIDER_QUOTA_EXHAUSTED


class ProviderLostError(ProviderError):
    kind = FailureKind.PROVIDER_LOST
    status = 502


class ProviderOomError(ProviderLostError):
    kind = FailureKind.PROVIDER_OOM_KILLED


class ExitUnknownError(ProviderLostError):
    """A command's end was not told: it may have succeeded or failed."""


class SandboxRefusedError(ProviderError):
    """The provider or the image cannot give what was asked for; the message names the trait."""

    status = 422
    terminal = True


class CommandNotStartedError(ProviderError):
    """`reason`: `command_missing`, `not_executable`, `cwd_missing` or `no_processes`."""

    status = 502
    terminal = True

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class SandboxFileError(ProviderError):
    status = 502
    terminal = True


class TransportError(PaddockError):
    """A peer could not be reached, dropped the connection, or did not answer in time.

    `sent` tells whether the peer may have received the request: only an unsent one may be repeated
    without an idempotency key.
    """

    kind = FailureKind.TRANSPORT_UNREACHABLE
    status = 502
    terminal = False

    def __init__(self, message: str, *, kind: FailureKind, service: str, sent: bool) -> None:
        super().__init__(message, origin=Origin(service=service))
        self.kind = kind
        self.sent = sent
        if kind is FailureKind.TRANSPORT_TIMEOUT:
            self.status = 504


class ServiceError(PaddockError):
    """Another service answered with an error; kind, status and terminal flag are the peer's.

    `in_mesh_form` is false where the body was not of our form: from behind the peer, or from a foreign one.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: FailureKind,
        status: int,
        terminal: bool,
        origin: Origin | None,
        stage: Stage | None = None,
        detail: Sequence[FieldProblem] = (),
        retry_after_s: float | None = None,
        in_mesh_form: bool = False,
    ) -> None:
        super().__init__(message, stage=stage, origin=origin, detail=detail, retry_after_s=retry_after_s)
        self.kind = kind
        self.status = status
        self.terminal = terminal
        self.in_mesh_form = in_mesh_form


class VersionConflictError(ConflictError):
    """A compare-and-set met another version than it expected: read again and decide anew."""


class FencedError(ConflictError):
    """The caller's lease is no longer the newest: it may not write."""


@dataclass(frozen=True, slots=True)
class ConfigurationProblem:
    """One thing wrong with the configuration: the file or variable, the key in it, and a sentence."""

    source: str
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.source}: {self.key}: {self.message}" if self.key else f"{self.source}: {self.message}"


class ConfigurationError(Exception):
    """All problems of a configuration at once."""

    def __init__(self, problems: Sequence[ConfigurationProblem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)
