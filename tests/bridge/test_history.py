"""Input items → messages: order, merging, roles, images, reasoning, tool search."""

from typing import Any

import orjson
import pytest

from services.model_proxy.bridge.capabilities import Capabilities
from services.model_proxy.bridge.refusals import RequestError
from tests.bridge.chats import LOOK_UP, PLAIN, SHELL, answer, asking, call, chat_of, completion, names_of

USER = {"role": "user", "content": "go"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low"}
CHAT_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}}


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def called(call_id: str, arguments: str = "{}", **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "look_up", "arguments": arguments, **fields}


def gave(call_id: str, output: Any = "ok") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def thought(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}], **fields}


def messages(*items: Any, capabilities: Capabilities = PLAIN, **fields: Any) -> list[dict[str, Any]]:
    body = chat_of(asking(list(items), **fields), capabilities=capabilities, profile="codex").body
    result: list[dict[str, Any]] = body["messages"]
    return result


@pytest.mark.behaviour("MS-8")
def test_instructions_and_all_system_texts_become_the_one_first_message() -> None:
    parts = [{"type": "input_text", "text": "B1"}, {"type": "input_text", "text": "B2"}]
    items = [{"role": "developer", "content": parts}, USER, said("hello"), {"role": "system", "content": "C"}, USER]
    assert messages(*items, instructions="A") == [
        {"role": "system", "content": "A\n\nB1\nB2\n\nC"},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "go"},
    ]


def test_an_upstream_that_knows_developers_gets_them_where_they_stand() -> None:
    items = [said("hello"), {"role": "developer", "content": "B"}, said("again")]
    sent = messages(*items, instructions="A", capabilities=Capabilities(developer_role=True))
    assert [message["role"] for message in sent] == ["system", "assistant", "developer", "assistant"]


@pytest.mark.behaviour("MS-9", "MS-12")
def test_neighbouring_assistant_items_become_one_message() -> None:
    sent = messages(
        USER, thought("why"), said("Looking."), called("c1", '{ "word":1}'), called("c2"), gave("c1"), gave("c2")
    )
    assert sent[1] == {
        "role": "assistant",
        "content": "Looking.",
        "reasoning": "why",
        "tool_calls": [call("c1", "look_up", '{ "word":1}'), call("c2", "look_up", "{}")],
    }
    assert [message.get("tool_call_id") for message in sent[2:]] == ["c1", "c2"]


def test_texts_and_thoughts_of_one_turn_are_kept_apart() -> None:
    sent = messages(thought("a"), said("x"), thought("b"), said("y"))
    assert sent == [{"role": "assistant", "content": "x\n\ny", "reasoning": "a\n\nb"}]


@pytest.mark.behaviour("MS-12")
def test_outputs_stand_behind_their_own_call_wherever_they_came() -> None:
    sent = messages(
        called("c1"), USER, called("c2"), gave("c2", "two"), gave("c1", "one"), called("c1"), gave("c1", "new")
    )
    assert [message.get("content") for message in sent] == [None, "one", "go", None, "two", None, "new"]


def test_a_turn_of_thought_alone_has_empty_text() -> None:
    assert messages(thought("hm"), USER)[0] == {"role": "assistant", "content": "", "reasoning": "hm"}


@pytest.mark.behaviour("MS-9")
@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("reasoning", {"content": "x", "reasoning": "why"}),
        ("reasoning_content", {"content": "x", "reasoning_content": "why"}),
        ("think_tags", {"content": "<think>why</think>x"}),
        ("none", {"content": "x"}),
    ],
)
def test_reasoning_is_replayed_under_the_configured_name(field: Any, expected: dict[str, Any]) -> None:
    capabilities = Capabilities(reasoning_field=field)
    assert messages(thought("why"), said("x"), capabilities=capabilities) == [{"role": "assistant", **expected}]
    dropped = chat_of(asking([thought("why"), said("x")]), capabilities=capabilities).dropped
    assert dropped == (("input.reasoning",) if field == "none" else ())


def test_a_think_tag_turn_without_text_needs_none() -> None:
    capabilities = Capabilities(reasoning_field="think_tags")
    assert messages(thought("why"), called("c"), capabilities=capabilities)[0]["content"] == "<think>why</think>"


def test_a_summary_stands_in_for_reasoning_and_encrypted_reasoning_is_dropped_or_refused() -> None:
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}], "content": None}
    assert messages(summary, said("x"))[0]["reasoning"] == "short"
    assert messages({"type": "reasoning", "summary": []}, USER) == [USER]
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": "xyz"}
    assert chat_of(asking([sealed, USER])).dropped == ("input.reasoning.encrypted_content",)
    with pytest.raises(RequestError) as refusal:
        chat_of(asking([sealed, USER]), profile="strict")
    assert refusal.value.param == "input[0].encrypted_content"


def test_a_refusal_is_replayed_as_what_was_said() -> None:
    item = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert messages(item) == [{"role": "assistant", "content": "No."}]


def test_user_parts_are_text_where_they_can_be() -> None:
    text = {"type": "input_text", "text": "see"}
    file = {"type": "input_file", "file_data": "data:x", "filename": "a.pdf"}
    sound = {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}
    assert messages({"role": "user", "content": [text, text]})[0]["content"] == "see\nsee"
    assert messages({"role": "user", "content": [text, IMAGE, file, sound]})[0]["content"] == [
        {"type": "text", "text": "see"},
        CHAT_IMAGE,
        {"type": "file", "file": {"file_data": "data:x", "filename": "a.pdf"}},
        sound,
    ]


def test_images_of_a_tool_follow_all_outputs_in_a_user_message() -> None:
    bare = {"type": "input_image", "image_url": "http://x/y.png"}
    sent = messages(
        called("c1"), called("c2"), gave("c1", [{"type": "input_text", "text": "t"}, IMAGE]), gave("c2", [bare])
    )
    assert [message["role"] for message in sent] == ["assistant", "tool", "tool", "user"]
    assert sent[1]["content"] == "t"
    assert sent[2]["content"] == "The output follows in the next user message."
    assert [part["type"] for part in sent[3]["content"]] == ["text", "image_url", "text", "image_url"]
    assert "c1" in sent[3]["content"][0]["text"]


def test_images_of_a_tool_may_stay_where_the_upstream_takes_them() -> None:
    sent = messages(called("c1"), gave("c1", [IMAGE]), capabilities=Capabilities(tool_images="tool_message"))
    assert sent[1] == {"role": "tool", "tool_call_id": "c1", "content": [CHAT_IMAGE]}


@pytest.mark.behaviour("MS-11", "MS-12")
def test_custom_and_grouped_calls_are_replayed_under_the_names_that_are_sent() -> None:
    group = {"type": "namespace", "name": "g", "tools": [LOOK_UP]}
    custom = {"type": "custom_tool_call", "call_id": "c1", "name": "shell", "input": 'say "é"\n'}
    output = {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}
    grouped = called("c2", "", namespace="g")
    chat = chat_of(asking([custom, output, grouped, gave("c2")], tools=[SHELL, group]))
    first, second = (m["tool_calls"][0]["function"] for m in chat.body["messages"] if m["role"] == "assistant")
    assert first["name"] == "shell"
    assert orjson.loads(first["arguments"]) == {"input": 'say "é"\n'}
    assert second == {"name": "g__look_up", "arguments": "{}"}


@pytest.mark.behaviour("MS-11")
def test_tools_from_a_search_and_additional_tools_are_declared() -> None:
    group = {"type": "namespace", "name": "found", "tools": [LOOK_UP]}
    search = {
        "type": "tool_search",
        "execution": "client",
        "description": "Finds tools.",
        "parameters": {"type": "object"},
    }
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [SHELL]},
        USER,
        {"type": "tool_search_call", "call_id": "s1", "execution": "client", "arguments": {"query": "words"}},
        {"type": "tool_search_output", "call_id": "s1", "execution": "client", "tools": [group]},
    ]
    body = chat_of(asking(items, tools=[search])).body
    assert [tool["function"]["name"] for tool in body["tools"]] == ["tool_search", "shell", "found__look_up"]
    assert body["messages"][1]["tool_calls"] == [call("s1", "tool_search", '{"query":"words"}')]
    assert orjson.loads(body["messages"][2]["content"]) == {
        "tools": [{"name": "found__look_up", "description": "Looks a word up."}]
    }


@pytest.mark.behaviour("MS-12")
def test_an_answer_survives_the_next_turn_byte_for_byte() -> None:
    group = {"type": "namespace", "name": "g", "tools": [LOOK_UP]}
    raw = '{ "word" : "\\u00e9",\n"n":1.0}'
    calls = [call("call_a", "g__look_up", raw), call("call_b", "shell", '{"input":"ls\\n"}')]
    chat = completion("tool_calls", content="Let me see.", reasoning="plan", tool_calls=calls)
    output = answer(chat, names=names_of(group, SHELL))["output"]
    replay = messages(*output, gave("call_a"), tools=[group, SHELL])
    assert replay[0] == {"role": "assistant", "content": "Let me see.", "reasoning": "plan", "tool_calls": calls}


@pytest.mark.behaviour("MS-9")
@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "item_reference", "id": "x"}, "input[0]"),
        ({"type": "computer_call"}, "input[0]"),
        (7, "input[0]"),
        ({"role": "tool", "content": "x"}, "input[0].role"),
        ({"role": "user", "content": 7}, "input[0].content"),
        ({"role": "user", "content": ["x"]}, "input[0].content[0]"),
        ({"role": "user", "content": [{"type": "hologram"}]}, "input[0].content[0]"),
        ({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}, "input[0].content[0].image_url"),
        ({"role": "user", "content": [{"type": "input_file", "file_url": "http://x"}]}, "input[0].content[0]"),
        ({"role": "system", "content": [IMAGE]}, "input[0].content[0]"),
        (gave("nobody"), "input[0].call_id"),
        ({"type": "function_call", "name": "f"}, "input[0].call_id"),
        ({"type": "custom_tool_call", "name": "f", "call_id": "c"}, "input[0].input"),
    ],
)
def test_an_item_without_a_chat_form_is_refused_with_its_place(item: Any, param: str) -> None:
    with pytest.raises(RequestError) as refusal:
        chat_of(asking([item]), profile="strict")
    assert refusal.value.param == param


def test_items_of_hosted_tools_are_dropped_for_codex() -> None:
    chat = chat_of(asking([USER, {"type": "web_search_call", "id": "ws_1"}]), profile="codex")
    assert chat.body["messages"] == [USER]
    assert chat.dropped == ("input.web_search_call",)


def test_reasoning_without_an_answer_at_the_end_is_left_out_since_it_was_cut_off() -> None:
    asked = chat_of(asking([USER, thought("half a thou")]))
    assert asked.body["messages"] == [USER]
    assert asked.dropped == ("input.reasoning",)
    assert messages(USER, said("x"), thought("why"))[-1] == {"role": "assistant", "content": "x", "reasoning": "why"}
