"""Grade a response: once per session, bounded in time, the verdict stored and replayed byte for byte.

A verification claims its session in the record. Calls that meet it wait: in this process for its task,
elsewhere for the record to change. A claim whose record stands still for that long belongs to a process
that died, and whoever waited takes it over; no clocks are compared. Nothing but a verifier's own verdict is
a reward: whatever it raises is a failure, and a judge that fails masks the sample.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson
from pydantic import BaseModel, ValidationError

from services.resources.claims import BEATS_PER_CLAIM, Claim
from services.resources.entries import Entry
from services.resources.records import SessionRecord
from services.resources.sessions import Found, Sessions, reopened, require_owner
from shared.contracts.failure import REASON_MAX_CHARS, FailureKind, Stage
from shared.contracts.resources import Verdict, VerifyRequest
from shared.errors import (
    BadRowError,
    FieldProblem,
    JudgeError,
    PaddockError,
    SessionLostError,
    VerifierError,
    VersionConflictError,
)
from shared.http.problems import bad_row
from shared.metrics import VerificationOutcome
from shared.ports.verifier import Answer, Judge, ToolCallRecord
from shared.redaction import redact
from shared.telemetry import current_key
from shared.tracing import span

_log = logging.getLogger(__name__)

# A store that is away would hold up the end of the process; what is not written is found to stand still.
_CLOSE_WITHIN_S: Final = 1.0

JudgeOf = Callable[[Entry, str], Judge | None]


@dataclass(frozen=True, slots=True)
class Submission:
    """A verify body, parsed once."""

    params: dict[str, Any]
    response: dict[str, Any]
    task_fields: dict[str, Any]


def read_submission(body: bytes) -> Submission:
    """The parts of a flat verify body.

    Raises:
        BadRowError: it is not JSON, or lacks a part.
    """
    try:
        request = VerifyRequest.model_validate(orjson.loads(body))
    except orjson.JSONDecodeError as error:
        raise BadRowError.of([FieldProblem(("body",), f"is not JSON: {error}", "json_invalid")]) from error
    except ValidationError as error:
        raise bad_row(error) from error
    return Submission(request.responses_create_params, request.response, request.model_extra or {})


class Verification:
    """Runs verifications in this process; at most one per session in all processes."""

    def __init__(self, sessions: Sessions, judge_of: JudgeOf, *, claim_ttl_s: float) -> None:
        self._sessions = sessions
        self._judge_of = judge_of
        self._claim_ttl_s = claim_ttl_s
        self._running: dict[str, asyncio.Task[bytes]] = {}

    async def verify(self, entry: Entry, session_id: str | None, submission: Submission) -> bytes:
        """The verdict as JSON.

        Raises:
            SessionLostError: there is no live session and the verdict needs one.
            BadRowError: the body's task fields differ from the seeded ones, or do not fit the verifier.
            VerifierError: the verifier failed or took too long.
        """
        try:
            found = await self._live(entry, session_id)
        except SessionLostError:
            if entry.needs_session:
                raise
            return await self._stateless(entry, submission)
        while True:
            if (verdict := _settled(entry, found)) is not None:
                return verdict
            require_same_task(found.record, submission)
            running = self._running.get(found.session_id)
            if running is None and found.record.state == "verifying":
                found = await self._after_another(entry, found)
                continue
            try:
                return await _joined(running or self._start(found.session_id, self._graded(entry, found, submission)))
            except VersionConflictError:
                found = await self._sessions.find(found.session_id, fresh=True)

    async def _live(self, entry: Entry, session_id: str | None) -> Found:
        if session_id is None:
            raise SessionLostError(f"The entry '{entry.name}' grades within a session, and this request names none.")
        return await self._sessions.find(session_id)

    async def _after_another(self, entry: Entry, found: Found) -> Found:
        """The session once another process's verification has moved on; its claim is dropped when it has died."""
        later = await self._sessions.wait_for_change(found, self._claim_ttl_s)
        if later.version != found.version:
            return later
        try:
            freed = await self._sessions.change(entry, later, reopened(later.record))
        except VersionConflictError:
            return await self._sessions.find(found.session_id, fresh=True)
        self._sessions.metrics.taken_over.labels("resources").inc()
        return freed

    def _start(self, session_id: str, work: Coroutine[Any, Any, bytes]) -> asyncio.Task[bytes]:
        task = asyncio.create_task(work, name=f"verify {session_id}")
        self._running[session_id] = task
        task.add_done_callback(lambda done: self._ended(session_id, done))
        return task

    def _ended(self, session_id: str, task: asyncio.Task[bytes]) -> None:
        if self._running.get(session_id) is task:
            del self._running[session_id]
        if not task.cancelled():
            # Whoever waits gets it; asked for here so that it is not reported as unseen when nobody does.
            task.exception()

    def stop(self, session_id: str) -> None:
        """End the session's verification in this process, if one runs: it is being closed."""
        if (task := self._running.get(session_id)) is not None:
            task.cancel()

    async def close(self) -> None:
        """End all verifications of this process; their claims are taken over by whoever asks next."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=_CLOSE_WITHIN_S)

    async def _graded(self, entry: Entry, found: Found, submission: Submission) -> bytes:
        """Claim, grade, store."""
        claimed = replace(found.record, state="verifying", claim=secrets.token_hex(8))
        held = Claim(self._sessions, entry, await self._sessions.change(entry, found, claimed))
        record = found.record
        answer = Answer(
            submission.params,
            submission.response,
            tuple(ToolCallRecord(**call) for call in record.calls),
            record.tools,
        )
        held.keep_alive(self._claim_ttl_s / BEATS_PER_CLAIM)
        try:
            _require_working_tools(record)
            verdict = await self._ask(entry, _task(entry, record.task_data, ("task_data",)), answer, record.key)
        except BaseException:
            await held.put(reopened)
            raise
        await held.put(lambda current: replace(reopened(current), verdict=verdict))
        _log.info("graded", extra={"entry": entry.name, "key": record.key, "reward": verdict["reward"]})
        return orjson.dumps(verdict)

    async def _stateless(self, entry: Entry, submission: Submission) -> bytes:
        task = _task(entry, submission.task_fields, ())
        answer = Answer(submission.params, submission.response)
        key = current_key.get() or f"verify-{secrets.token_hex(8)}"
        return orjson.dumps(await self._ask(entry, task, answer, key))

    async def _ask(self, entry: Entry, task: BaseModel, answer: Answer, key: str) -> dict[str, Any]:
        metrics = self._sessions.metrics
        under_way = metrics.running.labels("verifications")
        outcome: VerificationOutcome = "failed"
        under_way.inc()
        try:
            with span(f"verify {entry.name}") as step:
                verdict = await self._verdict(entry, task, answer, key)
                outcome = "masked" if verdict["mask_sample"] else "graded"
                step.set("paddock.reward", verdict["reward"])
                return verdict
        finally:
            under_way.dec()
            metrics.verifications.labels(entry.name, outcome).inc()

    async def _verdict(self, entry: Entry, task: BaseModel, answer: Answer, key: str) -> dict[str, Any]:
        """The verifier's verdict as it is stored and sent.

        Raises:
            VerifierError: it failed or took too long.
        """
        limit_s = entry.settings.verify_timeout_s
        name = entry.settings.verifier
        bound = asyncio.timeout(limit_s)
        try:
            async with bound:
                return _as_fields(await entry.verifier.verify(task, answer, self._judge_of(entry, key)))
        except JudgeError as error:
            return _as_fields(
                Verdict(
                    reward=0.0,
                    mask_sample=True,
                    failure_kind=FailureKind.JUDGE_FAILED,
                    failure_reason=redact(error.message),
                )
            )
        except PaddockError as error:
            error.stage = error.stage or Stage.VERIFICATION
            raise
        except Exception as error:
            if bound.expired():
                raise _retryable(VerifierError(f"The verifier '{name}' took longer than {limit_s:g} s.")) from error
            _log.warning("verifier failed", exc_info=error, extra={"entry": entry.name, "key": key})
            raise VerifierError(
                f"The verifier '{name}' failed: {type(error).__name__}: {redact(str(error))[:REASON_MAX_CHARS]}",
                stage=Stage.VERIFICATION,
            ) from error


def _settled(entry: Entry, found: Found) -> bytes | None:
    """The stored verdict, if there is one.

    Raises:
        ConflictError: the session belongs to another entry.
        SessionLostError: it was closed without a verdict.
    """
    require_owner(found, entry)
    if found.record.verdict is not None:
        return orjson.dumps(found.record.verdict)
    if found.record.state == "closed":
        raise SessionLostError(f"The resources session '{found.session_id}' was closed before it was graded.")
    return None


async def _joined(running: asyncio.Task[bytes]) -> bytes:
    """The task's outcome; a caller that leaves does not end it for the others."""
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if running.cancelled():
            raise SessionLostError("The resources session was closed while it was graded.") from None
        raise


def require_same_task(record: SessionRecord, submission: Submission) -> None:
    """The seeded task data is what counts; the body may repeat it but not change it.

    Raises:
        BadRowError: naming each field that differs.
    """
    seeded: Mapping[str, Any] = record.task_data
    different = [name for name, value in submission.task_fields.items() if name in seeded and seeded[name] != value]
    if different:
        raise BadRowError.of(
            [FieldProblem((name,), "differs from what the session was seeded with", "differs") for name in different]
        )


def _require_working_tools(record: SessionRecord) -> None:
    if record.broken is not None:
        raise _retryable(VerifierError(f"A tool of this session failed by its own fault: {record.broken}"))


def _task(entry: Entry, fields: dict[str, Any], prefix: tuple[str, ...]) -> BaseModel:
    try:
        return entry.verifier.task_data.model_validate(fields)
    except ValidationError as error:
        raise bad_row(error, prefix) from error


def _retryable(error: VerifierError) -> VerifierError:
    error.terminal = False
    error.stage = Stage.VERIFICATION
    return error


_OPTIONAL: Final = ("reward_components", "failure_kind", "failure_reason")


def _as_fields(verdict: Verdict) -> dict[str, Any]:
    """A verdict as JSON values; our own optional fields are left out, a verifier's own stay, null or not.

    Raises:
        TypeError: a field is not JSON.
    """
    fields = verdict.model_dump(mode="json")
    kept = {name: value for name, value in fields.items() if value is not None or name not in _OPTIONAL}
    loaded: dict[str, Any] = orjson.loads(orjson.dumps(kept))
    return loaded
