"""The stored form of an episode: a small head that changes with every stage, and the answer once there is one."""

from dataclasses import dataclass, replace
from typing import Final, Literal

import orjson

from shared.contracts.failure import Stage

SCHEMA: Final = 1

State = Literal["queued", "running", "done", "refused"]


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """`refused` holds an error answer that stands for a short while only: the episode may be sent again.

    `answer` are the bytes that whoever asks is given, with `http_status`. `started_at` is Unix seconds.
    """

    key: str
    content_hash: str
    environment: str
    state: State
    stage: Stage
    agent_session_id: str
    resources_session_id: str
    started_at: float
    http_status: int = 200
    retry_after_s: int | None = None
    answer: bytes = b""

    @property
    def ended(self) -> bool:
        return self.state in {"done", "refused"}

    def at(self, stage: Stage) -> "EpisodeRecord":
        return replace(self, state="running", stage=stage)

    def encoded(self) -> bytes:
        head = {name: getattr(self, name) for name in _HEAD}
        return orjson.dumps({"schema": SCHEMA, **head}) + b"\n" + self.answer


_HEAD = tuple(name for name in EpisodeRecord.__slots__ if name != "answer")


def decoded(value: bytes) -> EpisodeRecord:
    """The record of stored bytes.

    Raises:
        ValueError: it was written in a schema that this version does not know.
    """
    head, _, answer = value.partition(b"\n")
    fields = orjson.loads(head)
    schema = fields.pop("schema")
    if schema != SCHEMA:
        raise ValueError(f"an episode record has schema {schema}, this version reads {SCHEMA}")
    return EpisodeRecord(**{**fields, "stage": Stage(fields["stage"])}, answer=answer)


def status_body(record: EpisodeRecord) -> bytes:
    """What is told of an episode that has not ended."""
    return orjson.dumps(
        {"key": record.key, "environment": record.environment, "state": record.state, "stage": record.stage}
    )
