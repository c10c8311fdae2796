"""How an agent session ends: stop → seal the capture → collect → release → receipt.

Each step that is done is in the record, so that a close that failed goes on from there. The receipt is
written last; the record then lives exactly for the receipt window.
"""

import asyncio
import logging
from dataclasses import replace
from typing import Any, Final

import orjson

from services.agent.observations import not_run, observe
from services.agent.record import AgentSession, RunEnd, State
from services.agent.records import Found
from services.agent.runs import Stop, error_answer, told
from services.agent.sessions import Sessions, declare_lost, lost, require_same
from shared.contracts.agent import CloseAgentRequest
from shared.contracts.capture import of_session
from shared.contracts.failure import Stage
from shared.errors import CleanupUnprovenError, ConflictError, PaddockError, VersionConflictError
from shared.metrics import CloseOutcome
from shared.ports.harness import SettingUp
from shared.telemetry import current_key

_log = logging.getLogger(__name__)

# Of the close's time: how much the harness's task may take to end after it was cancelled.
STOP_SHARE: Final = 0.5


class Closing:
    """Closes the sessions of one configured agent; concurrent closes of one session share one task."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._records = sessions.records
        self._entry = sessions.agent.entry
        self._under_way: dict[tuple[str, str], asyncio.Task[bytes]] = {}

    async def close(self, request: CloseAgentRequest, named: str | None) -> bytes:
        """The receipt. An id that was never seen gets one, too, which fences the id.

        Raises:
            ConflictError: the episode or the cookie's session is another one.
            SessionLostError: the cookie's session is gone.
            CleanupUnprovenError: a step failed; the same request again goes on from it.
        """
        session_id, key = request.agent_session_id, request.episode_id.key
        if named is not None:
            require_same(named, session_id)
        task = self._under_way.get((session_id, key))
        if task is None:
            task = asyncio.create_task(self._bounded(request, known=named is not None))
            self._under_way[session_id, key] = task
            task.add_done_callback(lambda _: self._under_way.pop((session_id, key), None))
        return await asyncio.shield(task)

    async def _bounded(self, request: CloseAgentRequest, *, known: bool) -> bytes:
        session_id, limit_s = request.agent_session_id, self._entry.close_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    try:
                        return await self._closed(request, known)
                    except VersionConflictError:
                        # Someone else changed the record: look at what it says now.
                        self._records.forget(session_id)
        except TimeoutError as error:
            self._count("failed")
            raise CleanupUnprovenError(
                f"The agent session '{session_id}' did not close within {limit_s:g} s; close it again.",
                stage=Stage.CLEANUP,
            ) from error
        except CleanupUnprovenError:
            self._count("failed")
            raise

    def _count(self, outcome: CloseOutcome) -> None:
        self._sessions.host.metrics.agent_closes.labels(self._sessions.agent.name, outcome).inc()

    async def _closed(self, request: CloseAgentRequest, known: bool) -> bytes:
        session_id, key = request.agent_session_id, request.episode_id.key
        found = await self._records.read_or_recall(session_id)
        if found is None:
            if known:
                raise lost(session_id)
            return await self._fence(session_id, key)
        session = found.session
        if (session.agent, session.key) != (self._sessions.agent.name, key):
            raise ConflictError(f"The agent session '{session_id}' belongs to another episode or agent.")
        if session.receipt is not None:
            return session.receipt
        return await self._finish(await self._stopped(found), request.include_response)

    async def _fence(self, session_id: str, key: str) -> bytes:
        receipt = _receipt(session_id, "unknown", {"cleanup_confirmed": True})
        fence = AgentSession(
            agent=self._sessions.agent.name,
            session_id=session_id,
            key=key,
            seed_hash="",
            expires_at=0.0,
            state=State.FENCED,
            receipt=receipt,
        )
        if await self._records.create(fence, ttl_s=self._entry.receipt_window_s) is None:
            raise VersionConflictError("The session appeared while it was fenced.")
        self._count("unknown")
        return receipt

    async def _stopped(self, found: Found) -> Found:
        """The record once nothing of the session runs any more; whoever ran it has written how that ended."""
        state = found.session.state
        if state in {State.READY, State.SETUP_FAILED, State.COLLECTED} or found.session.end is not None:
            return found
        if state is not State.STOPPING:
            found = await self._records.change(found, replace(found.session, state=State.STOPPING))
        run = self._sessions.runs.get(found.session.session_id)
        if run is not None:
            run.stop(Stop.CLOSED)
            limit_s = STOP_SHARE * self._entry.close_timeout_s
            if not (await asyncio.wait((run.task,), timeout=limit_s))[0]:
                raise CleanupUnprovenError(
                    f"The harness did not stop within {limit_s:g} s; close the session again.", stage=Stage.CLEANUP
                )
        while found.session.end is None:
            now = await self._records.wait_for_change(
                found, timeout_s=0.0 if run is not None else self._records.renew_s
            )
            if now is not None and now.version == found.version:
                await declare_lost(self._sessions.host, self._records, now)
                now = await self._records.read(found.session.session_id)
            if now is None:
                raise lost(found.session.session_id)
            found, run = now, None
        return found

    async def _finish(self, found: Found, include_response: bool) -> bytes:
        session = found.session
        if session.observations is None:
            session = replace(session, observations=await self._observed(session))
        holding = self._sessions.agent.holding
        if holding is not None:
            found = await self._records.change(found, replace(session, state=State.COLLECTED))
            await self._released(holding, session)
        receipt = _receipt_of(session, include_response)
        closed = replace(
            session, state=State.CLOSED, receipt=receipt, seed=None, held=None, end=None, observations=None
        )
        await self._records.change(found, closed, ttl_s=self._entry.receipt_window_s)
        self._count("closed")
        current_key.set(session.key)
        _log.info("agent session closed", extra=_line(self._sessions.agent.name, session))
        return receipt

    async def _observed(self, session: AgentSession) -> bytes:
        """Seal first: from then on the session's token opens nothing. Without a run there is no token."""
        if session.request_hash is None or session.end is None:
            return not_run()
        try:
            capture = await self._sessions.host.proxy.seal(session.key, timeout_s=self._entry.close_timeout_s)
        except PaddockError as error:
            raise CleanupUnprovenError(
                f"The model calls of '{session.key}' could not be sealed: {error.message}",
                stage=Stage.CLEANUP,
                origin=error.origin,
            ) from error
        return observe(of_session(capture, session.session_id), session.end)

    async def _released(self, harness: SettingUp, session: AgentSession) -> None:
        try:
            await harness.teardown(session.seed_request(), session.held or {})
        except Exception as error:
            raise CleanupUnprovenError(
                f"What the agent session '{session.session_id}' holds could not be released: {told(error)}",
                stage=Stage.CLEANUP,
            ) from error


def _line(agent: str, session: AgentSession) -> dict[str, Any]:
    end = session.end
    return {"agent": agent, "activation": None if end is None else end.answer.status, "error": end and end.error}


def _receipt_of(session: AgentSession, include_response: bool) -> bytes:
    end = session.end or RunEnd(error_answer(ConflictError("Never activated.")), [], {})
    return _receipt(
        session.session_id,
        "closed",
        {"cleanup_confirmed": True, "return_code": None, "error": end.error, "timed_out": end.timed_out},
        agent_observations=_fragment(session.observations),
        resources_cookies=end.resources_cookies or None,
        # A run that ended by itself, perhaps in the very moment of the close, has its whole response.
        partial_response=_fragment(end.partial if end.partial is not None or not include_response else _answered(end)),
    )


def _answered(end: RunEnd) -> bytes | None:
    return end.answer.body if end.answer.status == 200 else None


def _receipt(session_id: str, status: str, cleanup: dict[str, Any], **fields: Any) -> bytes:
    return orjson.dumps({"agent_session_id": session_id, "status": status, **fields, "cleanup": cleanup})


def _fragment(value: bytes | None) -> orjson.Fragment | None:
    return None if value is None else orjson.Fragment(value)
