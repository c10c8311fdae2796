"""Tools of an MCP server, which the real CLI declares in a namespace, or has its model search for."""

import sys
from pathlib import Path

import pytest

from tests.codex.chat import calls, says
from tests.codex.cli import Task
from tests.codex.rig import FREEFORM_MODEL, PICTURE, PICTURE_URL, Rig

pytestmark = pytest.mark.codex

ADD = ("mcp__notes__add", {"first": 2, "second": 3})


def _task(codex: Rig) -> Task:
    picture = codex.work / "picture.png"
    picture.write_bytes(PICTURE)
    return Task(servers={"notes": [sys.executable, str(Path(__file__).with_name("notes_server.py")), str(picture)]})


@pytest.mark.behaviour("MS-11", "MS-12")
async def test_tools_of_a_namespace_are_called(codex: Rig) -> None:
    answers = [calls(ADD), calls(("mcp__notes__burn", {})), calls(("mcp__notes__draw", {})), says("Five.")]
    run = (await codex.run(*answers, task=_task(codex))).completed()
    called = run.printed.items("mcp_tool_call")
    assert [(item["server"], item["tool"], item["status"]) for item in called] == [
        ("notes", "add", "completed"),
        ("notes", "burn", "failed"),
        ("notes", "draw", "completed"),
    ]
    assert called[0]["result"]["structured_content"] == {"result": 5}
    outputs = [message["content"] for message in run.asked[3]["messages"] if message["role"] == "tool"]
    assert '{"result":5}' in outputs[0]
    assert "Error executing tool burn" in outputs[1]
    image = run.asked[3]["messages"][-1]
    assert [part["image_url"]["url"] for part in image["content"] if part["type"] == "image_url"] == [PICTURE_URL]


@pytest.mark.behaviour("MS-11", "MS-12")
async def test_a_tool_that_a_search_found_is_called(codex: Rig) -> None:
    answers = [calls(("tool_search", {"query": "add two numbers"})), calls(ADD), says("Five.")]
    run = (await codex.run(*answers, task=_task(codex), model=FREEFORM_MODEL)).completed()
    first, second, _ = ({tool["function"]["name"] for tool in asked["tools"]} for asked in run.asked)
    assert "tool_search" in first
    assert "mcp__notes__add" in second - first
    assert "Adds two numbers." in run.asked[1]["messages"][-1]["content"]
    (called,) = run.printed.items("mcp_tool_call")
    assert called["result"]["structured_content"] == {"result": 5}
