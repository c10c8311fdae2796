"""Tools, sampling and other options of a Messages request."""

from typing import Any

import pytest

from services.model_proxy.bridge.capabilities import Capabilities, Profile
from services.model_proxy.bridge.messages_request import from_messages
from tests.bridge.chats import PLAIN
from tests.bridge.messages import (
    LOOK,
    chat_of,
    messaging,
    refusal,
    responses_of,
)


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
