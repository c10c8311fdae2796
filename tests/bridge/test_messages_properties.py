"""What holds for any script of an answer in the Messages API, however it is cut, and for any request at all."""

from copy import deepcopy
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from services.model_proxy.bridge.refusals import UpstreamReplyError
from shared.contracts.chat import REQUEST_FIELDS
from tests.bridge.chats import names_of, unhurried
from tests.bridge.messages import LOOK, PNG, PlayedMessages, chat_of, message_of, responses_of
from tests.bridge.test_properties import (
    Script,
    attempted,
    chunks_of_any_form,
    json_values,
    scripts,
    shaped,
    split,
    texts,
)

FLAT = ("look_up", "unknown")
NAMES = names_of({"type": "function", "name": "look_up"})


@unhurried
@given(data=st.data(), script=scripts)
def test_any_split_of_any_script_gives_the_blocks_of_the_whole_answer(data: st.DataObject, script: Script) -> None:
    played = PlayedMessages(data.draw(split(script)), names=NAMES)
    whole, error = attempted(lambda: message_of(script.whole(), names=NAMES))
    if whole is None:
        assert isinstance(error, UpstreamReplyError)
        assert (played.error["message"], played.error["details"]["error_code"]) == (error.message, error.code)
        return
    assert played.kinds[-2:] == ["message_delta", "message_stop"]
    for block in [*whole["content"], *played.message["content"]]:
        # The ids in it are minted for each answer.
        block.pop("signature", None)
    assert {**played.message, "usage": None} == {**whole, "usage": None}


@unhurried
@given(data=st.data(), script=scripts)
def test_deltas_add_up_to_the_blocks(data: st.DataObject, script: Script) -> None:
    played = PlayedMessages(data.draw(split(script)), names=NAMES)
    if played.stream.error is not None:
        return
    told = played.told()
    assert len(told) == len(played.message["content"])
    for block, whole in zip(told, played.message["content"], strict=True):
        arguments = block.pop("json")
        if block["type"] == "tool_use" and played.message["stop_reason"] == "tool_use":
            assert orjson.loads(arguments) == whole["input"]
        assert {**block, "input": None} == {**whole, "input": None}


@unhurried
@given(data=st.data(), script=scripts)
def test_a_stream_cut_anywhere_fails_and_leaves_no_finished_call(data: st.DataObject, script: Script) -> None:
    chunks = data.draw(split(script))
    played = PlayedMessages(chunks[: data.draw(st.integers(0, len(chunks) - 1))], names=NAMES)
    assert played.error
    assert [block for block in played.message["content"] if block["type"] == "tool_use"] == []


@unhurried
@given(chunks=st.lists(chunks_of_any_form, max_size=6))
def test_whatever_a_chat_server_sends_the_stream_ends_once_and_raises_nothing(chunks: list[dict[str, Any]]) -> None:
    played = PlayedMessages(chunks, names=NAMES, stops=["a"])
    assert [kind for kind in played.kinds if kind in ("message_stop", "error")] == played.kinds[-1:]
    played.told()
    orjson.dumps([played.events, played.message])


items = shaped(
    type=st.sampled_from(["message", "reasoning", "function_call", "web_search_call"]),
    id=texts,
    call_id=texts,
    name=texts,
    arguments=texts | st.sampled_from(["{}", '{"a":1}', '{"a']),
    status=st.sampled_from(["completed", "incomplete"]),
    content=st.lists(shaped(type=st.sampled_from(["output_text", "refusal"]), text=texts, refusal=texts), max_size=2),
    summary=st.lists(shaped(text=texts), max_size=2),
    encrypted_content=texts,
)
events = shaped(
    type=st.sampled_from(
        [
            "response.output_item.added",
            "response.output_item.done",
            "response.output_text.delta",
            "response.refusal.delta",
            "response.reasoning_text.delta",
            "response.reasoning_summary_text.delta",
            "response.function_call_arguments.delta",
            "response.completed",
            "response.failed",
            "error",
        ]
    ),
    output_index=st.integers(0, 2),
    content_index=st.integers(0, 1),
    summary_index=st.integers(0, 1),
    delta=texts,
    item=items,
    response=shaped(output=st.lists(items, max_size=2), usage=json_values, error=json_values),
)


@unhurried
@given(sent=st.lists(events, max_size=8))
def test_whatever_a_responses_server_sends_the_stream_ends_once_and_raises_nothing(sent: list[dict[str, Any]]) -> None:
    played = PlayedMessages(sent, responses=True)
    assert [kind for kind in played.kinds if kind in ("message_stop", "error")] == played.kinds[-1:]
    played.told()
    orjson.dumps([played.events, played.message])


blocks = shaped(
    type=st.sampled_from(
        ["text", "image", "document", "tool_use", "tool_result", "thinking", "redacted_thinking", "server_tool_use"]
    ),
    text=texts,
    source=shaped(type=st.sampled_from(["base64", "url", "file"]), media_type=texts, data=texts, url=texts),
    id=st.sampled_from(["a", "b"]),
    tool_use_id=st.sampled_from(["a", "b"]),
    name=st.sampled_from(FLAT),
    input=st.dictionaries(texts, json_values, max_size=2),
    content=texts | st.lists(st.just(PNG), max_size=1),
    is_error=st.booleans(),
    thinking=texts,
    signature=texts,
    data=texts,
)
plain_blocks = st.sampled_from(
    [{"type": "text", "text": "a"}, {"type": "tool_use", "id": "a", "name": "look_up", "input": {}}, PNG]
)
messages = shaped(
    role=st.sampled_from(["user", "assistant", "system"]), content=texts | st.lists(blocks | plain_blocks, max_size=3)
)
requests = st.fixed_dictionaries(
    {"messages": st.lists(messages, max_size=4), "max_tokens": st.integers(1, 9) | json_values},
    optional={
        "system": texts | json_values,
        "tools": st.lists(st.just(LOOK) | json_values, max_size=2) | json_values,
        "tool_choice": shaped(type=st.sampled_from(["auto", "any", "tool", "none"]), name=st.sampled_from(FLAT)),
        "thinking": json_values,
        "output_config": json_values,
        "stop_sequences": st.lists(texts, max_size=2) | json_values,
        "metadata": json_values,
        "stream": st.booleans(),
        "anything": json_values,
    },
)


@unhurried
@given(
    request=requests,
    profile=st.sampled_from(["strict", "openai", "codex"]),
    responses=st.booleans(),
)
def test_any_request_is_translated_or_refused_by_name_and_never_changed(
    request: dict[str, Any], profile: str, responses: bool
) -> None:
    before = deepcopy(request)
    if responses:
        translated, error = attempted(lambda: responses_of(request, speaks="responses", profile=profile).request)
    else:
        translated, error = attempted(lambda: chat_of(request, profile=profile).body)
        assert translated is None or translated.keys() <= REQUEST_FIELDS
    if translated is None:
        assert error is not None
        assert error.code
    orjson.dumps(translated)
    assert request == before
