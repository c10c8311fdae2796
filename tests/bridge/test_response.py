"""A whole chat completion → a Responses object."""

from typing import Any

import pytest

from services.model_proxy.bridge.capabilities import Capabilities
from services.model_proxy.bridge.refusals import UpstreamReplyError
from tests.bridge.chats import (
    LOOK_UP,
    SHELL,
    answer,
    asking,
    call,
    completion,
    names_of,
    text_of,
    without_minted,
)

SEARCH = {"type": "tool_search", "execution": "client"}

# Every field that a Responses object has to carry, present even where it is null.
REQUIRED = {
    "id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id",
    "instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p",
    "presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage",
    "max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier",
    "prompt_cache_key",
}  # fmt: skip


def test_a_text_answer_is_a_complete_response() -> None:
    response = answer(completion(content="Hello."))
    assert response.keys() >= REQUIRED
    assert (response["object"], response["status"], response["model"]) == ("response", "completed", "m")
    assert (response["created_at"], response["id"], response["error"]) == (1000, "resp_2", None)
    assert response["output"] == [
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": []}],
        }
    ]


def test_the_upstreams_model_is_named_where_the_caller_named_none() -> None:
    assert answer(completion(content="x"), request={"input": "hi"})["model"] == "upstream-model"


@pytest.mark.behaviour("MS-10")
def test_request_parameters_are_echoed_as_they_were_sent() -> None:
    sent = asking(
        instructions="Be brief.",
        tools=[{**LOOK_UP, "strict": None}, {"type": "namespace", "name": "g", "tools": [LOOK_UP]}, SHELL],
        tool_choice={"type": "function", "name": "look_up"},
        text={"format": {"type": "json_object"}, "verbosity": "low"},
        reasoning={"effort": "low", "summary": "auto"},
        metadata={"run": "7"},
        temperature=0.3,
        parallel_tool_calls=False,
        max_output_tokens=12,
        store=False,
        prompt_cache_key="k",
    )
    response = answer(completion(content="x"), request=sent)
    assert {name: response[name] for name in sent if name not in ("input", "model")} == {
        name: value for name, value in sent.items() if name not in ("input", "model")
    }


def test_what_was_left_out_is_echoed_as_the_apis_schema_demands_it() -> None:
    response = answer(completion(content="x"), request=asking(tools=[{"type": "function", "name": "f"}]))
    assert response["tools"] == [
        {"type": "function", "name": "f", "description": None, "parameters": None, "strict": None}
    ]
    names = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs", "service_tier")
    assert [response[name] for name in names] == [1.0, 1.0, 0.0, 0.0, 0, "default"]


@pytest.mark.behaviour("MS-10")
@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (None, None),
        ({"prompt_tokens": 3}, None),
        (
            {"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": None}},
            {
                "input_tokens": 3,
                "input_tokens_details": None,
                "output_tokens": 4,
                "output_tokens_details": None,
                "total_tokens": 7,
            },
        ),
        (
            {
                "prompt_tokens": 3,
                "completion_tokens": 4,
                "total_tokens": 8,
                "prompt_tokens_details": {"cached_tokens": 0},
                "completion_tokens_details": {"reasoning_tokens": 2},
            },
            {
                "input_tokens": 3,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": 4,
                "output_tokens_details": {"reasoning_tokens": 2},
                "total_tokens": 8,
            },
        ),
    ],
)
def test_counts_that_the_upstream_did_not_give_are_null_never_zero(usage: Any, expected: Any) -> None:
    assert answer({**completion(content="x"), "usage": usage})["usage"] == expected


@pytest.mark.behaviour("MS-10")
@pytest.mark.parametrize(
    ("reason", "status", "details"),
    [
        ("stop", "completed", None),
        ("tool_calls", "completed", None),
        ("function_call", "completed", None),
        ("length", "incomplete", {"reason": "max_output_tokens"}),
        ("content_filter", "incomplete", {"reason": "content_filter"}),
        ("repetition", "incomplete", {"reason": "content_filter"}),
    ],
)
def test_finish_reasons_become_statuses(reason: str, status: str, details: Any) -> None:
    capabilities = Capabilities(finish_reasons={"repetition": "content_filter"})
    response = answer(completion(reason, content="x"), capabilities=capabilities)
    assert (response["status"], response["incomplete_details"]) == (status, details)
    assert response["output"][0]["status"] == status


@pytest.mark.parametrize(
    ("reason", "code"), [(None, "truncated_stream"), ("", "truncated_stream"), ("abort", "upstream_finish_reason")]
)
def test_an_answer_without_a_known_ending_is_an_error(reason: str | None, code: str) -> None:
    with pytest.raises(UpstreamReplyError) as error:
        answer(completion(reason, content="x"))
    assert error.value.code == code


@pytest.mark.behaviour("MS-10")
@pytest.mark.parametrize("reason", ["stop", "tool_calls", "length"])
def test_an_empty_answer_has_one_empty_message(reason: str) -> None:
    response = answer(completion(reason, content=None, tool_calls=[]))
    assert [(item["type"], text_of(item)) for item in response["output"]] == [("message", "")]


@pytest.mark.behaviour("MS-10")
@pytest.mark.parametrize(
    "message",
    [
        {"content": "done", "reasoning": "plan"},
        {"content": "done", "reasoning_content": "plan"},
        {"content": "done", "reasoning": "plan", "reasoning_content": "plan"},
        {"content": "<think>plan</think>done"},
        {"content": "\n<think>plan</think>done"},
        {"content": [{"type": "text", "text": "<think>plan</think>"}, {"type": "text", "text": "done"}]},
    ],
)
def test_reasoning_is_one_item_before_the_message(message: dict[str, Any]) -> None:
    output = answer(completion(**message))["output"]
    assert [(item["type"], text_of(item)) for item in output] == [("reasoning", "plan"), ("message", "done")]
    assert output[0]["summary"] == []


@pytest.mark.parametrize(
    ("think_tags", "content", "expected"),
    [
        ("off", "<think>a</think>b", [("message", "<think>a</think>b")]),
        ("opened", "a</think>b", [("reasoning", "a"), ("message", "b")]),
        ("leading", "say <think>a</think>", [("message", "say <think>a</think>")]),
        ("leading", "<think>a", [("reasoning", "a")]),
        ("leading", "<thi", [("message", "<thi")]),
    ],
)
def test_think_tags_are_read_as_configured(think_tags: Any, content: str, expected: list[tuple[str, str]]) -> None:
    output = answer(completion(content=content), capabilities=Capabilities(think_tags=think_tags))["output"]
    assert [(item["type"], text_of(item)) for item in output] == expected


def test_a_refusal_is_a_part_of_its_own() -> None:
    output = answer(completion(content="Well.", refusal="No."))["output"]
    assert [part["type"] for part in output[0]["content"]] == ["output_text", "refusal"]
    assert output[0]["content"][1]["refusal"] == "No."


@pytest.mark.behaviour("MS-10", "MS-11")
def test_calls_come_back_in_the_callers_own_form() -> None:
    names = names_of(LOOK_UP, SHELL, {"type": "namespace", "name": "g", "tools": [LOOK_UP]}, SEARCH)
    calls = [
        call("c1", "look_up", '{"word": "a"}'),
        call("c2", "g__look_up", '{"word": "b"}'),
        call("c3", "shell", '{"input":"ls\\n"}'),
        call("c4", "tool_search", '{"query":"q"}'),
        call("c5", "invented", "{}"),
    ]
    output = answer(completion("tool_calls", tool_calls=calls), names=names)["output"]
    assert without_minted(output) == [
        {"type": "function_call", "status": "completed", "name": "look_up", "arguments": '{"word": "a"}'},
        {
            "type": "function_call",
            "status": "completed",
            "name": "look_up",
            "namespace": "g",
            "arguments": '{"word": "b"}',
        },
        {"type": "custom_tool_call", "status": "completed", "name": "shell", "input": "ls\n"},
        {"type": "tool_search_call", "status": "completed", "execution": "client", "arguments": {"query": "q"}},
        {"type": "function_call", "status": "completed", "name": "invented", "arguments": "{}"},
    ]
    assert [item["call_id"] for item in output] == ["c1", "c2", "c3", "c4", "c5"]


@pytest.mark.behaviour("MS-10")
def test_missing_and_repeated_call_ids_are_repaired() -> None:
    calls = [
        call("c1", "look_up", "{}"),
        call(None, "look_up", "{}"),
        call("", "look_up", "{}"),
        call("c1", "look_up", "{}"),
    ]
    output = answer(completion("tool_calls", tool_calls=calls))["output"]
    call_ids = [item["call_id"] for item in output]
    assert call_ids[0] == "c1"
    assert len(set(call_ids)) == 4
    assert all(call_ids)


@pytest.mark.parametrize("arguments", ["", "  \n", None])
def test_no_arguments_are_an_empty_object(arguments: str | None) -> None:
    output = answer(completion("stop", tool_calls=[call("c", "look_up", arguments)]))["output"]
    assert output[0]["arguments"] == "{}"


def test_arguments_are_passed_on_as_they_came() -> None:
    calls = [call("a", "look_up", '{"q'), call("b", "look_up", {"word": "x"})]
    output = answer(completion("tool_calls", tool_calls=calls))["output"]
    assert [item["arguments"] for item in output] == ['{"q', '{"word":"x"}']
    search = answer(completion("tool_calls", tool_calls=[call("a", "tool_search", "{")]), names=names_of(SEARCH))
    assert search["output"][0]["arguments"] == "{"


def test_the_form_before_tool_calls_is_read() -> None:
    chat = completion("function_call", function_call={"name": "look_up", "arguments": '{"word":"x"}'})
    output = answer(chat)["output"]
    assert [(item["name"], item["arguments"]) for item in output] == [("look_up", '{"word":"x"}')]


def test_a_call_that_a_limit_cut_is_incomplete_and_the_whole_ones_are_not() -> None:
    calls = [call("a", "look_up", '{"word":"x"}'), call("b", "look_up", '{"wo'), call("c", "look_up", "")]
    output = answer(completion("length", content="So", tool_calls=calls))["output"]
    assert [item["status"] for item in output] == ["completed", "completed", "incomplete", "incomplete"]
    assert output[3]["arguments"] == ""


def test_a_custom_call_that_breaks_off_is_an_error() -> None:
    chat = completion("tool_calls", tool_calls=[call("a", "shell", '{"input":"rm -rf build')])
    with pytest.raises(UpstreamReplyError) as error:
        answer(chat, names=names_of(SHELL))
    assert error.value.code == "truncated_tool_call"


def test_a_call_without_a_name_is_an_error_unless_it_is_empty() -> None:
    assert answer(completion("stop", content="x", tool_calls=[{"function": {}}]))["output"][0]["type"] == "message"
    with pytest.raises(UpstreamReplyError) as error:
        answer(completion("stop", tool_calls=[{"function": {"arguments": "{}"}}]))
    assert error.value.code == "invalid_tool_call"


def test_log_probabilities_travel_with_the_text() -> None:
    chat = completion(content="a")
    token = {"token": "a", "logprob": -0.5, "top_logprobs": [{"token": "b", "logprob": -1.5, "bytes": [98]}]}
    chat["choices"][0]["logprobs"] = {"content": [token]}
    assert answer(chat)["output"][0]["content"][0]["logprobs"] == [
        {
            "token": "a",
            "logprob": -0.5,
            "bytes": [],
            "top_logprobs": [{"token": "b", "logprob": -1.5, "bytes": [98]}],
        }
    ]
