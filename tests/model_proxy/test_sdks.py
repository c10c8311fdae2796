"""The official clients of both makers against the proxy on a socket: it takes what they send, they read its answers."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel

from tests.model_proxy.sdks import Clients, clients_of, guarded

SCRIPT = """
- match: weather
  turns:
    - tool_calls: [{name: get_weather, arguments: {city: Oslo}}, {name: get_weather, arguments: {city: Bergen}}]
      reasoning: Ask for both.
    - text: It rains in both.
      usage: {prompt_tokens: 20, completion_tokens: 5, total_tokens: 25, prompt_tokens_details: {cached_tokens: 8}}
- match: as JSON
  text: '{"city": "Oslo", "degrees": 7}'
- {match: long, text: one two three four five six seven eight nine ten}
- {match: cut, text: one two three four five six seven eight nine ten, cut_after_chunks: 2}
- {match: limit, text: one two three, finish_reason: length}
"""
ASKED = "How is the weather?"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class Weather(BaseModel):
    city: str
    degrees: int


@pytest.fixture
async def clients(tmp_path: Path) -> AsyncIterator[Clients]:
    """Before the scripted upstream."""
    script = tmp_path / "script.yaml"
    script.write_text(SCRIPT, encoding="utf-8")
    async with clients_of(guarded(upstream="scripted", script=str(script))) as found:
        yield found


MESSAGE_TOOLS: list[Any] = [{"name": "get_weather", "description": "Tells it.", "input_schema": SCHEMA}]
RESPONSE_TOOLS: list[Any] = [{"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}]
CHAT_TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]


@pytest.mark.behaviour("MS-1", "MS-12")
async def test_anthropics_client_makes_a_round_trip_with_tools(clients: Clients) -> None:
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    asked: dict[str, Any] = {"model": "policy", "max_tokens": 100, "tools": MESSAGE_TOOLS}
    first = await clients.anthropic.messages.create(**asked, messages=messages)
    thinking, *calls = first.content
    assert thinking.type == "thinking"
    assert [(call.type, call.type == "tool_use" and call.input) for call in calls] == [
        ("tool_use", {"city": "Oslo"}),
        ("tool_use", {"city": "Bergen"}),
    ]
    assert first.stop_reason == "tool_use"
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
        for call in calls
        if call.type == "tool_use"
    ]
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = await clients.anthropic.messages.create(
        **asked, messages=messages, system=[{"type": "text", "text": "Be brief."}], tool_choice={"type": "auto"}
    )
    assert [(block.type, block.type == "text" and block.text) for block in second.content] == [
        ("text", "It rains in both.")
    ]
    usage = second.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (12, 8, 5)
    recorded = (await clients.capture()).calls
    assert [call.response_id for call in recorded] == [first.id, second.id]
    assert recorded[0].call_ids == tuple(result["tool_use_id"] for result in results)


@pytest.mark.behaviour("MS-13")
async def test_anthropics_client_reads_a_stream(clients: Clients) -> None:
    asked: dict[str, Any] = {"model": "policy", "max_tokens": 100, "tools": MESSAGE_TOOLS}
    question: list[Any] = [{"role": "user", "content": ASKED}]
    async with clients.anthropic.messages.stream(**asked, messages=question) as stream:
        kinds = [one.type async for one in stream]
        message = await stream.get_final_message()
    assert {"thinking", "input_json", "content_block_stop", "message_stop"} <= set(kinds)
    assert [block.input for block in message.content if block.type == "tool_use"] == [
        {"city": "Oslo"},
        {"city": "Bergen"},
    ]
    assert (message.stop_reason, message.usage.output_tokens > 0) == ("tool_use", True)
    async with clients.anthropic.messages.stream(
        **asked, messages=[{"role": "user", "content": "a long one"}]
    ) as stream:
        pieces = [piece async for piece in stream.text_stream]
    assert len(pieces) > 1
    assert "".join(pieces) == "one two three four five six seven eight nine ten"


async def test_anthropics_client_parses_an_answer(clients: Clients) -> None:
    parsed = await clients.anthropic.messages.parse(
        model="policy",
        max_tokens=100,
        messages=[{"role": "user", "content": "Oslo as JSON"}],
        output_format=Weather,
    )
    assert parsed.parsed_output == Weather(city="Oslo", degrees=7)


async def test_anthropics_client_is_told_of_the_output_limit(clients: Clients) -> None:
    message = await clients.anthropic.messages.create(
        model="policy", max_tokens=3, messages=[{"role": "user", "content": "limit"}]
    )
    assert message.stop_reason == "max_tokens"


@pytest.mark.behaviour("MS-4")
async def test_anthropics_client_is_told_of_a_cut_stream(clients: Clients) -> None:
    with pytest.raises(anthropic.APIStatusError, match="dropped the connection") as failed:
        async with clients.anthropic.messages.stream(
            model="policy", max_tokens=100, messages=[{"role": "user", "content": "cut"}]
        ) as stream:
            await stream.until_done()
    assert (failed.value.type, failed.value.error_code) == ("api_error", "upstream_disconnected")


async def test_anthropics_client_is_told_that_tokens_are_not_counted_ahead(clients: Clients) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not counted ahead"):
        await clients.anthropic.messages.count_tokens(model="policy", messages=[{"role": "user", "content": "x"}])


async def test_anthropics_client_is_told_which_field_has_no_form(clients: Clients) -> None:
    with pytest.raises(anthropic.BadRequestError, match="'messages' must be") as refused:
        await clients.anthropic.messages.create(model="policy", max_tokens=3, messages=[])
    assert (refused.value.type, refused.value.error_code) == ("invalid_request_error", "invalid_value")


@pytest.mark.behaviour("MS-1", "MS-12")
async def test_openais_client_makes_a_round_trip_with_tools_by_responses(clients: Clients) -> None:
    given: list[Any] = [{"role": "user", "content": ASKED}]
    asked: dict[str, Any] = {"model": "policy", "tools": RESPONSE_TOOLS, "store": False}
    first = await clients.openai.responses.create(**asked, input=given)
    calls = [item for item in first.output if item.type == "function_call"]
    assert [call.arguments for call in calls] == ['{"city":"Oslo"}', '{"city":"Bergen"}']
    given += [item.to_dict() for item in first.output]
    given += [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
    second = await clients.openai.responses.create(**asked, input=given)
    assert second.output_text == "It rains in both."
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens == 8
    assert [call.call_ids for call in (await clients.capture()).calls] == [tuple(call.call_id for call in calls), ()]


@pytest.mark.behaviour("MS-13")
async def test_openais_client_reads_a_responses_stream(clients: Clients) -> None:
    async with clients.openai.responses.stream(model="policy", input=ASKED, tools=RESPONSE_TOOLS) as stream:
        kinds = [one.type async for one in stream]
        response = await stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    assert kinds[-1] == "response.completed"
    assert [item.arguments for item in response.output if item.type == "function_call"] == [
        '{"city":"Oslo"}',
        '{"city":"Bergen"}',
    ]
    pieces = [
        one.delta
        async for one in await clients.openai.responses.create(model="policy", input="a long one", stream=True)
        if one.type == "response.output_text.delta"
    ]
    assert len(pieces) > 1
    assert "".join(pieces) == "one two three four five six seven eight nine ten"


@pytest.mark.behaviour("MS-4")
async def test_openais_client_is_told_of_a_cut_responses_stream(clients: Clients) -> None:
    stream = await clients.openai.responses.create(model="policy", input="cut", stream=True)
    last = [one async for one in stream][-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert "dropped the connection" in last.response.error.message


async def test_openais_client_parses_an_answer(clients: Clients) -> None:
    response = await clients.openai.responses.parse(model="policy", input="Oslo as JSON", text_format=Weather)
    assert response.output_parsed == Weather(city="Oslo", degrees=7)


@pytest.mark.behaviour("MS-1")
async def test_openais_client_makes_a_round_trip_with_tools_by_chat(clients: Clients) -> None:
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    first = await clients.openai.chat.completions.create(model="policy", tools=CHAT_TOOLS, messages=messages)
    said = first.choices[0].message
    assert [call.type == "function" and call.function.arguments for call in said.tool_calls or ()] == [
        '{"city":"Oslo"}',
        '{"city":"Bergen"}',
    ]
    messages.append(said.to_dict())
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in said.tool_calls or ()]
    second = await clients.openai.chat.completions.create(model="policy", tools=CHAT_TOOLS, messages=messages)
    assert second.choices[0].message.content == "It rains in both."


@pytest.mark.behaviour("MS-14")
async def test_openais_client_reads_a_chat_stream(clients: Clients) -> None:
    question: list[Any] = [{"role": "user", "content": "a long one"}]
    stream = await clients.openai.chat.completions.create(model="policy", messages=question, stream=True)
    chunks = [chunk async for chunk in stream]
    assert all(chunk.choices for chunk in chunks), "usage was not asked for"
    said = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(said) == "one two three four five six seven eight nine ten"
    stream = await clients.openai.chat.completions.create(
        model="policy", messages=question, stream=True, stream_options={"include_usage": True}
    )
    assert [chunk async for chunk in stream][-1].usage is not None


async def test_openais_client_lists_the_models(clients: Clients) -> None:
    assert [model.id async for model in clients.openai.models.list()] == ["policy"]
