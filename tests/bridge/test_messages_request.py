"""A Messages request in Chat Completions and in the Responses API."""

from copy import deepcopy
from typing import Any

import pytest

from services.model_proxy.bridge.capabilities import Capabilities, Profile
from services.model_proxy.bridge.messages_request import from_messages
from services.model_proxy.bridge.messages_thinking import opened, signature_of
from services.model_proxy.bridge.refusals import RequestError
from tests.bridge.chats import PLAIN
from tests.bridge.messages import (
    LOOK,
    PNG,
    assistant,
    chat_of,
    messaging,
    responses_of,
    text,
    tool_result,
    tool_use,
    user,
)

CACHED = {"cache_control": {"type": "ephemeral"}}
DATA_URL = "data:image/png;base64,aGk="


def refusal(request: dict[str, Any], **how: Any) -> RequestError:
    with pytest.raises(RequestError) as refused:
        responses_of(request, **how)
    assert refused.value.param in refused.value.message
    return refused.value


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


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "look_up"}, {"type": "function", "function": {"name": "look_up"}}),
    ],
)
def test_a_tool_choice_is_translated(choice: dict[str, Any], sent: Any) -> None:
    body = chat_of(messaging(tools=[LOOK], tool_choice=choice)).body
    assert body["tool_choice"] == sent
    assert "parallel_tool_calls" not in body


def test_one_call_at_a_time_is_asked_for_where_it_can_be() -> None:
    request = messaging(tools=[LOOK], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert chat_of(request).body["parallel_tool_calls"] is False
    cannot = Capabilities(parallel_tool_calls=False)
    assert chat_of(request, capabilities=cannot).dropped == ("tool_choice.disable_parallel_tool_use",)
    assert refusal(request, capabilities=cannot, profile="strict").code == "unsupported_parameter"
    without_tools = messaging(tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert "parallel_tool_calls" not in chat_of(without_tools).body


def test_a_tool_name_that_is_too_long_upstream_is_restored_from_a_short_one() -> None:
    long = LOOK | {"name": "l" * 100}
    chat = chat_of(messaging(tools=[long], tool_choice={"type": "tool", "name": long["name"]}))
    flat = chat.body["tools"][0]["function"]["name"]
    assert len(flat) == 64
    assert chat.names.tool(flat).name == long["name"]


def test_tools_of_anthropics_own_servers_are_dropped_by_profile_or_refused() -> None:
    request = messaging(tools=[{"type": "web_search_20250305", "name": "web_search"}, LOOK])
    assert refusal(request).param == "tools[0]"
    chat = chat_of(request, profile="codex")
    assert chat.dropped == ("tools.web_search",)
    assert [tool["function"]["name"] for tool in chat.body["tools"]] == ["look_up"]


@pytest.mark.behaviour("MS-16")
def test_top_k_is_sent_where_the_server_takes_it() -> None:
    can = Capabilities(top_k=True)
    request = messaging(top_k=20)
    assert refusal(request).param == "top_k"
    assert chat_of(request, capabilities=can, defaults={"top_k": 5}).body["top_k"] == 20
    assert chat_of(request, capabilities=can, overrides={"top_k": 5}).body["top_k"] == 5
    assert chat_of(request, capabilities=can).effective["top_k"] == 20
    assert chat_of(messaging(), capabilities=can, defaults={"top_k": 5}).body["top_k"] == 5


def test_what_a_profile_drops_is_not_sent() -> None:
    careless = Profile(name="careless", drops_messages_fields=frozenset({"top_k"}))
    translated = from_messages(messaging(top_k=20), speaks="responses", capabilities=PLAIN, profile=careless)
    assert (translated.top_k, translated.dropped) == (None, ("top_k",))


def test_a_tool_may_have_no_description() -> None:
    bare = {name: LOOK[name] for name in ("name", "input_schema")}
    assert "description" not in chat_of(messaging(tools=[bare])).body["tools"][0]["function"]


def test_effort_and_thinking_are_sent_where_the_server_takes_them() -> None:
    request = messaging(output_config={"effort": "low", "format": None}, thinking={"type": "adaptive"})
    chat = chat_of(request, capabilities=Capabilities(reasoning_effort=True))
    assert (chat.body["reasoning_effort"], chat.dropped) == ("low", ("thinking",))
    assert chat_of(request).dropped == ("output_config.effort", "thinking")
    assert refusal(request, profile="strict").param == "output_config.effort"
    assert refusal(messaging(thinking={"type": "adaptive"}), profile="strict").param == "thinking"


@pytest.mark.parametrize("fields", [("output_config", "format"), ("output_format",)])
def test_a_wanted_schema_becomes_the_response_format(fields: tuple[str, ...]) -> None:
    wanted: Any = {"type": "json_schema", "schema": {"type": "object"}}
    for name in reversed(fields):
        wanted = {name: wanted}
    sent = chat_of(messaging(**wanted)).body["response_format"]
    assert sent == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
    }


def test_template_arguments_in_the_metadata_count_where_they_may() -> None:
    request = messaging(metadata={"user_id": "u", "chat_template_kwargs": {"thinking": True}})
    may = Capabilities(chat_template_kwargs=True)
    assert chat_of(request, capabilities=may).body["chat_template_kwargs"] == {"thinking": True}
    assert chat_of(request).dropped == ("metadata",)


def test_what_asks_for_nothing_is_never_refused() -> None:
    tool = LOOK | {"defer_loading": False, "allowed_callers": ["direct"], "input_examples": None}
    neutral: dict[str, Any] = {
        "service_tier": "auto",
        "mcp_servers": [],
        "metadata": {},
        "container": None,
        "thinking": None,
    }
    assert responses_of(messaging(tools=[tool], **neutral), profile="strict").dropped == (
        "service_tier",
        "mcp_servers",
        "tools.defer_loading",
        "tools.allowed_callers",
        "metadata",
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
