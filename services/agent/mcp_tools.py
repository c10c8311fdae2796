"""Lent tools that an MCP server offers over streamable HTTP.

The SDK's connection lives in a task of its own: when the connection breaks, the SDK cancels the task that
opened it, and that must not be the harness. Import this file only when an MCP access is there.
"""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, Final

import httpx2
import orjson
from mcp import types
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from pydantic import ValidationError

from services.agent.tools import ToolOutput
from shared.contracts.failure import FailureKind, Origin
from shared.errors import PaddockError, ProtocolViolationError, ServiceError, TransportError
from shared.tracing import trace_headers

_log = logging.getLogger(__name__)

PAGES: Final = 100
CLOSE_S: Final = 5.0
_TERMINAL: Final = frozenset({FailureKind.CONFLICT, FailureKind.UNAUTHORIZED, FailureKind.NOT_FOUND})


class McpTools:
    """The tools of one opened server."""

    def __init__(self, name: str, client: Client, specs: Sequence[dict[str, Any]], timeout_s: float) -> None:
        self.specs = specs
        self._name = name
        self._client = client
        self._timeout_s = timeout_s

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolOutput:
        try:
            result = await self._client.call_tool(name, arguments, read_timeout_seconds=self._timeout_s)
        except MCPError as error:
            if error.code in {types.INVALID_PARAMS, types.METHOD_NOT_FOUND} and _kind_of(error) is None:
                return ToolOutput(f"Error: {error.message}", False)
            raise _ours(self._name, error) from error
        except ValidationError as error:
            raise ProtocolViolationError(f"The MCP server '{self._name}' gave '{name}' a malformed result.") from error
        return ToolOutput(_text_of(result), not result.is_error)


@asynccontextmanager
async def opened_mcp_tools(name: str, url: str, headers: dict[str, str], timeout_s: float) -> AsyncIterator[McpTools]:
    """A connection with its list of tools.

    Raises:
        TransportError: the server cannot be reached, or not in time.
        ServiceError: it refuses.
    """
    ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
    leave = asyncio.Event()
    holding = asyncio.create_task(_hold(name, url, headers, timeout_s, ready, leave))
    try:
        client = await asyncio.shield(ready)
        yield McpTools(name, client, await _specs(name, client), timeout_s)
    finally:
        leave.set()
        _, unfinished = await asyncio.wait((holding,), timeout=CLOSE_S)
        for task in unfinished:
            task.cancel()


async def _hold(
    name: str,
    url: str,
    headers: dict[str, str],
    timeout_s: float,
    ready: "asyncio.Future[Client]",
    leave: asyncio.Event,
) -> None:
    timeout = httpx2.Timeout(timeout_s)
    try:
        async with httpx2.AsyncClient(
            headers=headers, timeout=timeout, verify=_tls(), trust_env=False, event_hooks={"request": [_in_trace]}
        ) as http:
            transport = streamable_http_client(url, http_client=http)
            async with Client(transport, read_timeout_seconds=timeout_s, cache=None) as client:
                ready.set_result(client)
                await leave.wait()
    except Exception as error:  # noqa: BLE001 - the SDK wraps whatever broke; waiters get one error of ours
        if ready.done():
            _log.warning("the connection to the MCP server '%s' broke: %r", name, _root(error))
        else:
            ready.set_exception(_ours(name, _root(error)))


async def _in_trace(request: httpx2.Request) -> None:
    request.headers.update(trace_headers())


async def _specs(name: str, client: Client) -> list[dict[str, Any]]:
    specs: list[dict[str, Any]] = []
    cursor: str | None = None
    try:
        for _ in range(PAGES):
            page = await client.list_tools(cursor=cursor)
            specs += [_spec(tool) for tool in page.tools]
            cursor = page.next_cursor
            if cursor is None:
                break
    except MCPError as error:
        raise _ours(name, error) from error
    return specs


def _spec(tool: types.Tool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema,
        "strict": False,
    }


def _text_of(result: types.CallToolResult) -> str:
    """The result as text; of what is no text only its type is told, which text models cannot read anyway."""
    parts = [part.text if isinstance(part, types.TextContent) else f"[{part.type}]" for part in result.content]
    if not parts and result.structured_content is not None:
        return orjson.dumps(result.structured_content).decode()
    return "\n".join(parts)


def _ours(name: str, error: Exception) -> PaddockError:
    """What broke, as an error that ends the run."""
    if not isinstance(error, MCPError):
        timed_out = isinstance(error, (TimeoutError, httpx2.TimeoutException))
        return TransportError(
            f"The MCP server '{name}' cannot be reached: {str(error) or type(error).__name__}.",
            kind=FailureKind.TRANSPORT_TIMEOUT if timed_out else FailureKind.TRANSPORT_UNREACHABLE,
            service=name,
            sent=True,
        )
    if error.code in {types.CONNECTION_CLOSED, types.REQUEST_TIMEOUT}:
        closed = error.code == types.CONNECTION_CLOSED
        return TransportError(
            f"The MCP server '{name}' {'dropped the connection' if closed else 'did not answer in time'}.",
            kind=FailureKind.TRANSPORT_PEER_DROP if closed else FailureKind.TRANSPORT_TIMEOUT,
            service=name,
            sent=True,
        )
    kind = _kind_of(error) or FailureKind.ENVIRONMENT_SERVER_FAILED
    return ServiceError(
        f"The MCP server '{name}' refused: {error.message}",
        kind=kind,
        status=502,
        terminal=kind in _TERMINAL,
        origin=Origin(service=name, code=str(error.code), body_excerpt=error.message),
        in_mesh_form=_kind_of(error) is not None,
    )


def _kind_of(error: MCPError) -> FailureKind | None:
    """The failure kind that a server of ours puts beside an error that is not about the call."""
    kind = error.data.get("failure_kind") if isinstance(error.data, dict) else None
    return FailureKind(kind) if isinstance(kind, str) and kind in set(FailureKind) else None


def _root(error: Exception) -> Exception:
    """The first error of the groups that the SDK's task groups wrap around it."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


@cache
def _tls() -> ssl.SSLContext:
    """Made once: loading the certificates takes longer than a whole tool call."""
    return ssl.create_default_context()
