"""What holds for any script of an answer, however the upstream cuts it, and for any request or chunk at all."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import orjson
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from services.model_proxy.bridge.refusals import RequestError, UpstreamReplyError
from shared.contracts.chat import REQUEST_FIELDS
from shared.contracts.responses import ResponsesCreateParams
from tests.bridge.chats import (
    LOOK_UP,
    SHELL,
    Played,
    answer,
    call,
    chat_of,
    chunk,
    completion,
    names_of,
    piece,
    unhurried,
    without_minted,
)

T = TypeVar("T")
TOOLS = (
    LOOK_UP,
    SHELL,
    {"type": "namespace", "name": "g", "tools": [LOOK_UP]},
    {"type": "tool_search", "execution": "client"},
)
FLAT_NAMES = ("look_up", "shell", "g__look_up", "tool_search", "unknown")

texts = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(
    ["<think>a</think>b", "<thi", "\n<think>", "</think>", "<think>", " "]
)
arguments = st.one_of(
    texts.map(lambda text: orjson.dumps({"input": text, "word": text}).decode()),
    st.sampled_from(
        ["", "  ", "{}", '{"input"', '{"input":"a\\', '{"word":', "[]", "raw text", ' {"input" : "\\ud83d\\ude00"}']
    ),
)


@dataclass(frozen=True)
class Script:
    """What a model said, before anybody cut it up."""

    reasoning: str
    text: str
    refusal: str
    calls: tuple[tuple[str, str], ...]
    finish_reason: str
    reasoning_name: str

    def whole(self) -> dict[str, Any]:
        calls = [call(f"call_{number}", name, given) for number, (name, given) in enumerate(self.calls)]
        message = {self.reasoning_name: self.reasoning, "content": self.text, "refusal": self.refusal}
        return completion(self.finish_reason, tool_calls=calls, **message)


scripts = st.builds(
    Script,
    reasoning=texts,
    text=texts,
    refusal=st.sampled_from(["", "", "No."]),
    calls=st.lists(st.tuples(st.sampled_from(FLAT_NAMES), arguments), max_size=3).map(tuple),
    finish_reason=st.sampled_from(["stop", "tool_calls", "length", "content_filter"]),
    reasoning_name=st.sampled_from(["reasoning", "reasoning_content"]),
)


def cut(draw: st.DrawFn, text: str) -> list[str]:
    places = sorted({0, len(text), *draw(st.lists(st.integers(0, len(text)), max_size=4))})
    return [text[start:stop] for start, stop in pairwise(places)]


@st.composite
def split(draw: st.DrawFn, script: Script) -> list[dict[str, Any]]:
    """Chunks that say the script: texts cut anywhere, fragments of calls in any order that keeps each call's own."""
    chunks = [chunk(**{script.reasoning_name: part}) for part in cut(draw, script.reasoning)]
    chunks += [chunk(content=part) for part in cut(draw, script.text)]
    chunks += [chunk(refusal=part) for part in cut(draw, script.refusal)]
    repeats = draw(st.booleans())
    queues: list[list[dict[str, Any]]] = []
    for number, (name, given_arguments) in enumerate(script.calls):
        begins = {"id": f"call_{number}", "name": name}
        chunks.append(chunk(tool_calls=[piece(number, draw(st.sampled_from(["", None])), **begins)]))
        parts = cut(draw, given_arguments)
        queues.append([piece(number, part, **(begins if repeats else {})) for part in parts])
    while any(queues):
        queue = draw(st.sampled_from([queue for queue in queues if queue]))
        chunks.append(chunk(tool_calls=[queue.pop(0)]))
    return [*chunks, chunk(script.finish_reason)]


@unhurried
@given(data=st.data(), script=scripts)
def test_any_split_of_any_script_gives_the_items_of_the_whole_answer(data: st.DataObject, script: Script) -> None:
    names = names_of(*TOOLS)
    played = Played(data.draw(split(script)), names=names)
    numbers = [event["sequence_number"] for event in played.events]
    assert numbers == list(range(len(numbers)))
    whole, error = attempted(lambda: answer(script.whole(), names=names))
    if whole is None:
        assert isinstance(error, UpstreamReplyError)
        assert played.response["error"] == {"code": error.code, "message": error.message}
        return
    assert without_minted(played.output) == without_minted(whole["output"])
    assert [item.get("call_id") for item in played.output] == [item.get("call_id") for item in whole["output"]]
    assert (played.response["status"], played.response["incomplete_details"]) == (
        whole["status"],
        whole["incomplete_details"],
    )
    assert played.done_items() == [item for item in played.output if item not in unannounced(played.output)]


def attempted(what: Callable[[], T]) -> tuple[T | None, RequestError | UpstreamReplyError | None]:
    try:
        return what(), None
    except (RequestError, UpstreamReplyError) as error:
        return None, error


def unannounced(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [item for item in output if item["type"].endswith("_call") and item["status"] == "incomplete"]


@unhurried
@given(data=st.data(), script=scripts)
def test_deltas_add_up_to_what_is_done(data: st.DataObject, script: Script) -> None:
    played = Played(data.draw(split(script)), names=names_of(*TOOLS))
    for stem, field in (
        ("output_text", "text"),
        ("reasoning_text", "text"),
        ("refusal", "refusal"),
        ("function_call_arguments", "arguments"),
        ("custom_tool_call_input", "input"),
    ):
        for done in played.of(f"{stem}.done"):
            deltas = [event for event in played.of(f"{stem}.delta") if event["item_id"] == done["item_id"]]
            assert "".join(event["delta"] for event in deltas) == done[field]


@unhurried
@given(data=st.data(), script=scripts)
def test_a_stream_cut_anywhere_fails_and_leaves_no_finished_call(data: st.DataObject, script: Script) -> None:
    chunks = data.draw(split(script))
    played = Played(chunks[: data.draw(st.integers(0, len(chunks) - 1))], names=names_of(*TOOLS))
    assert played.kinds[-1] == "failed"
    assert [item for item in played.done_items() if item["type"].endswith("_call")] == []


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def shaped(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={name: values | json_values for name, values in fields.items()})


fragments = shaped(
    index=st.integers(0, 2),
    id=st.text(max_size=2),
    function=shaped(name=st.sampled_from(FLAT_NAMES), arguments=arguments),
)
deltas = shaped(
    content=texts, reasoning=texts, refusal=texts, tool_calls=st.lists(fragments, max_size=3), function_call=json_values
)
choices = shaped(
    index=st.integers(0, 1),
    delta=deltas,
    message=deltas,
    finish_reason=st.sampled_from(["stop", "length"]),
    logprobs=json_values,
    token_ids=json_values,
)
chunks_of_any_form = shaped(
    choices=st.lists(choices, max_size=2),
    usage=json_values,
    error=json_values,
    model=json_values,
    prompt_token_ids=json_values,
)


@unhurried
@given(chunks=st.lists(chunks_of_any_form, max_size=6))
def test_whatever_the_upstream_sends_the_stream_ends_once_and_raises_nothing(chunks: list[dict[str, Any]]) -> None:
    played = Played(chunks, names=names_of(*TOOLS))
    assert [kind for kind in played.kinds if kind in ("completed", "incomplete", "failed")] == played.kinds[-1:]
    orjson.dumps(played.events)


@unhurried
@given(chat=chunks_of_any_form)
def test_whatever_the_upstream_answers_is_a_response_or_an_error(chat: dict[str, Any]) -> None:
    response, error = attempted(lambda: answer(chat, names=names_of(*TOOLS)))
    if response is None:
        assert isinstance(error, UpstreamReplyError)
        assert error.code
    else:
        assert response["output"]
        orjson.dumps(response)


parts = shaped(type=st.sampled_from(["input_text", "output_text", "input_image", "input_file", "refusal"]), text=texts)
items = shaped(
    type=st.sampled_from(
        ["message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
         "tool_search_call", "tool_search_output", "additional_tools", "web_search_call"]
    ),
    role=st.sampled_from(["user", "assistant", "developer", "system"]),
    content=st.lists(parts, max_size=2) | texts,
    summary=st.lists(parts, max_size=1),
    call_id=st.sampled_from(["a", "b"]),
    name=st.sampled_from(FLAT_NAMES),
    namespace=st.sampled_from(["g", None]),
    arguments=arguments,
    input=texts,
    output=texts | st.lists(parts, max_size=2),
    tools=st.lists(st.sampled_from(TOOLS), max_size=2),
)  # fmt: skip
requests = st.fixed_dictionaries(
    {"input": st.lists(items, min_size=1, max_size=5) | texts},
    optional={
        "tools": st.lists(st.sampled_from(TOOLS) | items, max_size=3),
        "tool_choice": st.sampled_from(["auto", "none", "required", {"type": "function", "name": "look_up"}])
        | json_values,
        "text": st.dictionaries(st.sampled_from(["format", "verbosity"]), json_values),
        "reasoning": st.dictionaries(st.sampled_from(["effort", "summary"]), json_values),
        "metadata": st.dictionaries(st.sampled_from(["chat_template_kwargs", "a"]), json_values),
        "include": st.lists(st.text(max_size=3)),
        "parallel_tool_calls": st.booleans(),
    },
)


@unhurried
@given(request=requests, profile=st.sampled_from(["strict", "openai", "codex"]))
def test_any_request_is_translated_or_refused_by_name_and_never_changed(request: dict[str, Any], profile: str) -> None:
    try:
        ResponsesCreateParams.model_validate(request)
    except ValidationError:
        assume(False)
    before = deepcopy(request)
    chat, error = attempted(lambda: chat_of(request, profile=profile))
    if chat is None:
        assert isinstance(error, RequestError)
        assert error.param
    else:
        assert chat.body.keys() <= REQUEST_FIELDS
        flat = [tool["function"]["name"] for tool in chat.body.get("tools", [])]
        assert len(flat) == len(set(flat))
        orjson.dumps(chat.body)
    assert request == before
