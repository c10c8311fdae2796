"""Chat chunks → Responses events: grammar, endings, failures, heartbeats."""

from typing import Any

import orjson
import pytest

from services.model_proxy.bridge.capabilities import Capabilities
from services.model_proxy.bridge.names import NameMap
from services.model_proxy.bridge.stream import ChatStream, encode_event
from tests.bridge.chats import LOOK_UP, PLAIN, USAGE_CHUNK, Played, asking, chunk, ids, piece, text_of

ROLE = chunk(role="assistant", content=None)
FULL = [
    ROLE,
    chunk(reasoning="plan "),
    chunk(reasoning="it"),
    chunk(content="I will "),
    chunk(content="look."),
    chunk(tool_calls=[piece(0, '{"word":', id="c1", name="look_up")]),
    chunk(tool_calls=[piece(0, '"a"}')]),
    chunk("tool_calls"),
    USAGE_CHUNK,
]


@pytest.mark.behaviour("MS-13")
def test_the_events_follow_the_grammar() -> None:
    assert Played(FULL).kinds == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip


def test_numbers_rise_by_one_and_ids_and_texts_agree() -> None:
    played = Played(FULL, request=asking(tools=[LOOK_UP], tool_choice="auto"))
    assert [event["sequence_number"] for event in played.events] == list(range(len(played.events)))
    assert played.done_items() == played.output
    assert [text_of(item) for item in played.output[:2]] == ["plan it", "I will look."]
    for added in played.of("output_item.added"):
        item = played.output[added["output_index"]]
        inner = [e for e in played.events if e.get("item_id") == item["id"]]
        assert added["item"]["id"] == item["id"]
        assert {event["output_index"] for event in inner} == {added["output_index"]}
    final = played.events[-1]["response"]
    assert final["usage"]["total_tokens"] == 13
    assert (final["tools"], final["tool_choice"], final["model"]) == ([{**LOOK_UP, "strict": None}], "auto", "m")
    assert played.events[0]["response"]["output"] == []
    assert played.events[0]["response"]["status"] == "in_progress"


@pytest.mark.behaviour("MS-13")
def test_each_chunk_gives_its_events_at_once() -> None:
    (event,) = _open().feed(chunk(content="b"))
    assert (event["type"], event["delta"]) == ("response.output_text.delta", "b")


def _open() -> ChatStream:
    stream = ChatStream(request=asking(), names=NameMap(), capabilities=PLAIN, new_id=ids(), created_at=1.0)
    stream.start()
    stream.feed(chunk(content="a"))
    return stream


def test_a_heartbeat_is_a_numbered_event() -> None:
    stream = _open()
    beat = stream.heartbeat()
    (delta,) = stream.feed(chunk(content="b"))
    assert beat["type"] == "response.in_progress"
    assert beat["response"]["status"] == "in_progress"
    assert delta["sequence_number"] == beat["sequence_number"] + 1


@pytest.mark.parametrize(
    "chunks",
    [
        [ROLE, chunk(content="The answer is")],
        [ROLE, chunk(tool_calls=[piece(0, '{"path":"/etc/ho', id="c", name="look_up")])],
        [ROLE],
        [],
    ],
)
def test_a_stream_without_a_finish_reason_has_failed(chunks: list[dict[str, Any]]) -> None:
    played = Played(chunks)
    assert played.kinds[-1] == "failed"
    assert played.response["error"]["code"] == "truncated_stream"
    assert played.response["status"] == "failed"
    assert not [item for item in played.output if item["type"] == "function_call"]
    assert played.of("output_item.done") == []


def test_the_text_so_far_stays_in_a_failed_response() -> None:
    played = Played([chunk(reasoning="r"), chunk(content="half"), USAGE_CHUNK])
    assert [(item["type"], item["status"], text_of(item)) for item in played.output] == [
        ("reasoning", "completed", "r"),
        ("message", "incomplete", "half"),
    ]
    assert played.response["usage"]["total_tokens"] == 13


def test_nothing_follows_the_final_event() -> None:
    played = Played(FULL)
    stream = played.stream
    assert stream.closed
    assert [stream.feed(chunk(content="late")), stream.end(), stream.fail("x", "y")] == [[], [], []]
    assert stream.response is played.events[-1]["response"]


def test_an_error_in_the_stream_fails_it_with_the_upstreams_code() -> None:
    played = Played([chunk(content="half"), {"error": {"message": "boom", "code": 500}}, chunk(content="more")])
    assert played.response["error"] == {"code": "500", "message": "boom"}
    assert played.kinds.count("failed") == 1
    assert played.kinds[-1] == "failed"


def test_a_failure_from_outside_ends_the_stream() -> None:
    stream = _open()
    (event,) = stream.fail("upstream_timeout", "No byte came in time.")
    assert event["response"]["error"] == {"code": "upstream_timeout", "message": "No byte came in time."}


@pytest.mark.parametrize(
    "bad",
    [
        {"choices": ["x"]},
        {"choices": 7},
        {"choices": [{"delta": {"content": 7}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": [], "function": {"name": "f"}}]}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": 7}}]}}]},
    ],
)
def test_a_chunk_of_another_form_fails_the_stream(bad: dict[str, Any]) -> None:
    played = Played([chunk(content="a"), bad])
    assert played.response["error"]["code"] == "invalid_reply"
    assert text_of(played.output[0]) == "a"


@pytest.mark.behaviour("MS-10")
@pytest.mark.parametrize(
    ("chunks", "status", "reason", "kinds"),
    [
        ([chunk(content="part"), chunk("length")], "incomplete", "max_output_tokens", ["message"]),
        ([chunk(reasoning="hm"), chunk("length"), USAGE_CHUNK], "incomplete", "max_output_tokens", ["reasoning"]),
        ([chunk("length")], "incomplete", "max_output_tokens", ["message"]),
        ([chunk(content="x"), chunk("content_filter")], "incomplete", "content_filter", ["message"]),
        ([chunk(content="Done."), chunk("tool_calls", tool_calls=[])], "completed", None, ["message"]),
        ([chunk("stop")], "completed", None, ["message"]),
        ([chunk("stop", content="ok"), chunk(content="!")], "completed", None, ["message"]),
    ],
)
def test_endings(chunks: list[dict[str, Any]], status: str, reason: str | None, kinds: list[str]) -> None:
    played = Played(chunks)
    assert played.response["status"] == status
    assert played.kinds[-1] == status
    assert (played.response["incomplete_details"] or {}).get("reason") == reason
    assert [item["type"] for item in played.output] == kinds
    assert played.done_items() == played.output


def test_an_unknown_finish_reason_is_a_failure_that_names_it() -> None:
    played = Played([chunk("abort", content="x")])
    assert played.response["error"]["code"] == "upstream_finish_reason"
    assert "'abort'" in played.response["error"]["message"]


def test_calls_beside_the_finish_reason_stop_are_kept() -> None:
    played = Played([chunk(content="Reading."), chunk(tool_calls=[piece(0, "{}", id="c", name="f")]), chunk("stop")])
    assert [item["type"] for item in played.output] == ["message", "function_call"]


def test_a_call_that_a_limit_cut_is_never_announced_as_done() -> None:
    entries = [piece(0, '{"a":1}', id="c0", name="f"), piece(1, '{"a', id="c1", name="f")]
    played = Played([chunk(tool_calls=entries), chunk("length")])
    assert [item["status"] for item in played.output] == ["completed", "incomplete"]
    assert [item["call_id"] for item in played.done_items()] == ["c0"]


@pytest.mark.parametrize(
    "fields", [{"reasoning": "plan"}, {"reasoning_content": "plan"}, {"reasoning": "plan", "reasoning_content": "plan"}]
)
def test_reasoning_under_either_name_comes_once(fields: dict[str, str]) -> None:
    played = Played([chunk(**fields), chunk(content="done"), chunk("stop")])
    assert [(item["type"], text_of(item)) for item in played.output] == [("reasoning", "plan"), ("message", "done")]


def test_think_tags_are_read_across_chunks() -> None:
    played = Played([chunk(content=text) for text in ("<th", "ink>pl", "an</thi", "nk>do", "ne")] + [chunk("stop")])
    assert [(item["type"], text_of(item)) for item in played.output] == [("reasoning", "plan"), ("message", "done")]


def test_what_looked_like_a_tag_is_text_when_something_else_follows() -> None:
    for follow in ({"refusal": "No."}, {"tool_calls": [piece(0, "{}", id="c", name="f")]}):
        played = Played([chunk(content="<th"), chunk(**follow), chunk("stop")])
        assert played.output[0]["content"][0]["text"] == "<th"
    untouched = Played([chunk(content="<th"), chunk("stop")], capabilities=Capabilities(think_tags="off"))
    assert text_of(untouched.output[0]) == "<th"


def test_a_refusal_is_streamed_as_one() -> None:
    played = Played([chunk(content="Well."), chunk(refusal="N"), chunk(refusal="o."), chunk("stop")])
    assert [part["type"] for part in played.output[0]["content"]] == ["output_text", "refusal"]
    assert [event["delta"] for event in played.of("refusal.delta")] == ["N", "o."]
    assert played.of("refusal.done")[0]["refusal"] == "No."
    assert [event["content_index"] for event in played.of("content_part.added")] == [0, 1]


def test_text_after_a_call_is_a_new_message() -> None:
    played = Played(
        [chunk(content="a"), chunk(tool_calls=[piece(0, "{}", id="c", name="f")]), chunk(content="b"), chunk("stop")]
    )
    assert [item["type"] for item in played.output] == ["message", "function_call", "message"]
    assert played.done_items() == played.output


def test_the_first_choice_is_the_answer() -> None:
    other = {"choices": [{"index": 1, "delta": {"content": "other"}, "finish_reason": "stop"}]}
    played = Played([chunk(content="mine"), other, chunk("stop")])
    assert text_of(played.output[0]) == "mine"


def test_the_upstreams_model_is_named_where_the_caller_named_none() -> None:
    played = Played([{**chunk("stop", content="x"), "model": "theirs"}], request={"input": "hi"})
    assert played.response["model"] == "theirs"


def test_the_form_before_tool_calls_is_read() -> None:
    pieces = [{"name": "f", "arguments": '{"a"'}, {"arguments": ":1}"}]
    played = Played([chunk(function_call=each) for each in pieces] + [chunk("function_call")])
    assert [(item["name"], item["arguments"]) for item in played.output] == [("f", '{"a":1}')]


def test_an_event_is_encoded_as_one_frame_with_its_type_inside() -> None:
    event = {"type": "response.output_text.delta", "sequence_number": 3, "delta": "line\nand\u2028é"}
    name, data, *rest = encode_event(event).split(b"\n")
    assert name == b"event: response.output_text.delta"
    assert orjson.loads(data.removeprefix(b"data: ")) == event
    assert rest == [b"", b""]
