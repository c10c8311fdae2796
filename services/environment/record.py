"""An episode's record in the store: what any replica needs to join, replay, cancel or take over the episode."""

from dataclasses import dataclass, replace
from typing import Final, Literal

import orjson

from shared.contracts.failure import Stage

SCHEMA: Final = 2

State = Literal["queued", "running", "done", "refused"]


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """`refused` holds an error answer that stands for a short while only: the episode may be sent again.

    `owner` names who runs it, anew for each takeover; `takeovers` counts these. Times are Unix seconds:
    `started_at` of the request, `admitted_at` of the episode's own time (0 while it is queued). `body` is the
    journal of an episode that runs, and the answer, given with `http_status`, of one that has ended.
    """

    key: str
    content_hash: str
    environment: str
    state: State
    stage: Stage
    owner: str
    agent_session_id: str
    resources_session_id: str
    started_at: float
    admitted_at: float = 0.0
    takeovers: int = 0
    trace: str = ""
    http_status: int = 200
    retry_after_s: int | None = None
    body: bytes = b""

    @property
    def ended(self) -> bool:
        return self.state in {"done", "refused"}

    def at(self, stage: Stage, journal: bytes, *, now: float) -> "EpisodeRecord":
        """The record of an episode that runs in `stage`."""
        return replace(self, state="running", stage=stage, admitted_at=self.admitted_at or now, body=journal)

    def taken_over_by(self, owner: str) -> "EpisodeRecord":
        return replace(self, owner=owner, takeovers=self.takeovers + 1)

    def encoded(self) -> bytes:
        head = {name: getattr(self, name) for name in _HEAD}
        return orjson.dumps({"schema": SCHEMA, **head}) + b"\n" + self.body


_HEAD = tuple(name for name in EpisodeRecord.__slots__ if name != "body")


def decoded(value: bytes) -> EpisodeRecord:
    """The record of stored bytes.

    Raises:
        ValueError: it was written in a schema that this version does not know.
    """
    head, _, body = value.partition(b"\n")
    fields = orjson.loads(head)
    schema = fields.pop("schema")
    if schema != SCHEMA:
        raise ValueError(f"an episode record has schema {schema}, this version reads {SCHEMA}")
    return EpisodeRecord(**{**fields, "stage": Stage(fields["stage"])}, body=body)


def status_body(record: EpisodeRecord) -> bytes:
    """What is told of an episode that has not ended."""
    return orjson.dumps(
        {"key": record.key, "environment": record.environment, "state": record.state, "stage": record.stage}
    )
