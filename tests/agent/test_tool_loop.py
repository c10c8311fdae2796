"""The tool loop: model ↔ tools until an answer or a limit."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.responses import Response

from services.agent.app import check, create_app
from shared.errors import ConfigurationError
from tests.agent.peers import FakeTools, Turn, message, reply, response, spec, tool_call
from tests.agent.rig import Rig, running, settings
from tests.serving import free_port, serving


def _loop(**options: Any) -> dict[str, Any]:
    return {"loop": {"harness": "tool_loop", **options}}


async def _activated(rig: Rig, turns: list[Turn], body: Any = None, **seed: Any) -> httpx.Response:
    rig.proxy.turns = turns
    caller = rig.session(**seed)
    assert (await caller.seed()).status_code == 200
    return await caller.activate(body)


def _lent(url: str, *names: str, **fields: Any) -> list[dict[str, Any]]:
    tools = [spec(name) for name in names]
    return [{"type": "direct_http", "name": "tools", "base_url": url, "tools": tools, **fields}]


@asynccontextmanager
async def _with_tools(tools: FakeTools, **options: Any) -> AsyncIterator[tuple[Rig, str]]:
    async with serving(tools.app()) as url, running(agents=_loop(**options)) as rig:
        yield rig, url


async def test_tools_are_run_in_the_models_order_and_their_outputs_given_back() -> None:
    tools = FakeTools(answers={name: lambda arguments: reply({"got": arguments}) for name in ("first", "second")})
    async with _with_tools(tools) as (rig, url):
        calls = [tool_call("first", '{"n": 1}', "a"), tool_call("second", "", "b")]
        answer = await _activated(
            rig, [response(*calls), response(message("done"))], tool_accesses=_lent(url, "first", "second")
        )
        outputs = [
            {"type": "function_call_output", "call_id": "a", "output": '{"got":{"n":1}}', "status": "completed"},
            {"type": "function_call_output", "call_id": "b", "output": '{"got":{}}', "status": "completed"},
        ]
        assert tools.calls == [("first", {"n": 1}), ("second", {})]
        assert answer.json()["output"] == [*calls, *outputs, message("done")]
        assert answer.json()["usage"]["total_tokens"] == 30
        assert rig.proxy.requests[1]["input"] == [
            {"type": "message", "role": "user", "content": "2+2?"},
            *calls,
            *outputs,
        ]


async def test_lent_tools_are_offered_beside_the_requests_own_which_win() -> None:
    tools = FakeTools(answers={"own": lambda _: reply("yes")})
    async with _with_tools(tools) as (rig, url):
        own = {"type": "function", "name": "own", "parameters": {"type": "object", "properties": {}}}
        answer = await _activated(
            rig,
            [response(tool_call("own")), response(message("ok"))],
            {"input": [{"role": "user", "content": "x"}], "tools": [own], "stream": True},
            tool_accesses=_lent(url, "own", "lent"),
        )
        assert rig.proxy.requests[0]["tools"] == [own, spec("lent")]
        assert "stream" not in rig.proxy.requests[0]
        assert answer.json()["tools"] == [own, spec("lent")]
        assert tools.calls == [("own", {})]


async def test_a_tool_that_nobody_lends_gets_an_error_that_names_it() -> None:
    async with running() as rig:
        answer = await _activated(
            rig,
            [response(tool_call("ghost")), response(message("ok"))],
            {"input": "x", "tools": [{"type": "function", "name": "ghost", "parameters": {}}]},
        )
        assert "'ghost'" in answer.json()["output"][1]["output"]
        assert answer.json()["status"] == "completed"


@pytest.mark.parametrize(
    ("arguments", "words"), [("{", "not valid JSON"), ("[1]", "not a JSON object"), ('{"n": "x"}', "n: not a number")]
)
async def test_a_call_that_is_wrong_is_told_to_the_model(arguments: str, words: str) -> None:
    body = {"error": {"message": "n: not a number"}, "failure": {"failure_kind": "bad_row", "terminal": True}}
    tools = FakeTools(answers={"add": lambda _: reply(body, 422)})
    async with _with_tools(tools) as (rig, url):
        turns = [response(tool_call("add", arguments)), response(message("sorry"))]
        rig.proxy.turns = turns
        caller = rig.session(tool_accesses=_lent(url, "add"))
        await caller.seed()
        answer = (await caller.activate()).json()
        assert words in answer["output"][1]["output"]
        assert answer["output"][2] == message("sorry")
        observed = (await caller.close()).json()["agent_observations"]["tool_calls"]
        assert [call["ok"] for call in observed] == [False]


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (410, {"error": {"message": "gone"}, "failure": {"failure_kind": "session_lost"}}, "session_lost"),
        (500, {"error": {"message": "broken"}, "failure": {"failure_kind": "verifier_error"}}, "verifier_error"),
        (401, {"error": {"message": "who?"}}, "unauthorized"),
        (503, "away", "transport_unreachable"),
    ],
)
async def test_a_tool_server_that_is_broken_ends_the_run_as_an_error(status: int, body: Any, kind: str) -> None:
    tools = FakeTools(answers={"add": lambda _: reply(body, status)})
    async with _with_tools(tools) as (rig, url):
        rig.proxy.turns = [response(tool_call("add"))]
        caller = rig.session(tool_accesses=_lent(url, "add"))
        await caller.seed()
        answer = await caller.activate()
        assert (answer.status_code, answer.json()["failure"]["failure_kind"]) == (status, kind)
        receipt = (await caller.close()).json()
        assert receipt["partial_response"]["output"] == [tool_call("add")]
        assert receipt["cleanup"]["cleanup_confirmed"] is True


async def test_a_foreign_tool_that_crashes_is_told_to_the_model() -> None:
    tools = FakeTools(answers={"add": lambda _: Response("Internal Server Error", 500)})
    async with _with_tools(tools) as (rig, url):
        answer = await _activated(
            rig, [response(tool_call("add")), response(message("ok"))], tool_accesses=_lent(url, "add")
        )
        assert answer.json()["output"][1]["output"] == "Error: Internal Server Error"


async def test_a_tool_server_that_cannot_be_reached_is_an_error_to_retry() -> None:
    async with running() as rig:
        url = f"http://127.0.0.1:{free_port()}"
        answer = await _activated(rig, [response(tool_call("add"))], tool_accesses=_lent(url, "add"))
        failure = answer.json()["failure"]
        assert (failure["failure_kind"], failure["terminal"], failure["stage"]) == (
            "transport_unreachable",
            False,
            "agent",
        )


async def test_a_tool_that_hangs_ends_within_its_bound() -> None:
    async with running(agents=_loop(tool_timeout_s=0.2)) as rig:
        held = asyncio.Event()

        async def hang(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await held.wait()
            writer.close()

        server = await asyncio.start_server(hang, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        answer = await _activated(rig, [response(tool_call("add"))], tool_accesses=_lent(url, "add"))
        held.set()
        server.close()
        await server.wait_closed()
        assert (answer.status_code, answer.json()["failure"]["failure_kind"]) == (504, "transport_timeout")


async def test_cookies_that_a_tool_server_sets_go_back_to_it_and_into_the_receipt() -> None:
    tools = FakeTools(answers={"add": lambda _: reply("ok", set_cookie="rs=new; Path=/")})
    async with _with_tools(tools) as (rig, url):
        rig.proxy.turns = [response(tool_call("add")), response(tool_call("add")), response(message("ok"))]
        lent = _lent(url, "add", cookies={"rs": "old"}, headers={"X-Own": "1"})
        caller = rig.session(tool_accesses=lent)
        await caller.seed()
        await caller.activate()
        assert [headers["cookie"] for headers in tools.headers] == ["rs=old", "rs=new"]
        assert tools.headers[0]["x-own"] == "1"
        assert tools.headers[0]["x-paddock-key"] == caller.key
        assert (await caller.close()).json()["resources_cookies"] == {"rs": "new"}


@pytest.mark.parametrize("own", [True, False])
async def test_only_the_meshs_own_resources_server_is_shown_the_mesh_token(own: bool) -> None:
    tools = FakeTools(answers={"add": lambda _: reply("ok")})
    async with serving(tools.app()) as url:
        services = {"resources": {"url": url if own else "http://127.0.0.1:9"}}
        async with running(security={"mesh_token": "s3cret"}, peers=services) as rig:
            rig.proxy.mesh_token = "s3cret"
            rig.proxy.turns = [response(tool_call("add")), response(message("ok"))]
            rig.http.headers["Authorization"] = "Bearer s3cret"
            caller = rig.session(tool_accesses=_lent(url, "add"))
            await caller.seed()
            assert (await caller.activate()).status_code == 200
            assert ("authorization" in tools.headers[0]) is own


async def test_too_many_steps_end_incomplete_with_every_call_answered() -> None:
    async with running(agents=_loop(max_steps=3)) as rig:
        answer = (await _activated(rig, [response(tool_call("f"))])).json()
        assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_steps"})
        assert [item["type"] for item in answer["output"]] == ["function_call", "function_call_output"] * 3
        assert len(rig.proxy.requests) == 3


async def test_the_token_limit_of_a_run_lowers_each_calls_limit_and_ends_it() -> None:
    async with running(agents=_loop(max_output_tokens_total=12)) as rig:
        body = {"input": "x", "max_output_tokens": 10}
        answer = (await _activated(rig, [response(tool_call("f"), tokens=6)], body)).json()
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [request["max_output_tokens"] for request in rig.proxy.requests] == [10, 6]


async def test_a_forced_tool_choice_holds_until_a_tool_was_called() -> None:
    async with running() as rig:
        await _activated(
            rig, [response(tool_call("f")), response(message("ok"))], {"input": "x", "tool_choice": "required"}
        )
        assert [request["tool_choice"] for request in rig.proxy.requests] == ["required", "auto"]


@pytest.mark.behaviour("AG-7")
async def test_an_episodes_tools_take_the_place_of_the_agents_own_of_the_same_name() -> None:
    tools = FakeTools(answers={"new": lambda _: reply("ok"), "kept": lambda _: reply("ok")})
    async with serving(tools.app()) as url:
        configured = [*_lent(url, "old"), {**_lent(url, "kept")[0], "name": "others"}]
        async with running(agents=_loop(tool_accesses=configured)) as rig:
            await _activated(rig, [response(message("ok"))], tool_accesses=_lent(url, "new"))
            assert [tool["name"] for tool in rig.proxy.requests[0]["tools"]] == ["new", "kept"]


@pytest.mark.parametrize(
    ("agents", "words"),
    [
        ({"loop": {"harness": "tool_lop"}}, "Did you mean 'tool_loop'?"),
        ({"loop": {"harness": "tool_loop", "max_step": 3}}, "agents.loop.max_step"),
        ({"loop": {"harness": "tool_loop", "tool_timeout_s": 0}}, "agents.loop.tool_timeout_s"),
    ],
)
def test_a_wrong_entry_stops_the_start_with_its_key(agents: dict[str, Any], words: str) -> None:
    loaded = settings("http://127.0.0.1:9", agents)
    assert words in str(check(loaded)[0])
    with pytest.raises(ConfigurationError, match=r"agents\.loop"):
        create_app(loaded)


def test_all_wrong_entries_are_named_at_once() -> None:
    loaded = settings("http://127.0.0.1:9", {"a": {"harness": "x"}, "b": {"harness": "tool_loop", "y": 1}})
    assert [problem.key for problem in check(loaded)] == ["agents.a", "agents.b.y"]
