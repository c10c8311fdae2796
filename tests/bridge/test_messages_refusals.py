"""What of a Messages request has no form, and the names under which it is refused."""

from typing import Any

import pytest

from tests.bridge.messages import (
    LOOK,
    PNG,
    assistant,
    messaging,
    refusal,
    responses_of,
    text,
    tool_result,
    tool_use,
    user,
)

TWICE = (user(text("hi")), assistant(tool_use("t1")))


@pytest.mark.behaviour("MS-8")
@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (messaging(container="c"), "container"),
        (messaging(mcp_servers=[{"type": "url"}]), "mcp_servers"),
        (messaging() | {"messages": []}, "messages"),
        (messaging() | {"messages": "hi"}, "messages"),
        (messaging("hi"), "messages[0].role"),
        (messaging({"role": "tool", "content": "x"}), "messages[0].role"),
        (messaging({"role": "user"}), "messages[0].content"),
        (messaging({"role": "user", "content": ["hi"]}), "messages[0].content"),
        (messaging(user()), "messages[0].content"),
        (messaging(user({"type": "text", "text": 1})), "messages[0].content[0].text"),
        (messaging(user({"type": "document", "source": {}})), "messages[0].content[0]"),
        (messaging(user({"type": "search_result"})), "messages[0].content[0]"),
        (messaging(user({"type": "image", "source": {"type": "file"}})), "messages[0].content[0].source"),
        (messaging(user({"type": "image"})), "messages[0].content[0].source"),
        (messaging(user(text("a")), assistant(text("The best"))), "messages[1]"),
        (messaging(user(text("a")), assistant({"type": "server_tool_use"})), "messages[1].content[0]"),
        (messaging(user(text("a")), assistant(tool_use("t") | {"input": "x"})), "messages[1].content[0].input"),
        (messaging(user(tool_result("t1"))), "messages[0].content[0].tool_use_id"),
        (messaging(*TWICE, user(tool_result("t1", [1]))), "messages[2].content[0].content"),
        (messaging(*TWICE, user(tool_result("t1", [{"type": "document"}]))), "messages[2].content[0].content[0]"),
        (messaging(system=[{"type": "image"}]), "system[0]"),
        (messaging(system=7), "system"),
        (messaging({"role": "system", "content": [PNG]}), "messages[0].content[0]"),
        ({"messages": messaging()["messages"]}, "max_tokens"),
        (messaging(max_tokens=0), "max_tokens"),
        (messaging(max_tokens=True), "max_tokens"),
        (messaging(tools={}), "tools"),
        (messaging(tools=["t"]), "tools[0]"),
        (messaging(tools=[{"name": "t"}]), "tools[0]"),
        (messaging(tools=[{"name": 1, "input_schema": {}}]), "tools[0].name"),
        (messaging(tools=[LOOK | {"defer_loading": True}]), "tools.defer_loading"),
        (messaging(tool_choice="auto"), "tool_choice.type"),
        (messaging(tool_choice={"type": "any"}), "tool_choice"),
        (messaging(tool_choice={"type": "tool", "name": "x"}, tools=[LOOK]), "tool_choice.name"),
        (messaging(output_config="x"), "output_config"),
        (messaging(output_config={"task_budget": 3}), "output_config.task_budget"),
        (messaging(output_config={"format": {"type": "regex"}}), "output_config.format"),
        (messaging(output_format={"type": "json_schema"}), "output_format"),
        (messaging(stop_sequences="END"), "stop_sequences"),
        (messaging(stop_sequences=[1]), "stop_sequences"),
        (messaging(metadata="u"), "metadata"),
    ],
)
def test_what_has_no_form_is_refused_by_name(request_: dict[str, Any], param: str) -> None:
    assert refusal(request_).param == param


def test_stop_sequences_have_no_form_in_the_responses_api() -> None:
    refused = refusal(messaging(stop_sequences=["END"]), speaks="responses")
    assert refused.param == "stop_sequences"
    assert "the Responses API" in refused.message
    assert "stop" not in responses_of(messaging(stop_sequences=[]), speaks="responses").request
