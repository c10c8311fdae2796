"""The lent tools as an MCP server at `/{entry}/mcp`: streamable HTTP, stateless, JSON answers.

No MCP session lives here: each request names its resources session in `X-Resources-Session` (or by the
cookie), so any replica serves it. The SDK is imported at the first request.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from services.resources.entries import Entry
from services.resources.routes import Desk
from services.resources.toolbox import call_tool
from shared.errors import BadRowError, PaddockError
from shared.http.service import package_version

if TYPE_CHECKING:
    from mcp.server.context import ServerRequestContext
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
    from mcp.types import CallToolRequestParams, CallToolResult, ListToolsResult, PaginatedRequestParams


@dataclass(slots=True)
class _Running:
    """One entry's MCP server and the task in which it lives: the SDK wants to be left by the task that entered it."""

    manager: "StreamableHTTPSessionManager"
    task: asyncio.Task[None]
    ready: asyncio.Event


class McpEndpoint:
    """An ASGI application, and the `route` that leads to it: POST only, as there is no stream to GET and no MCP
    session to DELETE."""

    def __init__(self, desk: Desk) -> None:
        self.route = Route("/{entry}/mcp", self, methods=["POST"], include_in_schema=False)
        self._desk = desk
        self._running: dict[str, _Running] = {}
        self._stopping = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # As FastAPI's routes do by themselves: requests are counted by it.
        scope["route"] = self.route
        running = self._of(self._desk.entry(scope["path_params"]["entry"]))
        await running.ready.wait()
        await running.manager.handle_request(scope, receive, send)

    def _of(self, entry: Entry) -> _Running:
        running = self._running.get(entry.name)
        if running is None:
            from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

            manager = StreamableHTTPSessionManager(_server(self._desk, entry), json_response=True, stateless=True)
            ready = asyncio.Event()
            task = asyncio.create_task(self._run(manager, ready), name=f"mcp {entry.name}")
            running = self._running[entry.name] = _Running(manager, task, ready)
        return running

    async def _run(self, manager: "StreamableHTTPSessionManager", ready: asyncio.Event) -> None:
        async with manager.run():
            ready.set()
            await self._stopping.wait()

    async def close(self) -> None:
        """End what was started; idempotent."""
        self._stopping.set()
        for running in self._running.values():
            with suppress(asyncio.CancelledError):
                await running.task
        self._running.clear()


def _server(desk: Desk, entry: Entry) -> Any:
    from mcp import types
    from mcp.server.lowlevel.server import Server
    from mcp.shared.exceptions import MCPError

    tools = [
        types.Tool(
            name=tool.spec.name,
            description=tool.spec.description,
            input_schema=tool.spec.as_function_tool()["parameters"],
        )
        for tool in entry.tools.values()
    ]

    async def list_tools(
        _context: "ServerRequestContext[Any]", _params: "PaginatedRequestParams | None"
    ) -> "ListToolsResult":
        return types.ListToolsResult(tools=tools)

    async def call(context: "ServerRequestContext[Any]", params: "CallToolRequestParams") -> "CallToolResult":
        try:
            session_id = None if context.request is None else desk.sessions.named_by(context.request)
            arguments = orjson.dumps(params.arguments or {})
            text, is_error = await call_tool(desk.sessions, entry, session_id, params.name, arguments), False
        except BadRowError as error:
            # What the model did wrong is for the model to read; everything else is for the harness.
            text, is_error = error.message, True
        except PaddockError as error:
            code = types.INVALID_PARAMS if error.status < 500 else types.INTERNAL_ERROR
            raise MCPError(code, error.message, {"failure_kind": error.kind.value}) from error
        return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=is_error)

    return Server(entry.name, version=package_version(), on_list_tools=list_tools, on_call_tool=call)
