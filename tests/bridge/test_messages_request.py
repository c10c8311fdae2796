"""A Messages request in Chat Completions and in the Responses API."""

from copy import deepcopy
from typing import Any

import pytest

from services.model_proxy.bridge.capabilities import Capabilities
from services.model_proxy.bridge.messages_thinking import opened, signature_of
from tests.bridge.messages import (
    LOOK,
    PNG,
    assistant,
    chat_of,
    messaging,
    refusal,
    responses_of,
    text,
    tool_result,
    tool_use,
    user,
)

CACHED = {"cache_control": {"type": "ephemeral"}}
DATA_URL = "data:image/png;base64,aGk="


@pytest.mark.behaviour("MS-7", "MS-8")
def test_a_conversation_with_tools_becomes_chat_messages() -> None:
    request = messaging(
        {"role": "user", "content": "What is a word?"},
        assistant(
            {"type": "thinking", "thinking": "Look it up.", "signature": "s"},
            text("I look."),
            tool_use("t1", word="word"),
            tool_use("t2"),
        ),
        user(tool_result("t2", [text("none"), text("at all")]), tool_result("t1"), text("Go on.") | CACHED),
        system=[text("Be brief.") | CACHED, text("Be kind.")],
        tools=[LOOK | CACHED],
        tool_choice={"type": "any"},
        temperature=0.5,
        top_p=0.9,
        stop_sequences=["END"],
        stream=True,
        cache_control={"type": "ephemeral"},
    )
    before = deepcopy(request)
    chat = chat_of(request)
    assert request == before
    assert chat.body == {
        "model": "upstream-model",
        "messages": [
            {"role": "system", "content": "Be brief.\n\nBe kind."},
            {"role": "user", "content": "What is a word?"},
            {
                "role": "assistant",
                "content": "I look.",
                "reasoning": "Look it up.",
                "tool_calls": [
                    {
                        "id": "t1",
                        "type": "function",
                        "function": {"name": "look_up", "arguments": '{"word":"word"}'},
                    },
                    {"id": "t2", "type": "function", "function": {"name": "look_up", "arguments": "{}"}},
                ],
            },
            {"role": "tool", "tool_call_id": "t2", "content": "none\nat all"},
            {"role": "tool", "tool_call_id": "t1", "content": "found"},
            {"role": "user", "content": "Go on."},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "look_up",
                    "description": "Looks a word up.",
                    "parameters": LOOK["input_schema"],
                },
            }
        ],
        "tool_choice": "required",
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["END"],
        "max_tokens": 64,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert chat.dropped == ()
    assert chat.effective == {"temperature": 0.5, "top_p": 0.9, "stop": ["END"], "max_tokens": 64}


@pytest.mark.behaviour("MS-8")
def test_the_same_conversation_becomes_items_for_a_server_of_the_responses_api() -> None:
    request = messaging(
        user(text("Look."), PNG),
        assistant(tool_use("t1", word="w")),
        user(tool_result("t1", [PNG])),
        {"role": "system", "content": "Now be brief."},
        system="Be kind.",
        tools=[{**LOOK, "type": "custom", "strict": True}],
        tool_choice={"type": "tool", "name": "look_up", "disable_parallel_tool_use": True},
        output_config={"effort": "high"},
        metadata={"user_id": "u"},
    )
    translated = responses_of(request, speaks="responses")
    assert translated.request == {
        "model": "m",
        "max_output_tokens": 64,
        "instructions": "Be kind.",
        "input": [
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "Look."},
                    {"type": "input_image", "image_url": DATA_URL},
                ],
            },
            {"type": "function_call", "call_id": "t1", "name": "look_up", "arguments": '{"word":"w"}'},
            {
                "type": "function_call_output",
                "call_id": "t1",
                "output": [{"type": "input_image", "image_url": DATA_URL}],
            },
            {"type": "message", "role": "system", "content": "Now be brief."},
        ],
        "tools": [
            {
                "type": "function",
                "name": "look_up",
                "description": "Looks a word up.",
                "parameters": LOOK["input_schema"],
                "strict": True,
            }
        ],
        "tool_choice": {"type": "function", "name": "look_up"},
        "parallel_tool_calls": False,
        "reasoning": {"effort": "high"},
    }
    assert translated.dropped == ("metadata",)


def test_an_image_of_a_tool_result_follows_the_results() -> None:
    remote = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    chat = chat_of(
        messaging(user(text("hi")), assistant(tool_use("t1")), user(tool_result("t1", [PNG]), remote), tools=[LOOK])
    )
    output, image, after = chat.body["messages"][2:]
    assert output["tool_call_id"] == "t1"
    assert image["content"][-1] == {"type": "image_url", "image_url": {"url": DATA_URL}}
    assert after["content"] == [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]


@pytest.mark.parametrize(
    ("content", "output"),
    [
        ("no such file", "The tool call failed.\nno such file"),
        ([text("no such file")], "The tool call failed.\nno such file"),
        ([], "The tool call failed."),
    ],
)
def test_a_failed_tool_call_says_so_in_its_output(content: Any, output: str) -> None:
    failed = tool_result("t1", content, is_error=True)
    chat = chat_of(messaging(user(text("hi")), assistant(tool_use("t1")), user(failed)))
    assert chat.body["messages"][-1]["content"] == output


@pytest.mark.parametrize("content", [None, "", []])
def test_an_empty_tool_result_is_an_empty_output(content: Any) -> None:
    chat = chat_of(messaging(user(text("hi")), assistant(tool_use("t1")), user(tool_result("t1", content))))
    assert chat.body["messages"][-1] == {"role": "tool", "tool_call_id": "t1", "content": ""}


@pytest.mark.parametrize("content", ["", []])
def test_an_answer_without_a_word_stays_in_the_conversation(content: Any) -> None:
    chat = chat_of(messaging(user(text("hi")), {"role": "assistant", "content": content}, user(text("well?"))))
    assert [message["content"] for message in chat.body["messages"]] == ["hi", "", "well?"]


@pytest.mark.behaviour("MS-9", "MS-12")
def test_reasoning_survives_the_round_trip() -> None:
    open_item = {"type": "reasoning", "id": "rs_1", "summary": [], "content": []}
    sealed_item = {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "zzz"}
    request = messaging(
        user(text("hi")),
        assistant({"type": "thinking", "thinking": "Hm.", "signature": signature_of(open_item)}),
        assistant({"type": "thinking", "thinking": "In short.", "signature": signature_of(sealed_item)}),
        assistant({"type": "thinking", "thinking": "", "signature": signature_of(sealed_item)}),
        assistant({"type": "redacted_thinking", "data": signature_of(sealed_item)}, text("Hello.")),
        user(text("go on")),
    )
    spoken = {"type": "reasoning_text", "text": "Hm."}
    summary = {"type": "summary_text", "text": "In short."}
    sealed = {"type": "reasoning", "id": "rs_2", "encrypted_content": "zzz"}
    assert responses_of(request, speaks="responses").request["input"][1:5] == [
        {"type": "reasoning", "summary": [], "id": "rs_1", "content": [spoken]},
        {**sealed, "summary": [summary]},
        {**sealed, "summary": []},
        {**sealed, "summary": []},
    ]
    chat = chat_of(request, capabilities=Capabilities(reasoning_field="reasoning_content"))
    assert chat.body["messages"][1] == {
        "role": "assistant",
        "content": "Hello.",
        "reasoning_content": "Hm.\n\nIn short.",
    }
    assert chat.dropped == ("messages.redacted_thinking",)


def test_reasoning_that_a_server_does_not_take_is_left_out_and_told() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    request = messaging(user(text("hi")), assistant(thought), user(text("well?")))
    assert chat_of(request, capabilities=Capabilities(reasoning_field="none")).dropped == ("messages.thinking",)


@pytest.mark.parametrize("signature", [None, 7, "", "EqQBCgIYAhIM", "é", "W10=", "eyJpZCI6IDF9", "eyJhIjogImIifQ=="])
def test_a_foreign_signature_opens_nothing(signature: Any) -> None:
    assert opened(signature) is None


def test_redacted_thinking_of_another_server_is_dropped_or_refused() -> None:
    request = messaging(
        user(text("hi")), assistant({"type": "redacted_thinking", "data": "Eq=="}, text("a")), user(text("b"))
    )
    assert responses_of(request, speaks="responses").dropped == ("messages.redacted_thinking",)
    assert refusal(request, profile="strict").param == "messages.redacted_thinking"
