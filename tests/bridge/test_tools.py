"""Tools: flat names, custom tools, groups, hosted tools, and the choice among them."""

import re
from typing import Any

import pytest

from services.model_proxy.bridge.names import NameMap, ToolName
from services.model_proxy.bridge.refusals import RequestError
from tests.bridge.chats import LOOK_UP, SHELL, asking, chat_of


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, **fields}


def group(name: str, *tools: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "tools": list(tools), **fields}


def sent(*tools: dict[str, Any], profile: str = "openai", **fields: Any) -> dict[str, Any]:
    return chat_of(asking(tools=list(tools), **fields), profile=profile).body


def sent_names(body: dict[str, Any]) -> list[str]:
    return [tool["function"]["name"] for tool in body["tools"]]


def test_a_function_keeps_its_schema_and_says_strict_only_when_it_is() -> None:
    plain, strict, bare = sent(LOOK_UP, {**LOOK_UP, "name": "s", "strict": True}, function("bare", strict=False))[
        "tools"
    ]
    assert plain == {"type": "function", "function": {k: v for k, v in LOOK_UP.items() if k != "type"}}
    assert strict["function"]["strict"] is True
    assert bare["function"] == {"name": "bare", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.behaviour("MS-8", "MS-11")
def test_a_custom_tool_becomes_a_function_of_one_string() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /x+/"}
    plain, formed = sent(SHELL, {**SHELL, "name": "patch", "format": grammar})["tools"]
    parameters = plain["function"]["parameters"]
    assert parameters["required"] == ["input"]
    assert parameters["properties"]["input"]["type"] == "string"
    assert "lark grammar:\nstart: /x+/" in formed["function"]["parameters"]["properties"]["input"]["description"]


@pytest.mark.behaviour("MS-11")
def test_groups_are_flattened_to_distinct_valid_names() -> None:
    long = "n" * 70
    body = sent(
        group("mcp__a", function("open"), SHELL, description="About a."),
        group("mcp__b", function("open"), function("né")),
        group("mcp__none"),
        function("open"),
        function("mcp__a__open"),
        function(long),
    )
    flat = sent_names(body)
    assert len(flat) == len(set(flat)) == 7
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) for name in flat)
    assert flat[4:6] == ["open", "mcp__a__open"]
    assert flat[2] == "mcp__b__open"


@pytest.mark.behaviour("MS-11")
def test_flat_names_are_the_same_in_every_turn_and_lead_back() -> None:
    tools = [group("ns", function("a b"), SHELL), function("ns__shell")]
    first, second = chat_of(asking(tools=tools)), chat_of(asking("later", tools=tools))
    assert sent_names(first.body) == sent_names(second.body)
    back = [first.names.tool(name) for name in sent_names(first.body)]
    assert back == [ToolName("ns", "a b"), ToolName("ns", "shell", "custom"), ToolName(None, "ns__shell")]
    assert first.names.tool("never_sent") == ToolName(None, "never_sent")


def test_one_name_may_stand_for_tools_of_two_kinds() -> None:
    names = NameMap()
    flats = {names.add(ToolName(None, "go", kind)) for kind in ("function", "custom", "tool_search")}
    assert len(flats) == 3
    assert names.flat(ToolName("x", "go")) is None


def test_a_group_loses_its_description_on_record() -> None:
    assert chat_of(asking(tools=[group("g", LOOK_UP, description="d")])).dropped == ("tools.namespace.description",)


def test_a_tool_that_is_declared_twice_is_sent_once() -> None:
    assert sent_names(sent(LOOK_UP, {**LOOK_UP, "description": "again"})) == ["look_up"]


@pytest.mark.behaviour("MS-11")
def test_hosted_tools_are_dropped_for_codex_and_refused_elsewhere() -> None:
    tools = [LOOK_UP, {"type": "web_search"}]
    chat = chat_of(asking(tools=tools), profile="codex")
    assert sent_names(chat.body) == ["look_up"]
    assert chat.dropped == ("tools.web_search",)
    for profile in ("openai", "strict"):
        with pytest.raises(RequestError, match="'web_search'") as refusal:
            chat_of(asking(tools=tools), profile=profile)
        assert refusal.value.param == "tools[1]"


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("x", "tools"),
        ([{"type": "function"}], "tools[0].name"),
        ([7], "tools[0]"),
        ([{"type": ["function"]}], "tools[0]"),
        ([{"type": "tool_search", "execution": "server"}], "tools[0]"),
        ([group("g", {"type": "web_search"})], "tools[0].tools[0]"),
        ([{"type": "namespace", "name": "g", "tools": 7}], "tools[0].tools"),
    ],
)
def test_a_malformed_tool_is_refused_with_its_place(tools: Any, param: str) -> None:
    with pytest.raises(RequestError) as refusal:
        chat_of(asking(tools=tools), profile="codex")
    assert refusal.value.param == param


@pytest.mark.behaviour("MS-8")
@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "look_up"}, {"type": "function", "function": {"name": "look_up"}}),
        ({"type": "custom", "name": "shell"}, {"type": "function", "function": {"name": "shell"}}),
        (
            {"type": "function", "namespace": "g", "name": "look_up"},
            {"type": "function", "function": {"name": "g__look_up"}},
        ),
        ({"type": "tool_search"}, {"type": "function", "function": {"name": "tool_search"}}),
    ],
)
def test_each_form_of_choice_reaches_the_upstream(choice: Any, expected: Any) -> None:
    search = {"type": "tool_search", "execution": "client"}
    assert sent(LOOK_UP, SHELL, group("g", LOOK_UP), search, tool_choice=choice)["tool_choice"] == expected


def test_allowed_tools_are_the_only_ones_sent() -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "shell"}]}
    body = sent(LOOK_UP, SHELL, tool_choice=choice)
    assert (sent_names(body), body["tool_choice"]) == (["shell"], "required")


@pytest.mark.behaviour("MS-8")
def test_without_tools_neither_choice_nor_parallel_calls_are_sent() -> None:
    body = sent(tool_choice="auto", parallel_tool_calls=True)
    assert body.keys() == {"model", "messages"}


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "function", "name": "gone"}, "tool_choice"),
        ({"type": "function"}, "tool_choice.name"),
        ({"type": "function", "name": "look_up", "namespace": ["g"]}, "tool_choice.namespace"),
        ({"type": "custom", "name": "look_up"}, "tool_choice"),
        ({"type": "web_search"}, "tool_choice"),
        ("sometimes", "tool_choice"),
        ({"type": "allowed_tools", "mode": "none", "tools": []}, "tool_choice"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}, "tool_choice.tools[0]"),
    ],
)
def test_a_choice_that_cannot_be_said_is_refused_never_ignored(choice: Any, param: str) -> None:
    with pytest.raises(RequestError) as refusal:
        sent(LOOK_UP, tool_choice=choice)
    assert refusal.value.param == param


def test_a_required_choice_needs_tools() -> None:
    with pytest.raises(RequestError, match="needs tools"):
        sent(tool_choice="required")
    with pytest.raises(RequestError, match="not among 'tools'"):
        sent({"type": "web_search"}, profile="codex", tool_choice={"type": "function", "name": "web_search"})
