"""Prepared rows, native and flat, read into one form. What does not fit is refused with its field path."""

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

import orjson
from pydantic import TypeAdapter, ValidationError

from shared.contracts.episode import EpisodeId, FlatRow, NativeRequest, RolloutId, TaskId
from shared.errors import BadRowError, FieldProblem, UnknownNameError
from shared.http.problems import bad_row
from shared.settings import EnvironmentSettings, Settings

_log = logging.getLogger(__name__)

BOOKKEEPING_PREFIX: Final = "_ng_"
# Fields of an answer: a row that carries one was answered before, or would be confused with an answer.
ANSWER_FIELDS: Final = frozenset({"response", "reward", "mask_sample"})
_LONG_NUMBER: Final = re.compile(rb"\d{19}")
_ROLLOUT_ID: Final[TypeAdapter[str]] = TypeAdapter(RolloutId)


@dataclass(frozen=True, slots=True)
class Row:
    """One attempt at one row. `params` are the request fields that the row sets; `task_data` is private."""

    episode_id: EpisodeId
    task_id: TaskId
    environment: str
    params: dict[str, Any]
    task_data: dict[str, Any]
    agent_timeout_s: float | None
    flat: bool
    agent_ref: dict[str, Any] | None

    @property
    def content_hash(self) -> str:
        """What makes two requests for one episode the same: everything but the episode's id."""
        content = [
            self.task_id.model_dump(), self.environment, self.params, self.task_data, self.agent_timeout_s, self.flat
        ]  # fmt: skip
        return _hash_of(content)

    def encoded(self) -> bytes:
        """The row for another server of the mesh, in the order of keys in which it came."""
        ids = {"episode_id": self.episode_id.model_dump(), "task_id": self.task_id.model_dump()}
        return orjson.dumps({**{name: getattr(self, name) for name in _PLAIN}, **ids})

    @classmethod
    def decoded(cls, value: bytes) -> "Row":
        fields = orjson.loads(value)
        ids = {
            "episode_id": EpisodeId.model_validate(fields["episode_id"]),
            "task_id": TaskId.model_validate(fields["task_id"]),
        }
        return cls(**{**fields, **ids})

    def located(self, problems: Sequence[FieldProblem]) -> BadRowError:
        """Problems with the task data, with their paths in the row as it was sent."""
        prefix: tuple[str, ...] = () if self.flat else ("task", "task_input", "task_data")
        return BadRowError.of(
            [
                FieldProblem(
                    (*prefix, *item.loc[1:]) if item.loc[:1] == ("task_data",) else item.loc, item.msg, item.type
                )
                for item in problems
            ]
        )


_PLAIN: Final = tuple(name for name in Row.__slots__ if name not in {"episode_id", "task_id"})


def read_row(body: bytes, settings: Settings, *, idempotency_key: str | None = None) -> Row:
    """Read one row. `idempotency_key` becomes the rollout id of a flat row that has no ids.

    Raises:
        BadRowError: the row does not fit; every wrong field is named.
        UnknownNameError: the environment is not configured.
    """
    try:
        raw = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRowError.of([FieldProblem(("body",), f"not valid JSON: {error}", "json_invalid")]) from error
    if _LONG_NUMBER.search(body):
        _refuse_long_integers(json.loads(body))
    if not isinstance(raw, dict):
        raise BadRowError.of([FieldProblem(("body",), "a row is a JSON object", "dict_type")])
    try:
        if "episode_id" in raw and "task" in raw:
            return _native(raw, NativeRequest.model_validate(raw), settings)
        return _flat(raw, FlatRow.model_validate(raw), settings, idempotency_key)
    except ValidationError as error:
        raise bad_row(error) from error


def _refuse_long_integers(value: Any, loc: tuple[str | int, ...] = ()) -> None:
    """An integer beyond 64 bits would arrive as a rounded one, and an answer would be graded against that."""
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise BadRowError.of([FieldProblem(loc, "integers beyond 64 bits must be written as strings", "int_too_long")])
    if isinstance(value, dict | list):
        for key, below in value.items() if isinstance(value, dict) else enumerate(value):
            _refuse_long_integers(below, (*loc, key))


def _native(raw: dict[str, Any], request: NativeRequest, settings: Settings) -> Row:
    name = _environment_named(request.environment, None, settings)
    task_input = request.task.task_input
    return Row(
        episode_id=request.episode_id,
        task_id=request.task.task_id,
        environment=name,
        params=raw["task"]["task_input"]["responses_create_params"],
        task_data=_without_answers(task_input.merged_task_data(), ("task", "task_input", "task_data")),
        agent_timeout_s=task_input.agent_timeout_s,
        flat=False,
        agent_ref=None,
    )


def _flat(raw: dict[str, Any], row: FlatRow, settings: Settings, idempotency_key: str | None) -> Row:
    name = _environment_named(row.environment, row.agent_ref, settings)
    entry = settings.environments[name]
    if row.task_source is not None and row.task_source not in {name, entry.resources, entry.agent}:
        raise UnknownNameError.among(
            "task source of this environment", row.task_source, {name, entry.resources, entry.agent}, ("task_source",)
        )
    fields = row.model_extra or {}
    notes = {key: value for key, value in fields.items() if key.startswith(BOOKKEEPING_PREFIX)}
    task_data = {key: value for key, value in fields.items() if key not in notes}
    return Row(
        episode_id=row.episode_id or _episode_id(notes, idempotency_key),
        task_id=TaskId(taskset=entry.resources, task_id=_task_id(task_data, notes, raw)),
        environment=name,
        params=raw["responses_create_params"],
        task_data=_without_answers(task_data, ()),
        agent_timeout_s=row.agent_timeout_s,
        flat=True,
        agent_ref=row.agent_ref,
    )


def _environment_named(name: str | None, agent_ref: Mapping[str, Any] | None, settings: Settings) -> str:
    known = settings.environments
    agent = (agent_ref or {}).get("name")
    if name is not None:
        if name not in known:
            raise UnknownNameError.among("environment", name, known, ("environment",))
        _check_agent(agent, name, known[name], settings)
        return name
    if len(known) == 1:
        only = next(iter(known))
        _check_agent(agent, only, known[only], settings)
        return only
    bound = [key for key, entry in known.items() if entry.agent == agent]
    if len(bound) == 1:
        return bound[0]
    which = (
        "Several environments are configured" if agent is None else f"The agent '{agent}' selects no single environment"
    )
    names = ", ".join(sorted(known)) or "none"
    message = f"{which}, so the row has to name its own, in its field 'environment'. Known: {names}."
    raise UnknownNameError(message, detail=[FieldProblem(("environment",), message, "missing")])


def _check_agent(agent: object, environment: str, entry: EnvironmentSettings, settings: Settings) -> None:
    """A configured agent other than the environment's contradicts the row; an unknown name says nothing here."""
    if agent is None or agent == entry.agent:
        return
    if agent in settings.agents:
        message = f"The environment '{environment}' binds the agent '{entry.agent}', not '{agent}'."
        raise BadRowError.of([FieldProblem(("agent_ref", "name"), message, "conflict")])
    _log.warning("agent_ref '%s' is not a configured agent; the environment '%s' was named", agent, environment)


def _episode_id(notes: Mapping[str, Any], idempotency_key: str | None) -> EpisodeId:
    """The row's own rollout id, else the idempotency key, else a fresh one.

    Task and rollout index alone make no identity: stored outcomes are replayed, and another data set
    counts from zero, too. They stay visible at the front of the fresh id.
    """
    given = notes.get("_ng_rollout_id", idempotency_key)
    if given is None:
        indexes = [str(notes[name]) for name in ("_ng_task_index", "_ng_rollout_index") if _is_count(notes.get(name))]
        given = "-".join([*indexes, uuid4().hex])
    where = "_ng_rollout_id" if "_ng_rollout_id" in notes else "Idempotency-Key"
    attempt = notes.get("_ng_attempt_index", 0)
    if not _is_count(attempt):
        raise BadRowError.of([FieldProblem(("_ng_attempt_index",), "an attempt is an integer from 0", "int_type")])
    try:
        return EpisodeId(rollout_id=_ROLLOUT_ID.validate_python(given), attempt=attempt)
    except ValidationError as error:
        raise bad_row(error, (where,)) from error


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _task_id(task_data: Mapping[str, Any], notes: Mapping[str, Any], raw: Mapping[str, Any]) -> str:
    """The task's own id, else its index, else a name made from its content."""
    for name in ("task_id", "problem_id", "instance_id"):
        value = task_data.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool) and str(value):
            return str(value)
    if _is_count(notes.get("_ng_task_index")):
        return str(notes["_ng_task_index"])
    return f"task-{_hash_of([raw['responses_create_params'], dict(task_data)])[:16]}"


def _hash_of(content: list[Any]) -> str:
    """The same for the same content, whatever the order of its keys."""
    try:
        return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()
    except TypeError as error:
        raise BadRowError.of([FieldProblem(("body",), f"it cannot be kept: {error}", "recursion")]) from error


def _without_answers(task_data: dict[str, Any], prefix: tuple[str, ...]) -> dict[str, Any]:
    found = [
        FieldProblem((*prefix, name), "a row may not carry a field of an answer", "reserved")
        for name in sorted(ANSWER_FIELDS & task_data.keys())
    ]
    if found:
        raise BadRowError.of(found)
    return task_data
