"""The tools that a session was lent, over either transport, as one box of named functions."""

import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol
from urllib.parse import quote

import orjson

from services.agent.hosting import HarnessContext
from shared.contracts.agent import HttpToolAccess, McpToolAccess, ToolAccess
from shared.errors import PaddockError, ServiceError
from shared.http.client import HttpClient
from shared.http.service import mesh_token_of

_log = logging.getLogger(__name__)

# What a tool's server says about the call itself; the model is told and may do better. Anything else is
# about the session or the server, and ends the run.
_ABOUT_THE_CALL: Final = frozenset({400, 404, 405, 406, 413, 415, 422})
_TOOL_CRASHED: Final = 500


@dataclass(frozen=True, slots=True)
class ToolOutput:
    text: str
    ok: bool


class ToolServer(Protocol):
    """One access, opened. `specs` are function tools in the Responses API's form."""

    specs: Sequence[dict[str, Any]]

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolOutput:
        """Raises PaddockError when the server cannot be reached or the session is gone."""


class ToolBox:
    """All lent tools by name; where two accesses lend the same name, the first one serves it."""

    def __init__(self, servers: Iterable[ToolServer]) -> None:
        self._servers: dict[str, ToolServer] = {}
        self.specs: list[dict[str, Any]] = []
        for server in servers:
            for spec in server.specs:
                if spec["name"] not in self._servers:
                    self._servers[spec["name"]] = server
                    self.specs.append(spec)

    async def call(self, name: str, arguments: str) -> ToolOutput:
        """Serve a model's call; what is wrong with the call itself becomes its output.

        Raises:
            PaddockError: the tool's server cannot be reached or has lost the session.
        """
        server = self._servers.get(name)
        if server is None:
            lent = ", ".join(sorted(self._servers)) or "none"
            return ToolOutput(f"Error: nobody serves the tool '{name}' here. Tools that are served: {lent}.", False)
        try:
            parsed = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError as error:
            return ToolOutput(f"Error: the arguments of '{name}' are not valid JSON: {error}.", False)
        if not isinstance(parsed, dict):
            return ToolOutput(f"Error: the arguments of '{name}' are not a JSON object.", False)
        return await server.call(name, parsed)


class HttpTools:
    """Tools at `POST {base_url}/{tool}`. Cookies that the server sets go into `set_cookies` and back to it."""

    def __init__(
        self, client: HttpClient, access: HttpToolAccess, headers: dict[str, str], timeout_s: float,
        set_cookies: dict[str, str],
    ) -> None:  # fmt: skip
        self.specs: Sequence[dict[str, Any]] = access.tools
        self._client = client
        self._access = access
        self._headers = headers
        self._timeout_s = timeout_s
        self._set_cookies = set_cookies

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolOutput:
        try:
            reply = await self._client.request(
                "POST",
                f"{self._access.base_url.rstrip('/')}/{quote(name, safe='')}",
                service="tools",
                timeout_s=self._timeout_s,
                body=orjson.dumps(arguments),
                headers=self._headers,
                cookies=self._access.cookies | self._set_cookies,
            )
        except ServiceError as error:
            if _is_about_the_call(error):
                return ToolOutput(f"Error: {_words_of(error)}", False)
            raise
        for cookie, value in reply.cookies.items():
            if self._access.cookies.get(cookie) != value:
                self._set_cookies[cookie] = value
        return ToolOutput(reply.body.decode("utf-8", "replace"), True)


@asynccontextmanager
async def opened_tools(
    accesses: Sequence[ToolAccess],
    context: HarnessContext,
    foreign: HttpClient,
    *,
    timeout_s: float,
    set_cookies: dict[str, str],
) -> AsyncIterator[ToolBox]:
    """All accesses, opened until the block ends. `foreign` calls servers that are not of this mesh.

    Raises:
        PaddockError: an access that is required cannot be opened.
    """
    async with AsyncExitStack() as stack:
        servers: list[ToolServer] = []
        for access in accesses:
            own = _is_of_the_mesh(access, context)
            if isinstance(access, HttpToolAccess):
                client = context.client if own else foreign
                servers.append(HttpTools(client, access, access.headers, timeout_s, set_cookies))
                continue
            try:
                servers.append(await _opened_mcp(stack, access, context, own, timeout_s))
            except PaddockError as error:
                if access.required:
                    raise
                _log.warning("the optional tools '%s' are left out: %s", access.name, error.message)
        yield ToolBox(servers)


async def _opened_mcp(
    stack: AsyncExitStack, access: McpToolAccess, context: HarnessContext, own: bool, timeout_s: float
) -> ToolServer:
    # Imported on first need: the SDK costs a second and memory that sessions without MCP never use.
    from services.agent.mcp_tools import opened_mcp_tools

    token = mesh_token_of(context.settings) if own else None
    headers = {**({"Authorization": f"Bearer {token}"} if token is not None else {}), **access.headers}
    return await stack.enter_async_context(opened_mcp_tools(access.name, access.url, headers, timeout_s))


def _is_of_the_mesh(access: ToolAccess, context: HarnessContext) -> bool:
    """Only our own resources server is shown the mesh's token."""
    url = access.base_url if isinstance(access, HttpToolAccess) else access.url
    ours = context.settings.services.url_of("resources")
    return url == ours or url.startswith(f"{ours}/")


def _is_about_the_call(error: ServiceError) -> bool:
    return error.status in _ABOUT_THE_CALL or (error.status == _TOOL_CRASHED and not error.in_mesh_form)


def _words_of(error: ServiceError) -> str:
    """What the server said, without our own words around it."""
    text = error.origin.body_excerpt if error.origin is not None else None
    try:
        body = orjson.loads(text or "")
        return str(body["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return text or f"the tool's server answered {error.status}"
