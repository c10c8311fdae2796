"""Requests of the shapes that Codex sends, and whole turns: what the model answers, replayed in the next request."""

from typing import Any

import pytest

from tests.bridge.chats import Played, chat_of, chunk, piece

EXEC = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: LINE+\nLINE: /[^\\n]*\\n/\n"},
}
NOTES = {"type": "namespace", "name": "mcp__notes", "description": "", "tools": [{**EXEC, "name": "add"}]}
SCRIPTS = {"type": "namespace", "name": "functions", "description": "", "tools": [{**PATCH, "name": "exec"}, EXEC]}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": {"type": "object"}}
WEB = {"type": "web_search", "external_web_access": True}
CONTEXT = [
    {
        "type": "message",
        "id": "msg_1",
        "role": "developer",
        "content": [{"type": "input_text", "text": "Permissions."}],
    },
    {"type": "message", "id": "msg_2", "role": "user", "content": [{"type": "input_text", "text": "Environment."}]},
    {"type": "message", "id": "msg_3", "role": "user", "content": [{"type": "input_text", "text": "Do the task."}]},
]


def codex(*items: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "model": "mock-model",
        "input": [*CONTEXT, *items],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": None,
        "store": False,
        "stream": True,
        "include": [],
        "prompt_cache_key": "thread",
        "client_metadata": {"x": "y"},
        **fields,
    }


def turn(request: dict[str, Any], *entries: dict[str, Any]) -> list[dict[str, Any]]:
    """What the client gets when the model calls as `entries` say."""
    names = chat_of(request, profile="codex").names
    played = Played([chunk(tool_calls=list(entries)), chunk("tool_calls")], request=request, names=names)
    assert played.kinds[-1] == "completed"
    return played.done_items()


@pytest.mark.behaviour("MS-11")
@pytest.mark.parametrize(
    ("fields", "tools"),
    [
        ({"instructions": "Be good.", "tools": [EXEC, NOTES, WEB]}, 2),
        ({"tools": [EXEC, PATCH, SEARCH, WEB], "text": {"verbosity": "low"}, "reasoning": {"effort": "medium"}}, 3),
        ({"reasoning": {"effort": "low", "context": "all_turns"}, "include": ["reasoning.encrypted_content"]}, 0),
        ({"tools": [EXEC], "text": {"format": {"type": "json_schema", "name": "s", "strict": True, "schema": {}}}}, 1),
    ],
)
def test_every_shape_of_request_is_translated(fields: dict[str, Any], tools: int) -> None:
    body = chat_of(codex(**fields), profile="codex").body
    assert [message["role"] for message in body["messages"]] == ["system", "user", "user"]
    assert len(body.get("tools", [])) == tools
    assert ("tool_choice" in body) == ("parallel_tool_calls" in body) == bool(tools)


@pytest.mark.behaviour("MS-11", "MS-12")
@pytest.mark.parametrize(
    ("tools", "flat", "arguments", "expected"),
    [
        ([EXEC], "exec_command", '{"cmd": "ls"}', {"type": "function_call", "name": "exec_command"}),
        ([NOTES], "mcp__notes__add", '{"cmd": "n"}', {"name": "add", "namespace": "mcp__notes"}),
        ([PATCH], "apply_patch", '{"input":"*** Begin\\n"}', {"type": "custom_tool_call", "input": "*** Begin\n"}),
        ([SCRIPTS], "functions__exec", '{"input":"x()"}', {"name": "exec", "namespace": "functions", "input": "x()"}),
        ([SEARCH], "tool_search", '{"query":"q"}', {"type": "tool_search_call", "arguments": {"query": "q"}}),
    ],
)
def test_a_call_comes_back_in_codexs_form_and_is_replayed_as_it_was(
    tools: list[dict[str, Any]], flat: str, arguments: str, expected: dict[str, Any]
) -> None:
    request = codex(tools=tools)
    (item,) = turn(request, piece(0, arguments, id="call_1", name=flat))
    assert item.items() >= expected.items()
    body = chat_of(codex(item, tools=tools), profile="codex").body
    assert body["messages"][-1]["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": flat, "arguments": arguments}}
    ]


@pytest.mark.behaviour("MS-11")
def test_code_mode_declares_its_tools_among_the_input() -> None:
    declared = {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": [SCRIPTS]}
    body = chat_of(codex(declared), profile="codex").body
    assert [tool["function"]["name"] for tool in body["tools"]] == ["functions__exec", "functions__exec_command"]


@pytest.mark.behaviour("MS-11", "MS-12")
def test_tools_that_a_search_found_can_be_called() -> None:
    found = {
        "type": "tool_search_output",
        "call_id": "s1",
        "status": "completed",
        "execution": "client",
        "tools": [NOTES],
    }
    request = codex(*turn(codex(tools=[SEARCH]), piece(0, "{}", id="s1", name="tool_search")), found, tools=[SEARCH])
    (item,) = turn(request, piece(0, "{}", id="c2", name="mcp__notes__add"))
    assert (item["namespace"], item["name"]) == ("mcp__notes", "add")


def test_parallel_calls_and_an_image_come_in_the_order_that_chat_wants() -> None:
    calls = turn(codex(tools=[EXEC]), *(piece(n, "{}", id=f"c{n}", name="exec_command") for n in range(3)))
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    outputs = [
        {
            "type": "function_call_output",
            "id": f"fco_{n}",
            "call_id": f"c{n}",
            "output": [picture] if n == 1 else f"out {n}",
        }
        for n in range(3)
    ]
    body = chat_of(codex(*calls, *outputs, tools=[EXEC]), profile="codex").body
    assert [message["role"] for message in body["messages"][3:]] == ["assistant", "tool", "tool", "tool", "user"]


def test_reasoning_with_explicit_nulls_is_replayed() -> None:
    nulls: dict[str, Any] = {"content": None, "encrypted_content": None}
    item = {"type": "reasoning", "id": "rs_1", "summary": [], **nulls}
    thought = {**item, "content": [{"type": "reasoning_text", "text": "raw chain"}]}
    answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]}
    body = chat_of(codex(item, thought, answer), profile="codex").body
    assert body["messages"][-1] == {"role": "assistant", "content": "ok", "reasoning": "raw chain"}
