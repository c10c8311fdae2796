"""The agent server's routes, one prefix per configured agent: check the caller's names, wait, answer bytes.

The episode's key comes from `X-Paddock-Key` or from the path `/{agent}/rollouts/{key}/v1/responses`; the
session from the signed cookie or from `X-Agent-Session`.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import quote, unquote

import orjson
from fastapi import Request, Response

from services.agent import sessions as session_layer
from services.agent.closing import Closing
from services.agent.hosting import Host
from services.agent.sessions import Sessions
from shared.contracts.agent import AGENT_COOKIE, AGENT_SESSION_HEADER, CloseAgentRequest, SeedAgentRequest
from shared.contracts.failure import Stage
from shared.contracts.responses import ResponsesCreateParams
from shared.errors import ConflictError, DrainingError, UnknownNameError
from shared.http import headers as names
from shared.http.prefer import read_prefer
from shared.http.service import RETRY_AFTER_S, Mesh, Service, body_schema, disconnected, json_reply, read_model
from shared.telemetry import current_key, current_stage
from shared.tokens import Signer

_PATH_NAMES: Final = re.compile(r"\{(\w+)\}")


class Routes:
    """The routes over the sessions of every configured agent."""

    def __init__(self, mesh: Mesh, host: Host, cookies: Signer, agents: Mapping[str, Sessions]) -> None:
        self._mesh = mesh
        self._host = host
        self._cookies = cookies
        self._agents = agents
        self._closings = {name: Closing(sessions) for name, sessions in agents.items()}

    async def seed(self, request: Request) -> Response:
        """Open a session; the same body again joins it."""
        current_stage.set(Stage.SEED)
        sessions = self._sessions(request)
        self._mesh.refuse_when_draining()
        body = await read_model(request, SeedAgentRequest)
        await sessions.seed(body, await request.body(), self._named(request))
        session_id = body.agent_session_id
        cookie = f"{AGENT_COOKIE}={self._cookies.cookie(quote(session_id, safe=''))}"
        path = quote(sessions.agent.name)
        return json_reply(
            orjson.dumps({"agent_session_id": session_id}),
            headers={"set-cookie": f"{cookie}; Path=/{path}; HttpOnly; SameSite=Lax"},
        )

    async def activate(self, request: Request) -> Response:
        """Run the harness once; the same body again joins or replays. With `Prefer: wait=N`, 202 after N seconds."""
        current_stage.set(Stage.AGENT)
        sessions = self._sessions(request)
        session_id, key = self._session_of(request), _key_of(request)
        body = await request.body()
        wait_s = read_prefer(request.headers).wait_s
        async with self._waiting(request, wait_s) as until:
            answer = await sessions.activate(session_id, session_layer.Request(key, body, until))
        applied = {} if wait_s is None else {"preference-applied": f"wait={wait_s:g}"}
        if answer is not None:
            retry = {} if answer.retry_after is None else {"retry-after": answer.retry_after}
            return json_reply(answer.body, answer.status, applied | retry)
        if wait_s is None:
            raise DrainingError("The agent server is shutting down; repeat the request.", retry_after_s=RETRY_AFTER_S)
        return json_reply(orjson.dumps({"agent_session_id": session_id, "status": "in_progress"}), 202, applied)

    async def close(self, request: Request) -> Response:
        """Stop what runs, seal, collect, release; the same body again replays the receipt."""
        current_stage.set(Stage.CLEANUP)
        sessions = self._sessions(request)
        body = await read_model(request, CloseAgentRequest)
        receipt = await self._closings[sessions.agent.name].close(body, self._named(request))
        return json_reply(receipt)

    def _sessions(self, request: Request) -> Sessions:
        name = request.path_params["agent"]
        sessions = self._agents.get(name)
        if sessions is None:
            raise UnknownNameError.among("agent", name, self._agents, ("path", "agent"))
        return sessions

    def _named(self, request: Request) -> str | None:
        """The session that the cookie names."""
        if "cookie" not in request.headers:
            return None
        value = request.cookies.get(AGENT_COOKIE)
        if value is None:
            return None
        session_id = self._cookies.read_cookie(value)
        if session_id is None:
            raise ConflictError("The session cookie was not given out by this mesh.")
        return unquote(session_id)

    def _session_of(self, request: Request) -> str:
        named, header = self._named(request), request.headers.get(AGENT_SESSION_HEADER)
        if named is not None and header is not None and named != header:
            raise ConflictError(f"The session cookie and {AGENT_SESSION_HEADER} name different sessions.")
        session_id = named or header
        if session_id is None:
            raise ConflictError(
                f"An activation needs its session: send the cookie that the seed set, or {AGENT_SESSION_HEADER}."
            )
        return session_id

    @asynccontextmanager
    async def _waiting(self, request: Request, wait_s: float | None) -> AsyncIterator["asyncio.Future[None]"]:
        """A future that is resolved when the caller should not wait any longer."""
        until = asyncio.get_running_loop().create_future()
        self._host.waits.add(until)
        if self._host.leaving:
            _resolve(until)
        gone: asyncio.Future[None] | None = None
        timer: asyncio.TimerHandle | None = None
        if wait_s is None:
            gone = asyncio.ensure_future(disconnected(request))
            gone.add_done_callback(lambda _: _resolve(until))
        else:
            timer = asyncio.get_running_loop().call_later(wait_s, _resolve, until)
        try:
            yield until
        finally:
            self._host.waits.discard(until)
            if timer is not None:
                timer.cancel()
            if gone is not None:
                gone.cancel()


def release_waits(host: Host) -> None:
    """Let every open wait answer now, and those that still come at once."""
    host.leaving = True
    for until in list(host.waits):
        _resolve(until)


def add_routes(app: Service, routes: Routes) -> None:
    """All of them are on the hot path of an episode."""

    def add(path: str, endpoint: Callable[[Request], Awaitable[Response]], schema: dict[str, Any]) -> None:
        named = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in _PATH_NAMES.findall(path)
        ]
        app.add_bare_route("POST", path, endpoint, openapi_extra={**schema, "parameters": named})

    add("/{agent}/v1/responses", routes.activate, body_schema(ResponsesCreateParams))
    add("/{agent}/v1/agent_sessions", routes.seed, body_schema(SeedAgentRequest))
    add("/{agent}/v1/agent_sessions/close", routes.close, body_schema(CloseAgentRequest))
    add("/{agent}/rollouts/{key}/v1/responses", routes.activate, body_schema(ResponsesCreateParams))


def _key_of(request: Request) -> str | None:
    header, path = request.headers.get(names.KEY), request.path_params.get("key")
    if header is not None and path is not None and header != path:
        raise ConflictError(f"{names.KEY} and the path name different episodes.")
    key = header or path
    if key is not None:
        current_key.set(key)
    return key


def _resolve(until: "asyncio.Future[None]") -> None:
    if not until.done():
        until.set_result(None)
