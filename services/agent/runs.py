"""One activation in this process: the harness's task, the claim on its record, and how it ends.

Everything that outlives the process is in the record; this holds only the task and who waits for it.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from typing import Any, Final

from services.agent.hosting import Agent, Host
from services.agent.record import AgentSession, Answer, RunEnd, State
from services.agent.records import Found, Records
from services.agent.response import build_response, interrupted_response
from shared.clients.model_proxy import model_base_url
from shared.contracts.failure import FailureKind, Stage
from shared.errors import (
    ConflictError,
    DeadlineError,
    FencedError,
    PaddockError,
    SessionLostError,
    StoreUnavailableError,
    VersionConflictError,
)
from shared.http.problems import render
from shared.ports.harness import Activation, HarnessEnd, ModelAccess, Progress
from shared.ports.store import Lease
from shared.redaction import redact
from shared.telemetry import current_key
from shared.tokens import SessionClaims
from shared.tracing import span, trace_text

_log = logging.getLogger(__name__)

# A run that ends sooner needs neither a watch nor a renewed claim.
WATCH_AFTER_S: Final = 1.0
STORE_PAUSE_S: Final = 1.0
STORE_TRIES: Final = 30
# The token outlives the session a little, so that a call at the deadline ends as one; the seal ends it for good.
TOKEN_GRACE_S: Final = 60.0
INTERRUPTED_GAP: Final = "agent_activation_interrupted"


class Stop(StrEnum):
    """Why a run is ended from outside; the sentence that its waiting callers get."""

    CLOSED = "The agent session was closed while its activation ran."
    SHUTDOWN = "The agent server that ran the harness shut down; try the row again."
    LOST = "Another replica took this agent session over while its activation ran; try the row again."


class Run:
    """`answered` becomes the answer, or None when the run could not be claimed: look at the record again."""

    def __init__(self, host: Host, agent: Agent, records: Records, found: Found, request: dict[str, Any]) -> None:
        self.found = found
        self.answered: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        self._host = host
        self._agent = agent
        self._records = records
        self._request = request
        self._progress = Progress()
        self._lease: Lease | None = None
        self._stop: Stop | None = None
        self._running = False
        self._ended_as = "error"
        self._watcher: asyncio.Task[None] | None = None
        self.task = asyncio.create_task(self._whole())

    @property
    def session(self) -> AgentSession:
        return self.found.session

    def stop(self, why: Stop) -> None:
        """End the harness; does nothing when it has ended."""
        self._stop = self._stop or why
        if self._running:
            self._running = False
            self.task.cancel()

    async def _whole(self) -> None:
        current_key.set(self.session.key)
        answer: Answer | None = error_answer(PaddockError("The activation ended without an answer."))
        try:
            answer = await self._claimed_and_settled()
        except PaddockError as error:
            answer = error_answer(error)
        finally:
            if self._watcher is not None:
                self._watcher.cancel()
            if not self.answered.done():
                self.answered.set_result(answer)

    async def _claimed_and_settled(self) -> Answer | None:
        if not await self._claim():
            return None
        watch_after_s = min(WATCH_AFTER_S, self._records.renew_s)
        timer = asyncio.get_running_loop().call_later(watch_after_s, self._start_watch)
        try:
            with self._measured(), span(f"activation {self._agent.name}") as step:
                answer = await self._settle(await self._execute())
                step.set("paddock.end", self._ended_as)
                return answer
        finally:
            timer.cancel()

    @contextmanager
    def _measured(self) -> Iterator[None]:
        metrics, name, began = self._host.metrics, self._agent.name, time.perf_counter()
        under_way, held = metrics.running.labels("activations"), metrics.leases_held.labels("agent")
        under_way.inc()
        held.inc()
        try:
            yield
        finally:
            under_way.dec()
            held.dec()
            metrics.activation_seconds.labels(name).observe(time.perf_counter() - began)

    async def _claim(self) -> bool:
        self._lease = await self._records.claim(self.session.session_id, self._host.new_owner())
        if self._lease is None:
            return False
        try:
            self.found = await self._records.change(self.found, self.session, lease=self._lease)
        except (VersionConflictError, FencedError):
            await self._host.store.release(self._lease)
            return False
        self._records.count(self.session)
        return True

    async def _execute(self) -> RunEnd:
        try:
            self._running = self._stop is None
            if not self._running:
                return self._interrupted()
            end = await self._bounded()
        except asyncio.CancelledError:
            if self._stop is None:
                raise
            self.task.uncancel()
            return self._interrupted()
        except PaddockError as error:
            return self._failed(error)
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything; it becomes one error of ours
            _log.warning("harness failed", exc_info=error, extra={"agent": self._agent.name})
            wrong = PaddockError(f"The harness of agent '{self._agent.name}' failed: {told(error)}")
            wrong.kind = FailureKind.AGENT_RUN_ERROR
            return self._failed(wrong)
        finally:
            self._running = False
        if self._stop is not None:
            return self._interrupted()
        body = build_response(
            self._request, self._progress, end, model=self._agent.entry.model, created_at=self._host.clock()
        )
        self._ended_as = end.status
        return self._end(Answer(200, body))

    async def _bounded(self) -> HarnessEnd:
        left_s = self.session.expires_at - self._host.clock()
        try:
            async with asyncio.timeout(left_s) as limit:
                async with self._agent.places:
                    return await self._agent.harness.run(self._activation())
        except TimeoutError as error:
            if limit.expired():
                raise DeadlineError("The agent session's deadline passed while the harness ran.") from error
            raise

    def _activation(self) -> Activation:
        session, model = self.session, self._agent.entry.model
        claims = SessionClaims(
            key=session.key,
            model=model,
            session=session.session_id,
            expires_at=session.expires_at + TOKEN_GRACE_S,
            max_calls=self._agent.entry.max_model_calls,
            max_output_tokens=self._agent.entry.max_model_output_tokens,
            trace=trace_text(),
        )
        access = ModelAccess(model_base_url(self._host.proxy_url), self._host.tokens.session_token(claims), model)
        return Activation(session.key, self._request, session.seed_request().tool_accesses, access, self._progress)

    def _interrupted(self) -> RunEnd:
        why = self._stop or Stop.CLOSED
        error: PaddockError = ConflictError(why.value) if why is Stop.CLOSED else SessionLostError(why.value)
        end = self._failed(error)
        self._ended_as = why.name.lower()
        return replace(end, error=None if why is Stop.CLOSED else why.value, gaps=(INTERRUPTED_GAP,))

    def _failed(self, error: PaddockError) -> RunEnd:
        error.stage = error.stage or Stage.AGENT
        partial = interrupted_response(
            self._request, self._progress, model=self._agent.entry.model, created_at=self._host.clock()
        )
        timed_out = isinstance(error, DeadlineError)
        self._ended_as = "deadline" if timed_out else "error"
        return replace(self._end(error_answer(error)), partial=partial, error=error.message, timed_out=timed_out)

    def _end(self, answer: Answer) -> RunEnd:
        return RunEnd(answer, self._progress.tool_observations, self._progress.resources_cookies)

    async def _settle(self, end: RunEnd) -> Answer:
        """Write how it ended, whatever happens to the store meanwhile.

        Raises:
            SessionLostError: another replica has decided about the session.
            StoreUnavailableError: the store stayed away.
        """
        for tries_left in range(STORE_TRIES, -1, -1):
            try:
                self.found = await self._records.change(self.found, replace(self.session, end=end), lease=self._lease)
            except VersionConflictError:
                end = await self._closed_meanwhile(end)
            except FencedError:
                await self._reclaim()
            except StoreUnavailableError:
                if not tries_left:
                    raise
                await asyncio.sleep(STORE_PAUSE_S)
            else:
                self._records.remember(self.found)
                self._host.metrics.activations.labels(self._agent.name, self._ended_as).inc()
                return end.answer
        raise SessionLostError(Stop.LOST.value)

    async def _closed_meanwhile(self, end: RunEnd) -> RunEnd:
        """A close came in between: what has ended is its partial response, and callers get its conflict."""
        found = await self._records.read(self.session.session_id)
        if found is None or found.session.state is not State.STOPPING or found.session.end is not None:
            raise SessionLostError(Stop.LOST.value)
        self.found = found
        if end.answer.status == 200:
            self._ended_as = "closed"
            answer = error_answer(ConflictError(Stop.CLOSED.value, stage=Stage.AGENT))
            return replace(end, answer=answer, partial=end.answer.body, gaps=(INTERRUPTED_GAP,))
        return end

    async def _reclaim(self) -> None:
        """The claim ran out, perhaps unnoticed by others; the record's version tells whether anything changed."""
        self._lease = await self._records.claim(self.session.session_id, self._host.new_owner())
        if self._lease is None:
            raise SessionLostError(Stop.LOST.value)

    def _start_watch(self) -> None:
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Keep the claim alive and see whether another replica stops the session."""
        while self._lease is not None:
            try:
                now = await self._records.wait_for_change(self.found, timeout_s=self._records.renew_s)
                if now is None or now.version != self.found.version:
                    closed = now is not None and now.session.state is State.STOPPING
                    self.stop(Stop.CLOSED if closed else Stop.LOST)
                    return
                await self._renew(self._lease)
            except SessionLostError:
                self._host.metrics.leases_lost.labels("agent").inc()
                self.stop(Stop.LOST)
            except StoreUnavailableError:
                self._host.metrics.lease_renew_failures.labels("agent").inc()
                await asyncio.sleep(min(STORE_PAUSE_S, self._records.renew_s))

    async def _renew(self, lease: Lease) -> None:
        try:
            await self._host.store.renew(lease, ttl_s=self._records.lease_s)
        except FencedError:
            await self._reclaim()


def error_answer(error: PaddockError) -> Answer:
    problem = render(error)
    return Answer(problem.status, problem.body, problem.headers.get("retry-after"))


def told(error: Exception) -> str:
    """A foreign error in words, without what looks like a credential."""
    return f"{type(error).__name__}: {redact(str(error))}" if str(error) else type(error).__name__
