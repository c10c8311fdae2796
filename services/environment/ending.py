"""How an episode ends: what is stored for whoever asks, and what is counted."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from services.environment.page import DONE, OPEN, Page, promise_key, row_key
from services.environment.parties import Parties
from services.environment.reply import failure_of, reply_of
from services.environment.rows import Row
from services.environment.told import Told
from shared.contracts.failure import FailureKind, Stage
from shared.errors import BadRowError, OverloadedError, PaddockError, ServiceError, StoreUnavailableError
from shared.http.problems import render
from shared.http.service import Mesh
from shared.ports.store import Store

_log = logging.getLogger(__name__)

# How long an error answer stands for those who wait for it; then the id is free again.
REFUSAL_TTL_S: Final = 10.0


class Ending:
    """Ends the episodes of this process: each has one answer, and that answer stays."""

    def __init__(self, mesh: Mesh, store: Store, parties: Mapping[str, Parties]) -> None:
        self._mesh = mesh
        self._store = store
        self._parties = parties

    async def write(self, row: Row, told: Told, page: Page) -> None:
        """Store the answer, then take the episode off the list of those that run.

        Raises:
            FencedError, StoreUnavailableError: it is not stored by this server.
        """
        refusal = await self._refusal(row, told)
        if refusal is None:
            ended = replace(page.record, state="done", stage=told.stage, body=self._answer(row, told))
            await page.turn(ended, ttl_s=self._mesh.settings.result_ttl_s)
        else:
            await self.refuse(page, told.stage, refusal)
        self._count(row, told, refusal)
        try:
            await self._unlist(page.record.key, done=refusal is None)
        except StoreUnavailableError as error:
            _log.warning("an ended episode is still listed as running, for now: %s", error.message)

    async def refuse(self, page: Page, stage: Stage, error: PaddockError) -> None:
        """Store an error answer, for a short while: the episode may be sent again."""
        problem = render(error)
        retry_after = problem.headers.get("retry-after")
        refused = replace(
            page.record,
            state="refused",
            stage=stage,
            http_status=problem.status,
            retry_after_s=int(retry_after) if retry_after else None,
            body=problem.body,
        )
        await page.turn(refused, ttl_s=REFUSAL_TTL_S)

    async def _unlist(self, key: str, *, done: bool) -> None:
        if done:
            await self._store.add_member(DONE, key, ttl_s=self._mesh.settings.result_ttl_s)
        await self._store.remove_member(OPEN, key)
        await self._store.delete(row_key(key))

    def _answer(self, row: Row, told: Told) -> bytes:
        agent = self._parties[row.environment].environment.agent
        try:
            return reply_of(row, told, agent)
        except Exception as error:  # noqa: BLE001 - whoever waits is answered in any case
            _log.exception("the answer could not be put together")
            told.response, told.receipt = None, None
            told.failure = PaddockError(f"The answer could not be put together: {type(error).__name__}.")
            return reply_of(row, told, agent)

    async def _refusal(self, row: Row, told: Told) -> PaddockError | None:
        """What is an error of the request rather than an outcome of the episode."""
        error = told.failure
        if isinstance(error, OverloadedError) and told.stage is Stage.ADMISSION:
            promised = await self._store.get(promise_key(row.episode_id.key)) is not None
            return None if promised else error
        if told.stage is Stage.SEED and isinstance(error, ServiceError | BadRowError) and error.detail:
            return row.located(error.detail) if error.kind is FailureKind.BAD_ROW else None
        return None

    def _count(self, row: Row, told: Told, refusal: PaddockError | None) -> None:
        failure = failure_of(told)
        kind = str(failure["failure_kind"]) if failure is not None else "none"
        outcome = "refused" if refusal is not None else "failure" if failure is not None else "result"
        metrics = self._mesh.metrics
        metrics.episodes.labels(row.environment, outcome, kind).inc()
        for stage, seconds in told.timings_s.items():
            metrics.stage_seconds.labels(row.environment, stage).observe(seconds)
        metrics.episode_seconds.labels(row.environment, outcome).observe(sum(told.timings_s.values()))
        fields: dict[str, object] = {
            "environment": row.environment,
            "outcome": outcome,
            "failure_kind": kind,
            "stage": told.stage,
        }
        if told.verified is not None:
            fields["reward"] = told.verified.verdict.reward
        level = logging.INFO if outcome == "result" else logging.WARNING
        _log.log(level, "episode %s", outcome, extra=fields)
