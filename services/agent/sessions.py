"""Agent sessions: seed and activate. How they end is in `closing.py`.

All state is the record in the store; this process holds only the runs that it started itself, so any
replica can join, replay, or close any session.
"""

import asyncio
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson
from pydantic import ValidationError

from services.agent.hosting import Agent, Host
from services.agent.record import AgentSession, Answer, RunEnd, State, canonical_hash
from services.agent.records import Found, Records
from services.agent.runs import INTERRUPTED_GAP, Run, Stop, error_answer
from services.agent.setup import Setup
from shared.contracts.agent import SeedAgentRequest
from shared.contracts.failure import Stage
from shared.contracts.responses import ResponsesCreateParams
from shared.errors import BadRowError, ConflictError, FieldProblem, SessionLostError, VersionConflictError
from shared.http.problems import bad_row
from shared.ports.harness import SettingUp

# A session without a deadline of its own lives this long; its token, too.
LONGEST_SESSION_S: Final = 86_400.0
BUSY_PAUSE_S: Final = 0.1
SHUTDOWN_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Request:
    """An activation as it came. `until` is resolved when its caller should be told to come again."""

    key: str | None
    body: bytes
    until: "asyncio.Future[None]"


class Sessions:
    """The sessions of one configured agent."""

    def __init__(self, host: Host, agent: Agent) -> None:
        self.agent = agent
        self.host = host
        self.records: Records = host.records()
        self.runs: dict[str, Run] = {}

    async def seed(self, request: SeedAgentRequest, raw: bytes, named: str | None) -> None:
        """Open a session, or join the same one; `named` is the session of the caller's cookie.

        Raises:
            ConflictError: the id is bound otherwise, closed, or closing.
            SessionLostError: the cookie's session is gone.
        """
        session_id = request.agent_session_id
        if named is not None:
            require_same(named, session_id)
            if await self.records.read(session_id) is None:
                raise lost(session_id)
        session = AgentSession(
            agent=self.agent.name,
            session_id=session_id,
            key=request.episode_id.key,
            # The time that is left differs by nature when a seed is repeated.
            seed_hash=canonical_hash(request.model_dump(mode="json", exclude={"deadline"})),
            expires_at=self.host.clock() + (request.deadline or LONGEST_SESSION_S),
            state=State.READY if self.agent.holding is None else State.SEEDING,
            seed=raw,
            read_seed=request,
        )
        found = await self.records.create(session)
        if found is None:
            await self._join_seed(session)
        elif self.agent.holding is None:
            self.records.remember(found)
        else:
            await self._setup(self.agent.holding).run(found)

    async def _join_seed(self, session: AgentSession) -> None:
        found = await self.records.read(session.session_id)
        while found is not None:
            there = found.session
            if there.state not in {State.SEEDING, State.READY, State.ACTIVE}:
                raise ConflictError(
                    f"The agent session '{there.session_id}' is {there.state.value}: its id is used up."
                )
            if (there.agent, there.seed_hash) != (session.agent, session.seed_hash):
                raise ConflictError(f"The agent session '{there.session_id}' is bound to another seed.")
            if there.state is not State.SEEDING:
                return
            found = await self._seeded(found)
        raise ConflictError(f"The setup of the agent session '{session.session_id}' failed; seed it again.")

    async def _seeded(self, found: Found) -> Found | None:
        """Wait for the setup of another caller; start it again when its process is gone."""
        now = await self.records.wait_for_change(found, timeout_s=self.records.renew_s)
        if now is None or now.version != found.version:
            return now
        if self.agent.holding is not None:
            await self._setup(self.agent.holding).take_over(now)
        return await self.records.read(found.session.session_id)

    def _setup(self, holding: SettingUp) -> Setup:
        return Setup(self.host, self.agent.name, holding, self.records)

    async def activate(self, session_id: str, request: Request) -> Answer | None:
        """Run the harness once; join or replay the identical request. None when `request.until` came first.

        Raises:
            ConflictError: the session is not open for it, is bound to another request, or another key.
            SessionLostError: there is no such session, or no longer.
            BadRowError: the request is not valid; the session stays ready.
        """
        value = _parsed(request.body)
        request_hash = canonical_hash(value)
        while not request.until.done():
            run = self.runs.get(session_id)
            if run is None:
                found = await self._open(session_id, request.key)
                run = self.runs.get(session_id)
            if run is not None:
                self._require_bound(run.session, request.key, request_hash)
                answer = await self._answer_of(run, request.until)
            elif found.session.state is State.READY:
                run = self._start(found, value, request_hash)
                answer = await self._answer_of(run, request.until)
            else:
                self._require_bound(found.session, request.key, request_hash)
                answer = found.session.end.answer if found.session.end else await self._join(found, request.until)
            if answer is not None:
                return answer
        return None

    async def _open(self, session_id: str, key: str | None) -> Found:
        found = await self.records.read_or_recall(session_id)
        if found is not None and found.session.state is not State.READY:
            found = await self.records.read(session_id)
        if found is None:
            raise lost(session_id)
        session = found.session
        if session.agent != self.agent.name or session.key != key:
            raise ConflictError(
                f"The agent session '{session_id}' belongs to the agent '{session.agent}' and another episode key than"
                " this request names: send the seed's key in X-Paddock-Key."
            )
        if session.state not in {State.READY, State.ACTIVE}:
            raise ConflictError(f"The agent session '{session_id}' is {session.state.value}: it takes no activation.")
        return found

    def _require_bound(self, session: AgentSession, key: str | None, request_hash: str) -> None:
        if session.request_hash != request_hash or session.key != key:
            raise ConflictError(f"The agent session '{session.session_id}' is bound to another activation request.")

    def _start(self, found: Found, value: dict[str, Any], request_hash: str) -> Run:
        try:
            ResponsesCreateParams.model_validate(value)
        except ValidationError as error:
            raise bad_row(error) from error
        request = {name: field for name, field in value.items() if field is not None}
        self.agent.harness.validate(request)
        active = replace(found.session, state=State.ACTIVE, request_hash=request_hash)
        session_id = active.session_id
        run = self.runs[session_id] = Run(self.host, self.agent, self.records, Found(active, found.version), request)
        run.task.add_done_callback(lambda _: self._forget(run))
        return run

    def _forget(self, run: Run) -> None:
        if self.runs.get(run.session.session_id) is run:
            del self.runs[run.session.session_id]

    async def _answer_of(self, run: Run, until: "asyncio.Future[None]") -> Answer | None:
        if not run.answered.done():
            await asyncio.wait((run.answered, until), return_when=asyncio.FIRST_COMPLETED)
        if not run.answered.done():
            return None
        answer = run.answered.result()
        if answer is None:
            # Another replica was first, or just died: its record tells; not in a tight loop.
            self._forget(run)
            await asyncio.wait((until,), timeout=BUSY_PAUSE_S)
        return answer

    async def _join(self, found: Found, until: "asyncio.Future[None]") -> Answer | None:
        """Wait for a run of another replica; declare it lost when that replica is gone."""
        waiting = asyncio.ensure_future(self.records.wait_for_change(found, timeout_s=self.records.renew_s))
        try:
            await asyncio.wait((waiting, until), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                return None
            now = waiting.result()
        finally:
            waiting.cancel()
        if now is not None and now.version == found.version:
            await declare_lost(self.host, self.records, now)
        return None

    async def shut_down(self, linger_s: float) -> None:
        """End all runs of this process: what does not end by itself in `linger_s` is stopped, and writes its end.

        A harness in this process cannot be handed over: what is stopped here can only be tried again. A run that
        does not even stop is left behind, and found lost by others.
        """
        if running := [run.task for run in self.runs.values()]:
            await asyncio.wait(running, timeout=linger_s)
        runs = list(self.runs.values())
        for run in runs:
            run.stop(Stop.SHUTDOWN)
        if runs:
            await asyncio.wait([run.task for run in runs], timeout=SHUTDOWN_S)
        await self.agent.harness.close()


async def declare_lost(host: Host, records: Records, found: Found) -> None:
    """Write that the run is lost, if the claim on it has run out; else do nothing."""
    lease = await records.claim(found.session.session_id, host.new_owner())
    if lease is None:
        return
    error = SessionLostError(
        "The agent server that ran the harness died in the middle of the run; try the row again.", stage=Stage.AGENT
    )
    end = RunEnd(error_answer(error), [], {}, error=error.message, gaps=(INTERRUPTED_GAP,))
    try:
        await records.change(found, replace(found.session, end=end), lease=lease)
        host.metrics.activations.labels(found.session.agent, "lost").inc()
        host.metrics.taken_over.labels("agent").inc()
    except VersionConflictError:
        await host.store.release(lease)


def lost(session_id: str) -> SessionLostError:
    """Answered with 409: the caller holds a name of what is no longer there."""
    error = SessionLostError(
        f"The agent server knows no session '{session_id}', or no longer: it was restarted without a store that"
        " outlives it, or the session expired."
    )
    error.status = 409
    return error


def require_same(named: str, session_id: str) -> None:
    if named != session_id:
        raise ConflictError(f"The session cookie names another agent session than '{session_id}'.")


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRowError.of([FieldProblem((), f"not JSON: {error}", "json_invalid")]) from error
    if not isinstance(value, dict):
        raise BadRowError.of([FieldProblem((), "a request is a JSON object", "dict_type")])
    return value
