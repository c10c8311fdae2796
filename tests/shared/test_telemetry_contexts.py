"""Whose a line is, and what it hides, when plug-ins and routes fail in the middle of many requests at once."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import httpx2
import pytest
from fastapi import Request, Response
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from shared.contracts.resources import RESOURCES_SESSION_HEADER
from shared.http.service import Mesh, create_service
from shared.settings import LoadedSettings, Settings
from tests.resources.rig import FAKES, Served, loaded, resources, verify_body
from tests.serving import serving
from tests.shared.test_telemetry import Lines

SECRET = "a plain secret of the mesh"
LEDGER = {"ledger": {"verifier": "scripted", "tools": ["ledger"]}}


@pytest.fixture
def written() -> Iterator[Lines]:
    """What this process logs, as its services would write it."""
    lines = Lines()
    root = logging.getLogger()
    root.addHandler(lines.handler)
    try:
        yield lines
    finally:
        root.removeHandler(lines.handler)


async def _break_tool(server: Served, n: int) -> None:
    headers = {
        RESOURCES_SESSION_HEADER: f"s{n}",
        "X-Paddock-Key": f"r{n}",
        "traceparent": f"00-{n + 1:032x}-{n + 1:016x}-01",
    }
    async with (
        httpx2.AsyncClient(headers=headers, trust_env=False) as http,
        Client(streamable_http_client(f"{server.url}/ledger/mcp", http_client=http), mode="auto") as client,
    ):
        with pytest.raises(MCPError, match="ink is out"):
            await client.call_tool("break_down", {})


async def test_lines_of_tools_over_mcp_are_those_of_their_own_episode(written: Lines) -> None:
    async with resources(loaded(LEDGER), plugins=FAKES) as server:
        for n in range(10):
            await server.seed("ledger", f"s{n}", {"name": f"n{n}"})
        await asyncio.gather(*(_break_tool(server, n) for n in range(10)))
    failed = [line for line in written.all if line["message"] == "tool failed"]
    assert len(failed) == 10
    assert sorted((line["key"], line["trace_id"]) for line in failed) == [(f"r{n}", f"{n + 1:032x}") for n in range(10)]


async def test_what_a_verifier_raises_is_told_and_logged_without_its_credential(written: Lines) -> None:
    task = {"name": "told", "end": "raise"}
    async with resources(loaded({"quiz": {"verifier": "scripted"}}), plugins=FAKES) as server:
        cookies = await server.seed("quiz", "s", task)
        refused = await server.post("quiz/verify", verify_body(task), cookies=cookies, headers={"X-Paddock-Key": "r1"})
    assert refused.status_code == 500
    assert "the answer sheet is missing" in refused.text
    (line,) = [line for line in written.all if line["message"] == "verifier failed"]
    assert (line["key"], line["stage"]) == ("s", "verification")
    assert "the answer sheet is missing" in line["exception"]
    assert "sk-abcdefghij" not in refused.text + written.stream.getvalue()


@asynccontextmanager
async def _nothing(_mesh: Mesh) -> AsyncIterator[None]:
    yield


async def test_an_unexpected_error_is_told_by_its_type_and_logged_without_the_meshs_secrets(written: Lines) -> None:
    settings = Settings.model_validate({"security": {"mesh_token": SECRET, "client_token": f"{SECRET} for clients"}})
    service = create_service("agent", LoadedSettings(settings, {}), lifespan=_nothing)

    async def fail(request: Request) -> Response:
        raise KeyError(request.headers["authorization"], f"{SECRET} for clients")

    service.add_bare_route("POST", "/fail", fail)
    async with serving(service) as url, httpx.AsyncClient(trust_env=False) as client:
        headers = {"Authorization": f"Bearer {SECRET}", "X-Paddock-Key": "r1"}
        answered = await client.post(f"{url}/fail", headers=headers)
    assert answered.status_code == 500
    assert "Unexpected KeyError" in answered.text
    (line,) = [line for line in written.all if line["message"] == "unexpected error"]
    assert line["key"] == "r1"
    assert "KeyError" in line["exception"]
    assert SECRET not in answered.text + written.stream.getvalue()
