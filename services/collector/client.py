"""One row against the environment server, however long it takes and whatever happens on the way.

An episode is posted with `Prefer: respond-async` and then asked for, so that no connection is held for
long. Every request may be repeated, on any connection and to any replica: the environment joins or
replays an episode by its id. Trouble is bounded in time; what the environment answers is bounded by the
environment.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Final

import httpx

from services.collector.call import Call, Trouble, jittered
from services.collector.connection import Connection, why
from services.collector.lines import decode, encode
from services.collector.options import EnvironmentGoneError, RefusedError, RunOptions
from services.collector.outcomes import Episode, Report, Result, failed, of_error, read_answer
from services.collector.records import Delivery, FailureRecord, ReportedBy
from services.collector.standing import Standing
from shared.contracts.failure import REASON_MAX_CHARS, Failure, FailureKind, Stage
from shared.errors import ProtocolViolationError, ServiceError, SessionLostError
from shared.http.problems import read, retry_after_s

# An environment of another make may not know `Prefer`; it answers a post only at the end of the episode.
FOREIGN_POST_TIMEOUT_S: Final = 600.0
# Beyond what the environment was asked to wait; a connection that is silent for longer is dead.
ANSWER_TIMEOUT_S: Final = 30.0
LOST_AT_MOST: Final = 3
# Between two questions after an episode, where the environment does not wait as asked.
POLL_PAUSE_S: Final = 1.0
CANCEL_TRIES: Final = 4
CANCEL_PAUSE_S: Final = 0.3
CANCEL_TIMEOUT_S: Final = 5.0
# What a balancer says while its servers are away, and a server that is stopping.
_AWAY: Final = frozenset({408, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended; `before` tells that the environment had this outcome before it was asked."""

    answer: Result | FailureRecord
    before: bool = False


class EnvironmentClient:
    """Runs the rows of one run. `one_environment` tells that all of them go to the same."""

    def __init__(
        self, connection: Connection, options: RunOptions, standing: Standing, *, one_environment: bool
    ) -> None:
        self._connection = connection
        self._options = options
        self._standing = standing
        self._one_environment = one_environment
        self.took_one = False
        """Whether the environment took any episode."""
        self.stopping = False
        """Nothing may be posted any more; episodes that the environment has are still asked for."""

    async def attempt(self, episode: Episode) -> Ended | None:
        """Run the episode, or join it; None when the run stops before the environment has it.

        Raises:
            EnvironmentGoneError: the environment stopped answering; nothing is known about the episode.
            RefusedError: the environment takes no row of this run.
        """
        call = Call(episode, Trouble(self._options.patience_s), Trouble(self._options.busy_patience_s))
        if self._options.resume and self._connection.knows_prefer:
            call.wait_s = 0
        self._standing.sent(call.key)
        try:
            while call.accepted or not self.stopping:
                if (ended := await self._try(call)) is not None:
                    return ended
            return None
        finally:
            self._standing.left(call.key)

    async def _try(self, call: Call) -> Ended | None:
        """One request and what follows from it; None when the next one is due."""
        asked = time.monotonic()
        try:
            reply = await self._ask(call)
        except httpx.RequestError as error:
            return await self._unreachable(call, error)
        if reply.status_code == 202:
            await self._accepted(call, reply, asked)
            return None
        if reply.status_code == 200:
            return await self._outcome(call, reply)
        return await self._refused(call, reply)

    async def _ask(self, call: Call) -> httpx.Response:
        timeout_s = call.wait_s + ANSWER_TIMEOUT_S
        if call.accepted:
            # The key is known, so the answer's Location is not followed: it may lie behind another prefix.
            headers = {"prefer": f"wait={call.wait_s}"}
            return await self._connection.request("GET", f"/episodes/{call.key}", headers=headers, timeout_s=timeout_s)
        if not self._connection.knows_prefer:
            timeout_s = FOREIGN_POST_TIMEOUT_S
        headers = {"content-type": "application/json", "prefer": f"respond-async, wait={call.wait_s}"}
        body = encode(call.episode.request)
        return await self._connection.request("POST", "/run", content=body, headers=headers, timeout_s=timeout_s)

    async def _accepted(self, call: Call, reply: httpx.Response, asked: float) -> None:
        self.took_one = True
        was_asked_for = call.accepted
        call.goes_on(_stage(reply.content))
        self._standing.at(call.key, call.stage)
        if was_asked_for:
            pause_s = max(jittered(POLL_PAUSE_S), retry_after_s(reply.headers.get("retry-after")) or 0.0)
            await asyncio.sleep(max(0.0, pause_s - (time.monotonic() - asked)))

    async def _outcome(self, call: Call, reply: httpx.Response) -> Ended | None:
        """A whole answer that ends the attempt, unless the episode never got a place."""
        try:
            answer = read_answer(call.episode, decode(reply.content), time.monotonic() - call.started)
        except ValueError as error:
            # A balancer's page, or an answer that was cut: the environment keeps what it answers.
            violation = ProtocolViolationError(f"The environment's answer cannot be read: {error}")
            report = Report(ReportedBy.COLLECTOR, Delivery.DELIVERED, 200)
            return await self._away(call, "its answer cannot be read", of_error(violation), report)
        self.took_one = True
        if isinstance(answer, FailureRecord) and answer.had_no_place and await self._waited_for_a_place(call):
            self._standing.left(call.key)
            call.begin_again(call.episode.next())
            self._standing.sent(call.key)
            return None
        return Ended(answer, before=call.wait_s == 0)

    async def _refused(self, call: Call, reply: httpx.Response) -> Ended | None:
        """An answer that is no outcome: the environment, or a balancer before it, says no or not now."""
        status, later_s = reply.status_code, retry_after_s(reply.headers.get("retry-after"))
        problem = read(status, dict(reply.headers), reply.content, service="the environment server")
        self._refuse_run(problem)
        report = Report(ReportedBy.ENVIRONMENT, Delivery.DELIVERED, status)
        if status in _AWAY or (status == 404 and not problem.in_mesh_form):
            if not problem.in_mesh_form:
                call.possibly_delivered()
                report = Report(ReportedBy.COLLECTOR, call.delivery, status)
            return await self._away(call, f"it answers {status}", of_error(problem), report, later_s)
        if status == 404 and call.accepted:
            return _lost(call)
        if status == 429:
            # It is there, and has not taken the episode.
            call.away.over()
            call.accepted = False
            if await self._waited_for_a_place(call, later_s):
                return None
        return Ended(failed(call.episode, of_error(problem), report))

    def _refuse_run(self, problem: ServiceError) -> None:
        """End the run where no other row would fare better."""
        if problem.status in {401, 403}:
            raise self._connection.token_refused(problem.status)
        wrong = [item for item in problem.detail if item.path == "environment"]
        if not wrong or not self._one_environment:
            return
        remedy = "Correct it in the rows."
        if self._options.environment is not None:
            remedy = "Correct --environment."
        elif wrong[0].type == "missing":
            remedy = "Name one for all rows with --environment."
        raise RefusedError(f"{self._connection.url} takes none of the rows: {wrong[0].msg} {remedy}")

    async def _unreachable(self, call: Call, error: httpx.RequestError) -> Ended | None:
        if not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            call.possibly_delivered()
        failure = Failure(
            failure_reason=f"No answer from the environment server: {why(error)}",
            terminal=False,
            failure_kind=_transport_kind(error),
            stage=call.stage,
        )
        report = Report(ReportedBy.COLLECTOR, call.delivery, exception_type=type(error).__name__)
        return await self._away(call, why(error), failure, report)

    async def _away(
        self, call: Call, what: str, failure: Failure, report: Report, later_s: float | None = None
    ) -> Ended | None:
        """Wait before the next try; the failure when this row's patience is at its end and the environment lives.

        It is never terminal: it says something about the way, not about the row.
        """
        call.went_wrong()
        if await self._waited(call, call.away, f"{self._connection.url} ({what})", later_s):
            return None
        if await self._connection.not_ready_for_a_while() is not None:
            raise EnvironmentGoneError(
                f"The environment server at {self._connection.url} is gone: {what}. Rows without an answer were left"
                " as they were; a resumed run goes on with them."
            )
        spent = f"{call.away.tries} tries in {time.monotonic() - call.away.since:.0f} s"
        reason = f"Given up after {spent}: {failure.failure_reason}"[:REASON_MAX_CHARS]
        given_up = failure.model_copy(update={"failure_reason": reason, "terminal": False})
        return Ended(failed(call.episode, given_up, report))

    async def _waited_for_a_place(self, call: Call, later_s: float | None = None) -> bool:
        return await self._waited(call, call.busy, "a place, the environment server is full", later_s)

    async def _waited(self, call: Call, trouble: Trouble, what_for: str, later_s: float | None) -> bool:
        """False, at once, when the patience is at its end."""
        pause_s = trouble.pause_s(later_s)
        if pause_s is None:
            return False
        self._standing.waits(call.key, what_for)
        await asyncio.sleep(pause_s)
        return True

    async def cancel(self, key: str) -> bool:
        """Ask that an episode be cancelled; False when nobody took the request."""
        status = 0
        for _ in range(CANCEL_TRIES):
            try:
                reply = await self._connection.request("DELETE", f"/episodes/{key}", timeout_s=CANCEL_TIMEOUT_S)
                status = reply.status_code
            except httpx.RequestError:
                status = 0
            if status in {202, 409}:  # 409: it has ended
                return True
            # Where there is no such episode, its post may still be on the way.
            await asyncio.sleep(CANCEL_PAUSE_S)
        return status == 404


def _lost(call: Call) -> Ended | None:
    """The environment forgot an episode that it had accepted (a restart without a store): post it again."""
    call.accepted = False
    call.lost += 1
    if call.lost <= LOST_AT_MOST:
        return None
    error = SessionLostError(
        f"The environment server lost the episode {call.lost} times. Restarts and replicas keep episodes when"
        " store.url names one Redis server for all of them.",
        stage=call.stage,
    )
    return Ended(failed(call.episode, of_error(error), Report(ReportedBy.COLLECTOR, Delivery.DELIVERED, 404)))


def _stage(body: bytes) -> Stage | None:
    try:
        return Stage(decode(body)["stage"])
    except (ValueError, KeyError, TypeError):
        return None


def _transport_kind(error: httpx.RequestError) -> FailureKind:
    if isinstance(error, httpx.ConnectError):
        return FailureKind.TRANSPORT_UNREACHABLE
    if isinstance(error, httpx.TimeoutException):
        return FailureKind.TRANSPORT_TIMEOUT
    return FailureKind.TRANSPORT_PEER_DROP
