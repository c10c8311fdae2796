"""The story of one episode, top to bottom.

Seed the resources, seed the agent, activate it, close it with proof that nothing of it is left, and only
then verify. Every cleanup is registered before what it undoes is started. Whatever happens, the episode
ends in one of two ways: a verdict or a failure; an error of the machinery is never a verdict.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import orjson

from services.environment.budgets import Budgets
from services.environment.outcome import OutcomePolicy
from services.environment.rows import Row
from services.environment.told import Told
from shared.cleanup import CleanupStack
from shared.clients.agent import Activated, AgentClient
from shared.clients.resources import ResourcesClient, SeededResources
from shared.contracts.agent import (
    CloseAgentRequest,
    HttpToolAccess,
    McpToolAccess,
    SeedAgentRequest,
    ToolAccess,
)
from shared.contracts.episode import Action, Outcome
from shared.contracts.failure import Stage
from shared.contracts.resources import RESOURCES_SESSION_HEADER, CloseResourcesRequest, SeedResourcesRequest
from shared.contracts.responses import AgentResponse
from shared.deadline import Deadline
from shared.errors import (
    AgentRunError,
    CancelledEpisodeError,
    CleanupUnprovenError,
    DeadlineError,
    DrainingError,
    PaddockError,
    ProtocolViolationError,
    SessionLostError,
)
from shared.http.problems import redact
from shared.settings import EnvironmentSettings

VERIFY_MARGIN_S = 5.0

Enter = Callable[[Stage], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Parties:
    """Who takes part in the episodes of one environment, and their limits."""

    environment: EnvironmentSettings
    agent: AgentClient
    resources: ResourcesClient
    budgets: Budgets
    policy: OutcomePolicy
    agent_seed_s: float
    resources_seed_s: float


@dataclass(frozen=True, slots=True)
class Sessions:
    """The ids that this episode gave its two sessions."""

    agent: str
    resources: str


async def run_episode(row: Row, sessions: Sessions, parties: Parties, told: Told, enter: Enter) -> None:
    """Run one attempt at one row; everything that is to be known of it is in `told` afterwards."""
    budgets = parties.budgets
    deadline = Deadline.after(budgets.episode_s)
    cleanup = CleanupStack(budgets.cleanup_s)
    async with _ending(told, cleanup, budgets):
        await enter(Stage.SEED)
        resources_cookies: dict[str, str] = {}

        async def close_resources(left_s: float) -> None:
            await parties.resources.close(
                CloseResourcesRequest(resources_session_id=sessions.resources, episode_id=row.episode_id),
                cookies=resources_cookies,
                timeout_s=min(left_s, budgets.resources_close_s),
            )

        cleanup.register("close the resources session", close_resources, attempts=2)
        resources = await parties.resources.seed(
            SeedResourcesRequest(
                resources_session_id=sessions.resources,
                episode_id=row.episode_id,
                task_id=row.task_id,
                task_data=row.task_data,
            ),
            timeout_s=deadline.within(parties.resources_seed_s),
        )
        resources_cookies |= resources.cookies
        agent_cookies: dict[str, str] = {}

        async def close_agent(left_s: float) -> None:
            told.receipt = await parties.agent.close(
                CloseAgentRequest(
                    agent_session_id=sessions.agent,
                    episode_id=row.episode_id,
                    # Nobody waited for the response any more; the run may have ended by itself all the same.
                    include_response=told.timed_out is not None,
                ),
                cookies=agent_cookies,
                timeout_s=min(left_s, budgets.agent_close_s),
            )

        closing = cleanup.register("close the agent session", close_agent, unwind_s=budgets.agent_close_s)
        agent = await parties.agent.seed(
            SeedAgentRequest(
                agent_session_id=sessions.agent,
                episode_id=row.episode_id,
                task_id=row.task_id,
                tool_accesses=_tool_accesses(parties, sessions, resources),
                sandbox_access=resources.reply.sandbox_access,
                deadline=deadline.left_s + budgets.cleanup_s,
            ),
            timeout_s=deadline.within(parties.agent_seed_s),
        )
        agent_cookies |= agent.cookies

        await enter(Stage.AGENT)
        activated = await _activate(row, parties, told, deadline, agent_cookies)
        if activated is not None:
            agent_cookies |= activated.cookies
            told.response, told.outcome = activated.raw, parties.policy.decide(activated.response)

        await enter(Stage.CLEANUP)
        if not await closing.run(budgets.cleanup_s):
            raise CleanupUnprovenError(f"The agent's session could not be closed: {_why(closing.error)}")
        _require_proof(told)
        if activated is None:
            told.response = _response_after_wall_limit(told)
            response = AgentResponse.model_validate_json(told.response)
            told.outcome = parties.policy.decide(response)
            if response.status != "incomplete":
                # The run ended by itself before the limit could end it: that is how it ended.
                told.timed_out = None
        if told.outcome is None or told.outcome.action is not Action.VERIFY:
            return

        await enter(Stage.VERIFICATION)
        assert told.receipt is not None
        told.verified = await parties.resources.verify(
            _verify_body(row, told.response),
            cookies=told.receipt.resources_cookies or resources_cookies,
            # The resources server's own limit comes first, so that its word is heard.
            timeout_s=deadline.within(budgets.verify_s + VERIFY_MARGIN_S),
        )


async def _activate(
    row: Row, parties: Parties, told: Told, deadline: Deadline, cookies: dict[str, str]
) -> Activated | None:
    """The single run of the harness; None when its wall limit ended it."""
    limit = parties.budgets.agent_limit(row.agent_timeout_s, deadline)
    try:
        async with asyncio.timeout(limit.seconds) as wall:
            return await parties.agent.activate(
                orjson.dumps(row.params), key=row.episode_id.key, cookies=cookies, deadline=deadline
            )
    except TimeoutError:
        if not wall.expired():
            raise
        told.timed_out = limit
        return None


def _tool_accesses(parties: Parties, sessions: Sessions, seeded: SeededResources) -> list[ToolAccess]:
    """The resources' tools, over the transports that the environment grants."""
    tools = seeded.reply.resources_tools
    entry = parties.environment
    accesses: list[ToolAccess] = []
    for transport in entry.tools:
        if transport == "direct_http":
            accesses.append(
                HttpToolAccess(
                    name=f"{entry.resources}_http",
                    base_url=parties.resources.url,
                    cookies=seeded.cookies,
                    tools=tools.http if tools is not None else [],
                )
            )
        elif tools is None or tools.mcp is None:
            raise ProtocolViolationError(
                f"The environment grants MCP tools, but the resources entry '{entry.resources}' lends none."
            )
        else:
            accesses.append(
                McpToolAccess(
                    name=f"{entry.resources}_mcp",
                    url=parties.resources.url + tools.mcp.path,
                    headers={RESOURCES_SESSION_HEADER: next(iter(seeded.cookies.values()), sessions.resources)},
                )
            )
    return accesses


def _require_proof(told: Told) -> None:
    """Only a receipt that says so proves that nothing of the agent is left."""
    receipt = told.receipt
    if receipt is None or receipt.status != "closed":
        raise SessionLostError("The agent server does not know the session any more; its work is lost.")
    if receipt.cleanup.cleanup_confirmed is not True:
        raise CleanupUnprovenError(
            f"The agent's processes are not proven to be gone: {receipt.cleanup.error or 'no reason given'}"
        )


def _response_after_wall_limit(told: Told) -> bytes:
    """What the agent had produced, else an empty response that says where it comes from.

    Raises:
        AgentRunError: the run had failed by itself, so that there is nothing to grade.
    """
    receipt = told.receipt
    partial = receipt.partial_response if receipt is not None else None
    if partial is not None:
        return orjson.dumps(partial)
    if receipt is not None and receipt.cleanup.error is not None and not receipt.cleanup.timed_out:
        raise AgentRunError(f"The agent's run failed before its wall limit: {receipt.cleanup.error}")
    return orjson.dumps(
        {
            "id": "resp_none",
            "object": "response",
            "status": "incomplete",
            "incomplete_details": {"reason": "wall_limit"},
            "output": [],
            "usage": None,
            "metadata": {"origin": "environment_after_wall_limit"},
        }
    )


def _verify_body(row: Row, response: bytes | None) -> bytes:
    assert response is not None
    return orjson.dumps({**row.task_data, "responses_create_params": row.params, "response": orjson.Fragment(response)})


@asynccontextmanager
async def _ending(told: Told, cleanup: CleanupStack, budgets: Budgets) -> AsyncIterator[None]:
    """The episode's time, its failures, and the unwind that follows in any case, in a budget of its own."""
    try:
        async with asyncio.timeout(budgets.episode_s) as clock:
            yield
    except asyncio.CancelledError as error:
        told.failure = told.failure or CancelledEpisodeError("The episode was cancelled.")
        told.failure.__cause__ = error
    except TimeoutError as error:
        if clock.expired():
            told.failure = DeadlineError(f"The episode's {budgets.episode_s:g} s are over.")
        else:
            told.failure = _unexpected(error)
        told.failure.__cause__ = error
    except PaddockError as error:
        told.failure = error
    except Exception as error:  # noqa: BLE001 - an episode ends in an answer, whatever happens
        told.failure = _unexpected(error)
        told.failure.__cause__ = error
    with told.unwinding():
        await cleanup.unwind()
    told.cleanup_errors = cleanup.outstanding


def _unexpected(error: Exception) -> PaddockError:
    return PaddockError(redact(f"Unexpected {type(error).__name__}: {error}"))


def _why(error: object) -> str:
    return str(getattr(error, "message", "it did not answer within its budget"))


def cancelled_by_shutdown() -> PaddockError:
    """Why an episode fails whose server has to stop."""
    return DrainingError("The environment server was shut down while the episode ran.")


def mask_or_zero(outcome: Outcome) -> dict[str, object]:
    """The result of the two actions that decide without the verifier."""
    return {"reward": 0.0, "mask_sample": outcome.action is Action.MASK}
