"""One episode against the environment server, however long it takes and whatever happens on the way.

An episode is posted with `Prefer: respond-async` and then asked for, so that no connection is held for
hours. Every request may be repeated: the environment joins or replays an episode by its id. Trouble is
bounded in time; what the environment answers is bounded by the environment.
"""

import asyncio
import time
from typing import Any, Final, Self
from urllib.parse import urlsplit

import httpx

from services.collector.call import Call, Trouble
from services.collector.lines import decode, encode
from services.collector.options import EnvironmentGoneError, RunError, RunOptions
from services.collector.outcomes import (
    Episode,
    Report,
    Result,
    failed,
    of_error,
    read_answer,
)
from services.collector.records import Delivery, FailureRecord, ReportedBy
from shared.contracts.failure import Failure, FailureKind, Stage
from shared.errors import ProtocolViolationError, SessionLostError
from shared.http.problems import read, retry_after_s
from shared.settings import is_loopback

CONNECT_TIMEOUT_S: Final = 5.0
# Long: an environment that does not know `Prefer` answers a post only at the end of the episode.
READ_TIMEOUT_S: Final = 600.0
WAIT_S: Final = 30
READY_TRIES: Final = 10
READY_PAUSE_S: Final = 0.3
LOST_AT_MOST: Final = 3
# Between two questions after an episode, where the environment does not wait as asked.
POLL_PAUSE_S: Final = 1.0
_AWAY = frozenset({502, 503, 504})


class EnvironmentClient:
    """Calls one environment server; use it as an async context manager."""

    def __init__(self, url: str, token: str | None, options: RunOptions) -> None:
        self._url = url.rstrip("/")
        self._options = options
        # A proxy from the environment variables leads away from this machine.
        self._trust_env = not is_loopback(_host(self._url))
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._ssl = httpx.create_ssl_context()
        self._clients: list[httpx.AsyncClient] = []
        self._free: list[httpx.AsyncClient] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients:
            await client.aclose()

    async def _request(self, method: str, path: str, **more: Any) -> httpx.Response:
        """One request. A client per connection: one client's pool looks at all of its connections each time."""
        client = self._free.pop() if self._free else self._another()
        try:
            return await client.request(method, self._url + path, **more)
        finally:
            self._free.append(client)

    def _another(self) -> httpx.AsyncClient:
        client = httpx.AsyncClient(
            headers=self._headers,
            timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            trust_env=self._trust_env,
            verify=self._ssl,
        )
        self._clients.append(client)
        return client

    async def check_ready(self) -> None:
        """See that an environment server answers and is ready.

        Raises:
            RunError: nothing answers, something else does, or it is not ready.
        """
        if (problem := await self._not_ready_for_a_while()) is not None:
            raise RunError(problem)

    async def _not_ready_for_a_while(self) -> str | None:
        problem = await self._not_ready()
        for _ in range(READY_TRIES - 1):
            if problem is None:
                break
            await asyncio.sleep(READY_PAUSE_S)
            problem = await self._not_ready()
        return problem

    async def _not_ready(self) -> str | None:
        try:
            reply = await self._request("GET", "/readyz", timeout=CONNECT_TIMEOUT_S)
        except httpx.RequestError as error:
            return (
                f"Nothing answers at {self._url} ({_why(error)}). Start the mesh with `paddock up`, or name another"
                " address with --url."
            )
        if reply.status_code == 200:
            return self._other_service(reply)
        problem = read(reply.status_code, dict(reply.headers), reply.content, service=f"{self._url}/readyz")
        if reply.status_code in {404, 405}:
            return f"What answers at {self._url} is no environment server: {problem.message}"
        return f"The environment server is not ready. {problem.message}"

    def _other_service(self, reply: httpx.Response) -> str | None:
        """The sentence for a service of the mesh that takes no rows; None for an environment server."""
        try:
            service = reply.json().get("service", "environment")
        except (ValueError, AttributeError):
            return f"What answers at {self._url} is no environment server."
        if service == "environment":
            return None
        return f"What answers at {self._url} is the {service} service; rows go to the environment server."

    async def attempt(self, episode: Episode) -> Result | FailureRecord:
        """Run the episode, or join it, and return its result line or its failure record.

        Raises:
            EnvironmentGoneError: the environment stopped answering; nothing is known about the episode.
            RunError: the environment refuses our token.
        """
        call = Call(episode, Trouble(self._options.patience_s), Trouble(self._options.busy_patience_s))
        body = encode(episode.request)
        while (end := await self._try(call, body)) is None:
            pass
        return end

    async def _try(self, call: Call, body: bytes) -> Result | FailureRecord | None:
        """One request and what follows from it; None when the next one is due."""
        asked = time.monotonic()
        try:
            reply = await self._ask(call, body)
        except httpx.RequestError as error:
            return await self._unreachable(call, error)
        status = reply.status_code
        if status == 202:
            await self._accepted(call, reply, asked)
            return None
        if status == 404 and call.accepted:
            return _lost(call)
        if status == 429 or status in _AWAY:
            return await self._later(call, reply)
        return self._answered(call, reply)

    async def _ask(self, call: Call, body: bytes) -> httpx.Response:
        if call.accepted:
            # The key is known, so the answer's Location is not followed: it may lie behind another prefix.
            return await self._request("GET", f"/episodes/{call.key}", headers={"prefer": f"wait={WAIT_S}"})
        headers = {"content-type": "application/json", "prefer": f"respond-async, wait={WAIT_S}"}
        return await self._request("POST", "/run", content=body, headers=headers)

    async def _accepted(self, call: Call, reply: httpx.Response, asked: float) -> None:
        first = not call.accepted
        call.accepted, call.delivery = True, Delivery.DELIVERED
        call.away.over()
        call.busy.over()
        call.stage = _stage(reply.content) or call.stage
        if not first:
            await asyncio.sleep(max(0.0, POLL_PAUSE_S - (time.monotonic() - asked)))

    async def _unreachable(self, call: Call, error: httpx.RequestError) -> FailureRecord | None:
        """Wait before the next try; a record when this row's patience is at its end and the environment lives."""
        if not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            call.possibly_delivered()
        pause_s = call.away.pause_s()
        if pause_s is not None:
            await asyncio.sleep(pause_s)
            return None
        await self._gone_or_not(_why(error))
        failure = Failure(
            failure_reason=f"No answer from the environment server after {call.away.tries} tries: {_why(error)}",
            terminal=False,
            failure_kind=_transport_kind(error),
            stage=call.stage,
        )
        report = Report(ReportedBy.COLLECTOR, call.delivery, exception_type=type(error).__name__)
        return failed(call.episode, failure, report)

    async def _later(self, call: Call, reply: httpx.Response) -> Result | FailureRecord | None:
        """The environment, or a balancer before it, says: not now."""
        call.possibly_delivered()
        busy = reply.status_code == 429
        if busy:
            # It is there, and has not taken the episode.
            call.away.over()
            call.accepted = False
        trouble = call.busy if busy else call.away
        pause_s = trouble.pause_s(retry_after_s(reply.headers.get("retry-after")))
        if pause_s is not None:
            await asyncio.sleep(pause_s)
            return None
        if not busy:
            await self._gone_or_not(f"it answers {reply.status_code}")
        return self._answered(call, reply)

    async def _gone_or_not(self, why: str) -> None:
        if await self._not_ready_for_a_while() is not None:
            raise EnvironmentGoneError(
                f"The environment server at {self._url} is gone: {why}. Rows without an answer were left as they"
                " were; a resumed run goes on with them."
            )

    def _answered(self, call: Call, reply: httpx.Response) -> Result | FailureRecord:
        status = reply.status_code
        if status in {401, 403}:
            raise RunError(
                f"The environment server at {self._url} refuses our token ({status}): set PADDOCK_CLIENT_TOKEN to the"
                " one that it was started with."
            )
        if status != 200:
            problem = read(status, dict(reply.headers), reply.content, service="the environment server")
            ours = status not in _AWAY or b'"failure"' in reply.content
            report = (
                Report(ReportedBy.ENVIRONMENT, Delivery.DELIVERED, status)
                if ours
                else Report(ReportedBy.COLLECTOR, Delivery.POSSIBLY_DELIVERED, status)
            )
            return failed(call.episode, of_error(problem), report)
        try:
            return read_answer(call.episode, decode(reply.content), time.monotonic() - call.started)
        except ValueError as error:
            violation = ProtocolViolationError(f"The environment's answer cannot be read: {error}")
            return failed(call.episode, of_error(violation), Report(ReportedBy.COLLECTOR, Delivery.DELIVERED, status))


def _host(url: str) -> str:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in {"http", "https"} and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid or not parts.hostname:
        raise RunError(f"'{url}' is no address of an environment server; one looks like http://127.0.0.1:8100.")
    return parts.hostname


def _lost(call: Call) -> FailureRecord | None:
    """The environment forgot an episode that it had accepted (a restart without a store): post it again."""
    call.accepted = False
    call.lost += 1
    if call.lost <= LOST_AT_MOST:
        return None
    error = SessionLostError(f"The environment server lost the episode {call.lost} times.", stage=call.stage)
    return failed(call.episode, of_error(error), Report(ReportedBy.COLLECTOR, Delivery.DELIVERED, 404))


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


def _why(error: httpx.RequestError) -> str:
    return str(error) or type(error).__name__
