"""The story of one episode, top to bottom.

Seed the resources, seed the agent, activate it, close it with proof that nothing of it is left, and only
then verify. Every cleanup is registered before what it undoes is started. Whatever happens, the episode
ends in one of two ways: a verdict or a failure; an error of the machinery is never a verdict.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import orjson

from services.environment.grants import tool_accesses
from services.environment.parties import Parties, Sessions
from services.environment.rows import Row
from services.environment.told import Told
from shared.cleanup import Cleanup, CleanupStack, shielded
from shared.clients.resources import SeededResources
from shared.contracts.agent import (
    CloseAgentRequest,
    SeedAgentRequest,
)
from shared.contracts.episode import Action
from shared.contracts.failure import Stage
from shared.contracts.resources import CloseResourcesRequest, SeedResourcesRequest
from shared.contracts.responses import AgentResponse
from shared.deadline import Deadline
from shared.errors import (
    AgentRunError,
    CancelledEpisodeError,
    CleanupUnprovenError,
    DeadlineError,
    FencedError,
    PaddockError,
    SessionLostError,
)
from shared.redaction import redact

VERIFY_MARGIN_S = 5.0

Keep = Callable[[], Awaitable[None]]
"""Writes what is told so far where another server finds it; raises FencedError when this one may not any more."""


class Episode:
    """One attempt at one row. What is known of it is in `told`; `keep` writes that where another server finds it."""

    def __init__(
        self, row: Row, sessions: Sessions, parties: Parties, told: Told, keep: Keep, deadline: Deadline
    ) -> None:
        self._row = row
        self._sessions = sessions
        self._parties = parties
        self._told = told
        self._keep = keep
        self._deadline = deadline
        self._budgets = parties.budgets
        self._cleanup = CleanupStack(parties.budgets.cleanup_s)
        self._agent_cookies: dict[str, str] = {}
        self._resources_closing: Cleanup | None = None
        self._agent_closing: Cleanup | None = None

    async def run(self) -> None:
        """The story. One that another server began goes on from its stage: what was asked for before is joined.

        Raises:
            FencedError: the episode belongs to another server now, which cleans up, too.
        """
        told = self._told
        async with self._ending():
            if told.failure is not None:
                self._resources_to_be_closed()
                self._agent_to_be_closed()
                return  # its server was lost in the cleanup: that is all that is left

            if not told.ran:
                await self._enter(Stage.SEED)
                resources = await self._seed_resources()
                await self._seed_agent(resources)

                await self._enter(Stage.AGENT)
                await self._activate()

            await self._enter(Stage.CLEANUP)
            await self._close_agent()

            if told.outcome is not None and told.outcome.action is Action.VERIFY:
                await self._enter(Stage.VERIFICATION)
                await self._verify()

    async def _enter(self, stage: Stage) -> None:
        self._told.enter(stage)
        await self._keep()

    async def _seed_resources(self) -> SeededResources:
        self._resources_to_be_closed()
        row = self._row
        seeded = await self._parties.resources.seed(
            SeedResourcesRequest(
                resources_session_id=self._sessions.resources,
                episode_id=row.episode_id,
                task_id=row.task_id,
                task_data=row.task_data,
            ),
            timeout_s=self._deadline.within(self._parties.resources_seed_s),
        )
        self._told.resources_cookies |= seeded.cookies
        return seeded

    async def _seed_agent(self, resources: SeededResources) -> None:
        self._agent_to_be_closed()
        seeded = await self._parties.agent.seed(
            SeedAgentRequest(
                agent_session_id=self._sessions.agent,
                episode_id=self._row.episode_id,
                task_id=self._row.task_id,
                tool_accesses=tool_accesses(self._parties, self._sessions, resources),
                sandbox_access=resources.reply.sandbox_access,
                deadline=self._deadline.left_s + self._budgets.cleanup_s,
            ),
            timeout_s=self._deadline.within(self._parties.agent_seed_s),
        )
        self._agent_cookies |= seeded.cookies

    async def _activate(self) -> None:
        """The single run of the harness, within its wall limit."""
        told = self._told
        limit = self._budgets.agent_limit(self._row.agent_timeout_s, self._deadline)
        # Time that passed under an earlier server counts; the episode's own deadline has it in already.
        spent_s = time.time() - told.activated_at if limit.set_by == "task" else 0.0
        try:
            async with asyncio.timeout(limit.seconds - spent_s) as wall:
                activated = await self._parties.agent.activate(
                    orjson.dumps(self._row.params),
                    key=self._row.episode_id.key,
                    cookies=self._agent_cookies,
                    deadline=self._deadline,
                )
        except TimeoutError:
            if not wall.expired():
                raise
            told.timed_out = limit
        else:
            self._agent_cookies |= activated.cookies
            told.response, told.outcome = activated.raw, self._parties.policy.decide(activated.response)
        told.ran = True

    async def _close_agent(self) -> None:
        """Close with proof, and settle what the response is."""
        self._resources_to_be_closed()
        closing = self._agent_to_be_closed()
        if not await closing.run(self._budgets.cleanup_s):
            raise CleanupUnprovenError(f"The agent's session could not be closed: {_why(closing.error)}")
        told = self._told
        _require_proof(told)
        if told.response is None:
            told.response = _response_after_wall_limit(told)
            response = AgentResponse.model_validate_json(told.response)
            told.outcome = self._parties.policy.decide(response)
            if response.status != "incomplete":
                # The run ended by itself before the limit could end it: that is how it ended.
                told.timed_out = None

    async def _verify(self) -> None:
        told = self._told
        assert told.receipt is not None
        told.verified = await self._parties.resources.verify(
            _verify_body(self._row, told.response),
            cookies=told.receipt.resources_cookies or told.resources_cookies,
            # The resources server's own limit comes first, so that its word is heard.
            timeout_s=self._deadline.within(self._budgets.verify_s + VERIFY_MARGIN_S),
        )

    def _resources_to_be_closed(self) -> None:
        if self._resources_closing is None:
            self._resources_closing = self._cleanup.register(
                "close the resources session", self._ask_resources_to_close, attempts=2
            )

    async def _ask_resources_to_close(self, left_s: float) -> None:
        await self._parties.resources.close(
            CloseResourcesRequest(resources_session_id=self._sessions.resources, episode_id=self._row.episode_id),
            cookies=self._told.resources_cookies,
            timeout_s=min(left_s, self._budgets.resources_close_s),
        )

    def _agent_to_be_closed(self) -> Cleanup:
        if self._agent_closing is None:
            self._agent_closing = self._cleanup.register(
                "close the agent session", self._ask_agent_to_close, unwind_s=self._budgets.agent_close_s
            )
        return self._agent_closing

    async def _ask_agent_to_close(self, left_s: float) -> None:
        self._told.receipt = await self._parties.agent.close(
            CloseAgentRequest(
                agent_session_id=self._sessions.agent,
                episode_id=self._row.episode_id,
                # Nobody waited for the response any more; the run may have ended by itself all the same.
                include_response=self._told.timed_out is not None,
            ),
            cookies=self._agent_cookies,
            timeout_s=min(left_s, self._budgets.agent_close_s),
        )

    @asynccontextmanager
    async def _ending(self) -> AsyncIterator[None]:
        """The episode's time, its failures, and the unwind that follows in a budget of its own.

        Only who still owns the episode unwinds it: another server may have the agent at work by now.
        """
        told = self._told
        try:
            async with asyncio.timeout(self._deadline.left_s) as clock:
                yield
        except FencedError:
            raise
        except asyncio.CancelledError as error:
            if told.given_up:
                raise
            told.fail(told.failure or CancelledEpisodeError("The episode was cancelled."), error)
        except TimeoutError as error:
            over = DeadlineError(f"The episode's {self._budgets.episode_s:g} s are over.")
            told.fail(over if clock.expired() else _unexpected(error), error)
        except PaddockError as error:
            told.failure = error
        except Exception as error:  # noqa: BLE001 - an episode ends in an answer, whatever happens
            told.fail(_unexpected(error), error)
        if told.failure is not None:
            await shielded(self._keep())
        with told.unwinding():
            await self._cleanup.unwind()
        told.cleanup_errors = self._cleanup.outstanding


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


def _unexpected(error: Exception) -> PaddockError:
    return PaddockError(redact(f"Unexpected {type(error).__name__}: {error}"))


def _why(error: object) -> str:
    return str(getattr(error, "message", "it did not answer within its budget"))
