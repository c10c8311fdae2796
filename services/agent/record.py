"""What the store keeps of an agent session: one record, read from bytes and written to bytes.

JSON that came from elsewhere (the seed, the answer, the receipt) stays bytes here, so that a record is
written without reading them again.
"""

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import orjson

from shared.contracts.agent import SeedAgentRequest
from shared.errors import SessionLostError

SCHEMA: Final = 1


class State(StrEnum):
    """`seeding → ready → active → stopping → collected → closed`; every change is a compare-and-set.

    An activation that has ended stays `active`, with its end in the record, until the close.
    `setup_failed` waits for a close that cleans up; `fenced` was closed before it was seeded.
    """

    SEEDING = "seeding"
    READY = "ready"
    ACTIVE = "active"
    STOPPING = "stopping"
    COLLECTED = "collected"
    CLOSED = "closed"
    SETUP_FAILED = "setup_failed"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True)
class Answer:
    """What every caller of the activation is given: a response, or the same error again."""

    status: int
    body: bytes
    retry_after: str | None = None


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How the activation ended, and what the close needs to know of it.

    `partial` is the response that the run had come to when it was interrupted or failed.
    """

    answer: Answer
    tool_calls: list[dict[str, Any]]
    resources_cookies: dict[str, str]
    partial: bytes | None = None
    error: str | None = None
    timed_out: bool = False
    gaps: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentSession:
    """One record. `expires_at` is in Unix seconds: the session's deadline."""

    agent: str
    session_id: str
    key: str
    seed_hash: str
    expires_at: float
    state: State
    seed: bytes | None = None
    held: dict[str, Any] | None = None
    request_hash: str | None = None
    end: RunEnd | None = None
    observations: bytes | None = None
    receipt: bytes | None = None
    read_seed: SeedAgentRequest | None = None

    def seed_request(self) -> SeedAgentRequest:
        """The seed; `read_seed` is it where this process has read it already, and is not stored."""
        return self.read_seed or SeedAgentRequest.model_validate_json(self.seed or b"null")

    def to_bytes(self) -> bytes:
        return orjson.dumps(
            {
                "schema": SCHEMA,
                "agent": self.agent,
                "session_id": self.session_id,
                "key": self.key,
                "seed_hash": self.seed_hash,
                "expires_at": self.expires_at,
                "state": self.state,
                "seed": _fragment(self.seed),
                "held": self.held,
                "request_hash": self.request_hash,
                "end": None if self.end is None else _end_record(self.end),
                "observations": _fragment(self.observations),
                "receipt": _fragment(self.receipt),
            }
        )

    @classmethod
    def from_bytes(cls, value: bytes) -> "AgentSession":
        """Raises SessionLostError for a record of another schema: this build cannot continue the session."""
        record = orjson.loads(value)
        if record.get("schema") != SCHEMA:
            raise SessionLostError(
                f"The session's record has schema {record.get('schema')}, but this build reads only schema {SCHEMA}:"
                " let the replicas of the newer build finish it, or try the row again."
            )
        end = record["end"]
        return cls(
            agent=record["agent"],
            session_id=record["session_id"],
            key=record["key"],
            seed_hash=record["seed_hash"],
            expires_at=record["expires_at"],
            state=State(record["state"]),
            seed=_bytes(record["seed"]),
            held=record["held"],
            request_hash=record["request_hash"],
            end=None if end is None else _read_end(end),
            observations=_bytes(record["observations"]),
            receipt=_bytes(record["receipt"]),
        )


def record_key(session_id: str) -> str:
    """The record's key, also the name of the lease on it; the braces keep both in one slot of a cluster."""
    return f"agent:{{{session_id}}}"


def canonical_hash(value: Any) -> str:
    """The same for equal JSON values, whatever the order of their keys."""
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _end_record(end: RunEnd) -> dict[str, Any]:
    return {
        "status": end.answer.status,
        "body": orjson.Fragment(end.answer.body),
        "retry_after": end.answer.retry_after,
        "tool_calls": end.tool_calls,
        "resources_cookies": end.resources_cookies,
        "partial": _fragment(end.partial),
        "error": end.error,
        "timed_out": end.timed_out,
        "gaps": end.gaps,
    }


def _read_end(record: dict[str, Any]) -> RunEnd:
    return RunEnd(
        answer=Answer(record["status"], orjson.dumps(record["body"]), record["retry_after"]),
        tool_calls=record["tool_calls"],
        resources_cookies=record["resources_cookies"],
        partial=_bytes(record["partial"]),
        error=record["error"],
        timed_out=record["timed_out"],
        gaps=tuple(record["gaps"]),
    )


def _fragment(value: bytes | None) -> orjson.Fragment | None:
    return None if value is None else orjson.Fragment(value)


def _bytes(value: Any) -> bytes | None:
    return None if value is None else orjson.dumps(value)
