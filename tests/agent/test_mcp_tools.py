"""Lent tools over MCP, from real MCP servers on real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from mcp import types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from starlette.types import Receive, Scope, Send

from tests.agent.peers import message, response, tool_call
from tests.agent.rig import Rig, running
from tests.serving import free_port, serving


@dataclass
class FakeMcp:
    """An MCP server with the tools `add`, `wrong`, `gone`, `broken`, `hang` and `picture`; keeps who called."""

    sessions: list[str | None] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    called: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        server: Server[Any] = Server("fake", on_list_tools=self._list, on_call_tool=self._call)
        manager = StreamableHTTPSessionManager(server, json_response=True, stateless=True)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await _lifespan(receive, send)
                return
            headers = {name.decode(): value.decode() for name, value in scope["headers"]}
            self.sessions.append(headers.get("x-resources-session"))
            self.tokens.append(headers.get("authorization"))
            await manager.handle_request(scope, receive, send)

        async with manager.run(), serving(app) as url:
            yield f"{url}/mcp"

    async def _list(
        self, _context: ServerRequestContext[Any], params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        names = ["add", "wrong"] if params is None or params.cursor is None else ["gone", "broken", "hang", "picture"]
        tools = [types.Tool(name=name, description=name, input_schema={"type": "object"}) for name in names]
        return types.ListToolsResult(tools=tools, next_cursor="2" if "add" in names else None)

    async def _call(
        self, _context: ServerRequestContext[Any], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        self.called.set()
        arguments = params.arguments or {}
        if params.name == "wrong":
            return _result("you cannot", is_error=True)
        if params.name == "gone":
            raise MCPError(types.INVALID_PARAMS, "the session is gone", {"failure_kind": "session_lost"})
        if params.name == "broken":
            raise MCPError(types.INTERNAL_ERROR, "it broke")
        if params.name == "hang":
            await self.released.wait()
        if params.name == "picture":
            image = types.ImageContent(type="image", data="aGk=", mime_type="image/png")
            return types.CallToolResult(content=[image, types.TextContent(type="text", text="a cat")])
        return _result(str(arguments.get("a", 0) + arguments.get("b", 0)))


def _result(text: str, *, is_error: bool = False) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=is_error)


async def _lifespan(receive: Receive, send: Send) -> None:
    for word in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{word}.complete"})


def _access(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "mcp", "name": "fake", "url": url, "headers": {"X-Resources-Session": "rs-1"}, **fields}


async def _run(rig: Rig, url: str, *calls: dict[str, Any], **fields: Any) -> httpx.Response:
    rig.proxy.turns = [*(response(call) for call in calls), response(message("ok"))]
    caller = rig.session(tool_accesses=[_access(url, **fields)])
    await caller.seed()
    return await caller.activate()


async def test_mcp_tools_are_listed_offered_and_called_within_the_session() -> None:
    fake = FakeMcp()
    async with fake.served() as url, running() as rig:
        answer = await _run(rig, url, tool_call("add", '{"a": 2, "b": 3}'), tool_call("wrong"), tool_call("picture"))
        outputs = [item["output"] for item in answer.json()["output"] if item["type"] == "function_call_output"]
        assert outputs == ["5", "you cannot", "[image]\na cat"]
        offered = [tool["name"] for tool in rig.proxy.requests[0]["tools"]]
        assert offered == ["add", "wrong", "gone", "broken", "hang", "picture"]
        assert set(fake.sessions) == {"rs-1"}
        assert set(fake.tokens) == {None}


@pytest.mark.parametrize(
    ("name", "kind", "terminal"),
    [("gone", "session_lost", False), ("broken", "environment_server_failed", False)],
)
async def test_an_mcp_error_that_is_not_about_the_call_ends_the_run(name: str, kind: str, terminal: bool) -> None:
    async with FakeMcp().served() as url, running() as rig:
        failure = (await _run(rig, url, tool_call(name))).json()["failure"]
        assert (failure["failure_kind"], failure["terminal"], failure["stage"]) == (kind, terminal, "agent")


async def test_a_required_mcp_server_that_cannot_be_reached_is_an_error_to_retry() -> None:
    async with running() as rig:
        url = f"http://127.0.0.1:{free_port()}/mcp"
        failure = (await _run(rig, url)).json()["failure"]
        assert (failure["failure_kind"], failure["terminal"]) == ("transport_unreachable", False)
        assert rig.proxy.requests == []


async def test_an_optional_mcp_server_that_cannot_be_reached_is_left_out() -> None:
    async with running() as rig:
        answer = await _run(rig, f"http://127.0.0.1:{free_port()}/mcp", required=False)
        assert answer.json()["output"] == [message("ok")]


async def test_an_mcp_call_that_hangs_ends_within_its_bound() -> None:
    fake = FakeMcp()
    async with fake.served() as url, running(agents={"loop": {"harness": "tool_loop", "tool_timeout_s": 0.3}}) as rig:
        answer = await _run(rig, url, tool_call("hang"))
        fake.released.set()
        assert answer.json()["failure"]["failure_kind"] == "transport_timeout"


async def test_an_mcp_server_that_dies_in_a_call_is_an_error_to_retry() -> None:
    fake = FakeMcp()
    async with running() as rig:
        async with fake.served() as url:
            running_call = asyncio.create_task(_run(rig, url, tool_call("hang")))
            await fake.called.wait()
        answer = await running_call
        failure = answer.json()["failure"]
        assert failure["failure_kind"] in {"transport_peer_drop", "transport_unreachable", "environment_server_failed"}
        assert failure["terminal"] is False


async def test_a_close_during_an_mcp_call_stops_the_run() -> None:
    fake = FakeMcp()
    async with fake.served() as url, running() as rig:
        rig.proxy.turns = [response(tool_call("hang"))]
        caller = rig.session(tool_accesses=[_access(url)])
        await caller.seed()
        waiting = asyncio.create_task(caller.activate())
        await fake.called.wait()
        receipt = (await caller.close()).json()
        fake.released.set()
        assert (await waiting).status_code == 409
        assert receipt["cleanup"]["cleanup_confirmed"] is True
        assert receipt["agent_observations"]["tool_calls"][0]["ok"] is None
