"""The environment server's routes: thin, each one call of the desk."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Literal

import orjson
from fastapi import Query, Request, Response
from starlette.responses import StreamingResponse

from services.environment.desk import Desk
from services.environment.record import EpisodeRecord, status_body
from services.environment.rows import read_row
from shared.clients.resources import ResourcesClient
from shared.contracts.episode import FlatRow
from shared.errors import ConflictError, DrainingError, NotFoundError, StoreUnavailableError, UnknownNameError
from shared.http import headers as names
from shared.http.prefer import read_prefer
from shared.http.service import RETRY_AFTER_S, Mesh, Service, body_schema, disconnected, json_reply

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
AGGREGATE_TIMEOUT_S = 600.0


def add_routes(app: Service, mesh: Mesh, desk: "DeskHolder") -> None:
    async def run(request: Request) -> Response:
        """Run one prepared row, native or flat; the same episode again joins it or replays its outcome."""
        mesh.refuse_when_draining()
        row = read_row(await request.body(), mesh.settings, idempotency_key=request.headers.get("idempotency-key"))
        started = await desk.now.start(row)
        key = row.episode_id.key
        prefer = read_prefer(request.headers)
        cancel_with_client = started and request.headers.get(names.ON_DISCONNECT, "").lower() == "cancel"
        wait = partial(_wait_or_cancel, request) if cancel_with_client else Desk.wait
        try:
            record = await wait(desk.now, key, prefer.longest_wait_s)
        except NotFoundError as error:
            raise StoreUnavailableError(
                f"The store lost the episode '{key}'; send the row again.", retry_after_s=RETRY_AFTER_S
            ) from error
        return await _answer(record, desk.now, mesh, may_defer=prefer.respond_async)

    app.add_bare_route("POST", "/run", run, openapi_extra=body_schema(FlatRow))

    @app.post("/aggregate_metrics")
    async def aggregate_metrics(request: Request, environment: str | None = None) -> Response:
        """Metrics over many results, from the environment's resources entry."""
        known = mesh.settings.environments
        name = environment or (next(iter(known)) if len(known) == 1 else "")
        if name not in known:
            raise UnknownNameError.among("environment", name, known, ("query", "environment"))
        client = ResourcesClient(mesh.client, mesh.settings.services.url_of("resources"), known[name].resources)
        return json_reply(await client.aggregate_metrics(await request.body(), timeout_s=AGGREGATE_TIMEOUT_S))

    _add_episode_routes(app, mesh, desk)


def _add_episode_routes(app: Service, mesh: Mesh, desk: "DeskHolder") -> None:
    @app.get("/episodes")
    async def episodes(
        state: Literal["queued", "running", "done"] | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        after: str = "",
    ) -> Response:
        """Episodes in the order of their keys."""
        found = await desk.now.list(state, limit, after)
        return json_reply(b'{"episodes":[' + b",".join(status_body(record) for record in found) + b"]}")

    @app.get("/episodes/{key}")
    async def episode(request: Request, key: str) -> Response:
        """The outcome (200), or the stage (202) when it has not ended within `Prefer: wait=N`."""
        record = await desk.now.wait(key, read_prefer(request.headers).wait_s or 0.0)
        return await _answer(record, desk.now, mesh, may_defer=True)

    @app.delete("/episodes/{key}", status_code=202)
    async def cancel(key: str) -> Response:
        """Cancel: cleanup runs, nothing is verified, whoever waits is given the failure `cancelled`."""
        return json_reply(status_body(await desk.now.cancel(key)), 202)

    @app.get("/episodes/{key}/events")
    async def events(key: str) -> Response:
        """Stage changes as server-sent events; the last one is `end`."""
        first = await desk.now.wait(key, 0.0)
        return StreamingResponse(_events(first, desk.now, mesh), media_type="text/event-stream", headers=STREAM_HEADERS)


class DeskHolder:
    """The desk lives as long as the application; routes are made before it."""

    def __init__(self) -> None:
        self._desk: Desk | None = None

    def hold(self, desk: Desk) -> None:
        self._desk = desk

    @property
    def now(self) -> Desk:
        if self._desk is None:
            raise DrainingError("The environment server has not started.", retry_after_s=RETRY_AFTER_S)
        return self._desk


async def _answer(record: EpisodeRecord, desk: Desk, mesh: Mesh, *, may_defer: bool) -> Response:
    if record.ended:
        headers = {"Retry-After": str(record.retry_after_s)} if record.retry_after_s is not None else None
        return json_reply(record.body, record.http_status, headers)
    if may_defer:
        await desk.promise(record.key)
    else:
        mesh.refuse_when_draining()
    return json_reply(status_body(record), 202, {"Location": f"/episodes/{record.key}", "Retry-After": "1"})


async def _wait_or_cancel(request: Request, desk: Desk, key: str, longest_s: float) -> EpisodeRecord:
    """Wait, but cancel the episode when the client that started it goes away first."""
    waiting = asyncio.ensure_future(desk.wait(key, longest_s))
    leaving = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            try:
                await desk.cancel(key)
            except (ConflictError, NotFoundError):
                # It ended in the same moment; its outcome stands.
                return await waiting
        return await waiting
    finally:
        leaving.cancel()
        waiting.cancel()


async def _events(record: EpisodeRecord, desk: Desk, mesh: Mesh) -> AsyncIterator[bytes]:
    stage = None
    while True:
        if (record.state, record.stage) != stage:
            stage = (record.state, record.stage)
            yield _event("end" if record.ended else "stage", status_body(record))
        if record.ended:
            return
        if mesh.draining.is_set():
            yield _event("draining", orjson.dumps({"retry_after_s": RETRY_AFTER_S}))
            return
        record = await desk.next_change(record)


def _event(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
