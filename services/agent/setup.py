"""The setup of a session whose harness holds something from the seed to the close.

It finishes, or is cleaned up, although its caller has gone away; when its process dies, a joiner starts it
again or a close cleans up.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from services.agent.hosting import Host
from services.agent.record import RunEnd, State
from services.agent.records import Found, Records
from services.agent.runs import error_answer, told
from shared.cleanup import shielded
from shared.contracts.failure import FailureKind, Stage
from shared.errors import ConflictError, FencedError, PaddockError, StoreUnavailableError, VersionConflictError
from shared.ports.harness import SettingUp
from shared.ports.store import Lease

_log = logging.getLogger(__name__)


class Setup:
    def __init__(self, host: Host, agent: str, harness: SettingUp, records: Records) -> None:
        self._harness = harness
        self._name = agent
        self._host = host
        self._records = records

    async def run(self, found: Found) -> None:
        """Set up a fresh session.

        Raises:
            PaddockError: the setup failed; its cleanup has been tried.
        """
        lease = await self._records.claim(found.session.session_id, self._host.new_owner())
        if lease is None:
            raise ConflictError(f"The agent session '{found.session.session_id}' is set up by another process.")
        await shielded(self._set_up(found, lease))

    async def take_over(self, found: Found) -> None:
        """Set up again what a dead process left in the middle; nothing when it lives."""
        lease = await self._records.claim(found.session.session_id, self._host.new_owner())
        if lease is not None:
            self._host.metrics.taken_over.labels("agent").inc()
            await shielded(self._set_up_again(found, lease))

    async def _set_up_again(self, found: Found, lease: Lease) -> None:
        async with _kept(self._host, lease):
            await self._harness.teardown(found.session.seed_request(), {})
        await self._set_up(found, lease)

    async def _set_up(self, found: Found, lease: Lease) -> None:
        try:
            async with _kept(self._host, lease):
                held = await self._harness.setup(found.session.seed_request())
        except Exception as error:
            wrong = _setup_error(self._name, error)
            await self._clean_up(found, lease, wrong)
            raise wrong from error
        await self._finish(found, lease, held)

    async def _finish(self, found: Found, lease: Lease, held: dict[str, Any]) -> None:
        try:
            ready = await self._records.change(found, replace(found.session, state=State.READY, held=held), lease=lease)
        except VersionConflictError as error:
            conflict = ConflictError(f"The agent session '{found.session.session_id}' was closed during its setup.")
            await self._leave_to_close(found, lease, held, conflict)
            raise conflict from error
        self._records.remember(ready)
        await self._host.store.release(lease)

    async def _clean_up(self, found: Found, lease: Lease, cause: PaddockError) -> None:
        """Undo a failed setup: the record goes, or waits for a close that tries again."""
        try:
            async with _kept(self._host, lease):
                await self._harness.teardown(found.session.seed_request(), {})
        except Exception as error:  # noqa: BLE001 - the setup's own error is what the caller gets; a close tries again
            _log.warning("cleanup after a failed setup failed: %s", told(error), extra={"agent": self._name})
            left = True
        else:
            left = False
        try:
            if left:
                failed = replace(found.session, state=State.SETUP_FAILED)
                await self._records.change(found, failed, lease=lease)
            else:
                await self._records.delete(found, lease=lease)
        except VersionConflictError:
            await self._leave_to_close(found, lease, {}, cause)
        await self._host.store.release(lease)

    async def _leave_to_close(self, found: Found, lease: Lease, held: dict[str, Any], error: PaddockError) -> None:
        """A close came in between and waits: give it what is held."""
        now = await self._records.read(found.session.session_id)
        if now is not None and now.session.state is State.STOPPING:
            end = RunEnd(error_answer(error), [], {}, error=error.message)
            await self._records.change(now, replace(now.session, held=held, end=end), lease=lease)


def _setup_error(agent: str, error: Exception) -> PaddockError:
    if not isinstance(error, PaddockError):
        cause = error
        error = PaddockError(f"The setup of the agent '{agent}' failed: {told(cause)}")
        error.kind = FailureKind.AGENT_RUN_ERROR
    error.stage = error.stage or Stage.SEED
    return error


@asynccontextmanager
async def _kept(host: Host, lease: Lease) -> AsyncIterator[None]:
    """Keep a claim alive while something long is done under it."""

    async def renew() -> None:
        while True:
            await asyncio.sleep(host.lease_s / 3)
            try:
                await host.store.renew(lease, ttl_s=host.lease_s)
            except (FencedError, StoreUnavailableError) as error:
                # The write at the end, which carries the claim, decides.
                if isinstance(error, StoreUnavailableError):
                    host.metrics.lease_renew_failures.labels("agent").inc()
                _log.warning("a claim could not be renewed: %s", error)

    renewing = asyncio.create_task(renew())
    try:
        yield
    finally:
        renewing.cancel()
