"""The agent server, as its callers see it: one method per route."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shared.contracts.agent import CloseAgentRequest, CloseReceipt, SeedAgentReply, SeedAgentRequest
from shared.contracts.responses import AgentResponse
from shared.deadline import Deadline
from shared.errors import DeadlineError, ProtocolViolationError
from shared.http import headers as names
from shared.http.client import HttpClient, Reply

SERVICE: Final = "agent"
# Each wait is short enough for any load balancer; the identical request is then repeated.
ACTIVATION_WAIT_S: Final = 30.0
WAIT_MARGIN_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class SeededAgent:
    reply: SeedAgentReply
    cookies: dict[str, str]


@dataclass(frozen=True, slots=True)
class Activated:
    """`raw` is the response as it came; `response` the same, read."""

    raw: bytes
    response: AgentResponse
    cookies: dict[str, str]


class AgentClient:
    """One configured agent at `{server}/{agent}`."""

    def __init__(self, http: HttpClient, server_url: str, agent: str) -> None:
        self._http = http
        self._url = f"{server_url}/{agent}/v1"

    async def seed(self, request: SeedAgentRequest, *, timeout_s: float) -> SeededAgent:
        """Open a session; the same request again joins it."""
        reply = await self._http.request(
            "POST",
            f"{self._url}/agent_sessions",
            service=SERVICE,
            timeout_s=timeout_s,
            body=request.model_dump_json(exclude_none=True).encode(),
            replayable=True,
        )
        seeded = SeedAgentReply.model_validate_json(reply.body)
        if seeded.agent_session_id != request.agent_session_id:
            raise ProtocolViolationError("The agent's seed reply names another session.")
        return SeededAgent(seeded, reply.cookies)

    async def activate(self, body: bytes, *, key: str, cookies: Mapping[str, str], deadline: Deadline) -> Activated:
        """Run the harness once; waits over short connections until it ends.

        Raises:
            DeadlineError: the deadline passed before it ended.
        """
        sent = dict(cookies)
        while not deadline.passed:
            wait_s = max(1, int(deadline.within(ACTIVATION_WAIT_S)))
            reply = await self._activate_once(body, key, sent, wait_s)
            sent |= reply.cookies
            if reply.status != 202:
                return Activated(reply.body, AgentResponse.model_validate_json(reply.body), sent)
        raise DeadlineError("The agent did not end within its time.")

    async def _activate_once(self, body: bytes, key: str, cookies: Mapping[str, str], wait_s: int) -> Reply:
        return await self._http.request(
            "POST",
            f"{self._url}/responses",
            service=SERVICE,
            timeout_s=wait_s + WAIT_MARGIN_S,
            body=body,
            headers={names.KEY: key, "Prefer": f"wait={wait_s}"},
            cookies=cookies,
            replayable=True,
        )

    async def close(self, request: CloseAgentRequest, *, cookies: Mapping[str, str], timeout_s: float) -> CloseReceipt:
        """Stop what runs, collect, release; the same request again replays the receipt."""
        reply = await self._http.request(
            "POST",
            f"{self._url}/agent_sessions/close",
            service=SERVICE,
            timeout_s=timeout_s,
            body=request.model_dump_json(exclude_defaults=True).encode(),
            cookies=cookies,
            replayable=True,
        )
        receipt = CloseReceipt.model_validate_json(reply.body)
        if receipt.agent_session_id != request.agent_session_id:
            raise ProtocolViolationError("The agent's close receipt names another session.")
        return receipt
