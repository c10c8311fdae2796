"""Lent tools over HTTP and MCP: state, log, errors that the model can read, release."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import httpx2
import orjson
import pytest
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp.types import TextContent

from shared.contracts.resources import RESOURCES_COOKIE, RESOURCES_SESSION_HEADER
from shared.store.memory import MemoryStore
from tests.resources.plugins.toolsets import ledger
from tests.resources.rig import FAKES, Served, close_body, loaded, resources, seed_body, verify_body

ENTRIES: dict[str, Any] = {
    "ledger": {"verifier": "scripted", "tools": ["ledger"], "close_timeout_s": 2},
    "plain": {"verifier": "scripted"},
}


@pytest.fixture
async def server() -> AsyncIterator[Served]:
    async with resources(loaded(ENTRIES), plugins=FAKES) as served:
        yield served


async def _state(server: Served, cookies: dict[str, str], name: str) -> dict[str, Any]:
    verdict = await server.post("ledger/verify", verify_body({"name": name}), cookies=cookies)
    state: dict[str, Any] = verdict.json()["state"]["ledger"]
    return state


async def test_calls_are_served_over_the_state_of_their_own_session(server: Served) -> None:
    mine = await server.seed("ledger", "mine", {"name": "mine"})
    other = await server.seed("ledger", "other", {"name": "other"})
    assert (await server.post("ledger/add", {"amount": 2}, cookies=mine)).text == "The sum is 2."
    assert (await server.post("ledger/add", {"amount": 3}, cookies=mine)).text == "The sum is 5."
    assert (await server.post("ledger/add", {"amount": 1}, cookies=other)).text == "The sum is 1."
    assert await _state(server, mine, "mine") == {"sum": 5, "name": "mine"}


async def test_parallel_calls_lose_nothing_on_one_replica_or_two() -> None:
    store = MemoryStore()
    async with (
        resources(loaded(ENTRIES), plugins=FAKES, store=store) as one,
        resources(loaded(ENTRIES), plugins=FAKES, store=store) as two,
    ):
        cookies = await one.seed("ledger", "s", {"name": "parallel"})
        await asyncio.gather(
            *(server.post("ledger/add", {"amount": 1}, cookies=cookies) for server in (one, two) for _ in range(10))
        )
        record = await store.get("resources:{s}")
        assert record is not None
        held = orjson.loads(record.value)
        assert await _state(two, cookies, "parallel") == {"sum": 20, "name": "parallel"}
    assert len(held["calls"]) == 20


@pytest.mark.parametrize(
    ("arguments", "path"),
    [({}, ["amount"]), ({"amount": "2"}, ["amount"]), ({"amount": 1, "note": ""}, ["note"]), ([1], [])],
)
async def test_wrong_arguments_are_a_422_with_their_path_and_change_nothing(
    server: Served, arguments: Any, path: list[str]
) -> None:
    cookies = await server.seed("ledger", "s", {"name": "wrong"})
    refused = await server.post("ledger/add", arguments, cookies=cookies)
    assert refused.status_code == 422
    assert refused.json()["detail"][0]["loc"] == path
    assert await _state(server, cookies, "wrong") == {"sum": 0, "name": "wrong"}


async def test_what_a_tool_refuses_is_told_and_its_half_done_change_is_dropped(server: Served) -> None:
    cookies = await server.seed("ledger", "s", {"name": "refused"})
    refused = await server.post("ledger/refuse", {}, cookies=cookies)
    assert refused.status_code == 422
    assert refused.json()["error"]["message"] == "The ledger is closed on Sundays."
    assert await _state(server, cookies, "refused") == {"sum": 0, "name": "refused"}


async def test_a_session_in_which_a_tool_broke_is_not_graded(server: Served) -> None:
    cookies = await server.seed("ledger", "s", {"name": "broken"})
    broken = await server.post("ledger/break_down", {}, cookies=cookies)
    assert broken.status_code == 500
    assert broken.json()["failure"]["terminal"] is False
    verdict = await server.post("ledger/verify", verify_body({"name": "broken"}), cookies=cookies)
    assert verdict.status_code == 500
    assert verdict.json()["failure"] == {"failure_kind": "verifier_error", "terminal": False, "stage": "verification"}
    assert "'break_down' failed: RuntimeError: ink is out" in verdict.json()["error"]["message"]


async def test_an_unknown_tool_is_a_404_that_names_the_nearest(server: Served) -> None:
    cookies = await server.seed("ledger", "s", {"name": "unknown"})
    missing = await server.post("ledger/ad", {}, cookies=cookies)
    assert missing.status_code == 404
    assert "Did you mean 'add'?" in missing.json()["error"]["message"]
    assert (await server.post("plain/add", {}, cookies=cookies)).status_code == 404


async def test_a_call_without_a_session_is_a_lost_session(server: Served) -> None:
    assert (await server.post("ledger/add", {"amount": 1})).status_code == 410
    unknown = await server.post("ledger/add", {"amount": 1}, headers={RESOURCES_SESSION_HEADER: "nobody"})
    assert unknown.status_code == 410


async def test_no_call_is_served_once_the_session_is_graded_or_closed(server: Served) -> None:
    graded = await server.seed("ledger", "graded", {"name": "graded"})
    await server.post("ledger/verify", verify_body({"name": "graded"}), cookies=graded)
    closed = await server.seed("ledger", "closed", {"name": "closed"})
    await server.post("ledger/close_session", close_body("closed"))
    for cookies in (graded, closed):
        assert (await server.post("ledger/add", {"amount": 1}, cookies=cookies)).status_code == 409


async def test_a_call_that_is_under_way_while_another_replica_closes_is_refused() -> None:
    store = MemoryStore()
    started = ledger.STARTED["slow"] = asyncio.Event()
    go_on = ledger.GATES["slow"] = asyncio.Event()
    async with (
        resources(loaded(ENTRIES), plugins=FAKES, store=store) as one,
        resources(loaded(ENTRIES), plugins=FAKES, store=store) as two,
    ):
        cookies = await one.seed("ledger", "s", {"name": "slow"})
        calling = asyncio.create_task(one.post("ledger/wait", {}, cookies=cookies))
        await asyncio.wait_for(started.wait(), 5)
        assert (await two.post("ledger/close_session", close_body("s"))).json()["status"] == "closed"
        go_on.set()
        assert (await calling).status_code == 409


async def test_arguments_beyond_any_use_are_refused(server: Served) -> None:
    cookies = await server.seed("ledger", "s", {"name": "large"})
    assert (await server.post("ledger/add", {"amount": "9" * 300_000}, cookies=cookies)).status_code == 413


@pytest.mark.behaviour("RS-1")
async def test_a_failed_release_is_not_recorded_as_closed(server: Served) -> None:
    cookies = await server.seed("ledger", "s", {"name": "held"})
    ledger.FAILING_RELEASES.add("held")
    failed = await server.post("ledger/close_session", close_body("s"))
    assert failed.status_code == 502
    assert failed.json()["failure"] == {
        "failure_kind": "session_release_failed", "terminal": False, "stage": "cleanup",
    }  # fmt: skip
    assert "the bank does not answer" in failed.json()["error"]["message"]
    assert (await server.post("ledger/seed_session", seed_body("s", {"name": "held"}))).status_code == 200
    assert (await server.post("ledger/add", {"amount": 1}, cookies=cookies)).status_code == 200
    ledger.FAILING_RELEASES.discard("held")
    assert (await server.post("ledger/close_session", close_body("s"))).json()["status"] == "closed"
    assert ledger.RELEASED.count("held") == 1


@asynccontextmanager
async def mcp_client(
    server: Served, session: str | None, mode: Literal["auto", "legacy"] = "auto"
) -> AsyncIterator[Client]:
    headers = {RESOURCES_SESSION_HEADER: session} if session is not None else {}
    async with (
        httpx2.AsyncClient(headers=headers, trust_env=False) as http,
        Client(streamable_http_client(f"{server.url}/ledger/mcp", http_client=http), mode=mode) as client,
    ):
        yield client


def _text(content: list[Any]) -> str:
    assert isinstance(content[0], TextContent)
    return content[0].text


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_the_tools_are_an_mcp_server_too(server: Served, mode: Literal["auto", "legacy"]) -> None:
    cookies = await server.seed("ledger", "s", {"name": mode})
    async with mcp_client(server, cookies[RESOURCES_COOKIE], mode) as client:
        tools = (await client.list_tools()).tools
        served = await client.call_tool("add", {"amount": 4})
        misfit = await client.call_tool("add", {"amount": "four"})
        refused = await client.call_tool("refuse", {})
        with pytest.raises(MCPError, match="Did you mean 'add'"):
            await client.call_tool("ad", {})
    assert [tool.name for tool in tools] == ["add", "refuse", "break_down", "wait"]
    assert tools[0].input_schema["required"] == ["amount"]
    assert (served.is_error, _text(served.content)) == (False, "The sum is 4.")
    assert misfit.is_error
    assert "amount" in _text(misfit.content)
    assert (refused.is_error, _text(refused.content)) == (True, "The ledger is closed on Sundays.")
    assert await _state(server, cookies, mode) == {"sum": 4, "name": mode}


async def test_any_replica_serves_any_mcp_call() -> None:
    store = MemoryStore()
    async with (
        resources(loaded(ENTRIES), plugins=FAKES, store=store) as one,
        resources(loaded(ENTRIES), plugins=FAKES, store=store) as two,
    ):
        await one.seed("ledger", "s", {"name": "any"})
        async with mcp_client(one, "s") as here, mcp_client(two, "s") as there:
            await here.call_tool("add", {"amount": 1})
            last = await there.call_tool("add", {"amount": 1})
    assert _text(last.content) == "The sum is 2."


async def test_mcp_calls_without_a_live_session_are_protocol_errors(server: Served) -> None:
    async with mcp_client(server, None) as client:
        with pytest.raises(MCPError, match="names none"):
            await client.call_tool("add", {"amount": 1})
    async with mcp_client(server, "nobody") as client:
        with pytest.raises(MCPError, match="no resources session 'nobody'"):
            await client.call_tool("add", {"amount": 1})
    assert (await server.http.get(f"{server.url}/ledger/mcp")).status_code == 405


async def test_the_mesh_token_guards_tools_and_mcp() -> None:
    settings = loaded(ENTRIES, security={"mesh_token": "mesh-secret"})
    async with resources(settings, plugins=FAKES) as server:
        for path in ("ledger/add", "ledger/mcp", "ledger/seed_session"):
            assert (await server.post(path, {})).status_code == 401
