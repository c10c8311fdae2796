"""The resources server's routes. Each reads its body once and answers bytes; what it does is in the verb files."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import Request, Response
from pydantic import BaseModel

from services.resources.entries import Entry
from services.resources.metrics import aggregate, read_results
from services.resources.sessions import Sessions
from services.resources.toolbox import call_tool
from services.resources.verification import Verification, read_submission
from shared.contracts.failure import Stage
from shared.contracts.resources import (
    CloseResourcesRequest,
    ReverifyModeReply,
    SeedResourcesRequest,
    VerifyRequest,
)
from shared.errors import UnknownNameError
from shared.http.service import Service, body_schema, json_reply, read_model
from shared.telemetry import current_stage


@dataclass(frozen=True, slots=True)
class Desk:
    """What the routes work with."""

    entries: Mapping[str, Entry]
    sessions: Sessions
    verification: Verification

    def entry(self, name: str) -> Entry:
        """The configured entry.

        Raises:
            UnknownNameError: there is none of that name.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise UnknownNameError.among("resources entry", name, self.entries, ("path", "entry"))
        return entry

    def entry_of(self, request: Request) -> Entry:
        """The entry in the request's path; read here since FastAPI's own reading costs more than a seed."""
        return self.entry(request.path_params["entry"])


def _documented(model: type[BaseModel] | None = None) -> dict[str, Any]:
    """What `/docs` shows of a route that reads its path and body itself."""
    entry = {"name": "entry", "in": "path", "required": True, "schema": {"type": "string"}}
    return {"parameters": [entry], **(body_schema(model) if model is not None else {})}


def add_routes(app: Service, desk: Desk) -> None:
    """All routes below `/{entry}`; the one of the tools last, since its path matches every other."""
    _add_session_routes(app, desk)
    _add_metric_routes(app, desk)

    @app.post("/{entry}/{tool}", response_class=Response)
    async def call(entry: str, tool: str, request: Request) -> Response:
        """Call a lent tool; the body is its arguments, the answer its output as text."""
        output = await call_tool(
            desk.sessions, desk.entry(entry), desk.sessions.named_by(request), tool, await request.body()
        )
        return Response(output.encode(), media_type="text/plain")


def _add_session_routes(app: Service, desk: Desk) -> None:
    async def seed(request: Request) -> Response:
        """Open a session for one episode; the same request again joins it."""
        current_stage.set(Stage.SEED)
        found = desk.entry_of(request)
        wanted = await read_model(request, SeedResourcesRequest)
        reply = await desk.sessions.seed(found, wanted)
        return json_reply(
            reply.model_dump_json(exclude_none=True).encode(),
            headers={"set-cookie": desk.sessions.cookie(wanted.resources_session_id)},
        )

    async def verify(request: Request) -> Response:
        """Grade a response; the same session again replays its verdict."""
        current_stage.set(Stage.VERIFICATION)
        found = desk.entry_of(request)
        submission = read_submission(await request.body())
        return json_reply(await desk.verification.verify(found, desk.sessions.named_by(request), submission))

    async def close(request: Request) -> Response:
        """Release a session and fence its id; idempotent, also for an unknown id."""
        current_stage.set(Stage.CLEANUP)
        found = desk.entry_of(request)
        wanted = await read_model(request, CloseResourcesRequest)
        reply = await desk.sessions.close(found, wanted, desk.verification.stop)
        return json_reply(reply.model_dump_json().encode())

    app.add_bare_route("POST", "/{entry}/seed_session", seed, openapi_extra=_documented(SeedResourcesRequest))
    app.add_bare_route("POST", "/{entry}/verify", verify, openapi_extra=_documented(VerifyRequest))
    app.add_bare_route("POST", "/{entry}/close_session", close, openapi_extra=_documented(CloseResourcesRequest))


def _add_metric_routes(app: Service, desk: Desk) -> None:
    @app.post("/{entry}/aggregate_metrics")
    async def aggregate_metrics(entry: str, request: Request) -> Response:
        """Metrics over `{"results": […]}`."""
        return json_reply(orjson.dumps(aggregate(desk.entry(entry), read_results(await request.body()))))

    @app.get("/{entry}/reverify_mode", responses={200: {"model": ReverifyModeReply}})
    async def reverify_mode(entry: str) -> Response:
        """Whether a verdict can be computed again from the stored row alone."""
        found = desk.entry(entry)
        mode = "unsupported" if found.needs_session else found.verifier.reverify_mode
        return json_reply(ReverifyModeReply(reverify_mode=mode).model_dump_json().encode())
