"""What the store holds of a resources session: one record under `resources:{session}`.

A record is never changed, only replaced. A closed one keeps its names and its verdict, so that a later
seed is refused and a late verify is replayed; task data and tool state are dropped.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import orjson

from shared.errors import SessionLostError

SCHEMA_VERSION: Final = 1

State = Literal["open", "verifying", "closed"]


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """`seeded` is false for an id that was closed before it was seeded.

    `tools` is each toolset's state by its name, `calls` every served call in order, `broken` what a tool
    failed with by its own fault. `claim` names the verification that runs and `beat` grows while it lives.
    """

    entry: str
    episode: dict[str, Any]
    task: dict[str, Any] | None = None
    state: State = "open"
    seeded: bool = True
    task_data: dict[str, Any] = field(default_factory=dict)
    tools: dict[str, dict[str, Any]] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)
    broken: str | None = None
    claim: str | None = None
    beat: int = 0
    verdict: dict[str, Any] | None = None
    schema_version: int = SCHEMA_VERSION

    @property
    def key(self) -> str:
        """The episode's key."""
        attempt = self.episode["attempt"]
        return f"{self.episode['rollout_id']}-a{attempt}" if attempt else str(self.episode["rollout_id"])

    def closed(self) -> "SessionRecord":
        return replace(self, state="closed", task_data={}, tools={}, calls=[], claim=None)

    def encode(self) -> bytes:
        return orjson.dumps(self)


def store_key(session_id: str) -> str:
    """The braces are part of the key: they keep what belongs to one session on one Redis node."""
    return f"resources:{{{session_id}}}"


def decode(value: bytes) -> SessionRecord:
    """The record in these bytes.

    Raises:
        SessionLostError: another release wrote it in a form that this one does not read.
    """
    fields = orjson.loads(value)
    if fields.get("schema_version") != SCHEMA_VERSION:
        raise SessionLostError("This resources session was written by another release and cannot be read by this one.")
    return SessionRecord(**fields)
