"""Fragments of tool calls: whose they are, which ids they get, and custom tools' raw input."""

from typing import Any

import pytest

from tests.bridge.chats import SHELL, Played, chunk, names_of, piece

SEARCH = {"type": "tool_search", "execution": "client"}


def played(*deltas: list[dict[str, Any]], tools: tuple[dict[str, Any], ...] = ()) -> Played:
    chunks = [chunk(tool_calls=entries) for entries in deltas]
    return Played([*chunks, chunk("tool_calls")], names=names_of(*tools))


def calls(result: Played) -> list[tuple[str, str]]:
    return [(item["name"], item["arguments"]) for item in result.output]


def test_interleaved_fragments_reach_their_own_calls() -> None:
    result = played(
        [piece(0, "", id="A", name="f"), piece(1, "", id="B", name="f")],
        [piece(1, '{"pa')],
        [piece(0, '{"path":"a')],
        [piece(1, 'th":"b"}')],
        [piece(0, '"}')],
    )
    assert calls(result) == [("f", '{"path":"a"}'), ("f", '{"path":"b"}')]
    assert [item["call_id"] for item in result.output] == ["A", "B"]
    assert [event["output_index"] for event in result.of("function_call_arguments.delta")] == [1, 0, 1, 0]


@pytest.mark.parametrize(
    "deltas",
    [
        pytest.param([[piece(0, '{"a":1}', id="A", name="f")], [piece(0, '{"a":2}', id="B", name="f")]], id="new id"),
        pytest.param([[piece(0, '{"a":1}', name="f")], [piece(0, '{"a":2}', name="f")]], id="no ids, whole"),
        pytest.param([[piece(None, '{"a":1}', name="f"), piece(None, '{"a":2}', name="f")]], id="no index"),
        pytest.param([[piece(0, '{"a":1}', name="f")], [piece(0, '{"a":2}', id="B", name="f")]], id="late id, whole"),
        pytest.param(
            [
                [piece(0, '{"a"', id="A", name="f")],
                [piece(0, '{"a"', id="B", name="f")],
                [piece(0, ":1}", id="A")],
                [piece(0, ":2}", id="B")],
            ],
            id="one index, told apart by id",
        ),
        pytest.param([[piece(0, '{"a":1}', id="A", name="f")], [piece(1, '{"a":2}', id="A", name="f")]], id="one id"),
        pytest.param([[piece(0, '{"a":1}', id="A", name="f")], [piece(1, '{"a":2}', id=None, name="f")]], id="null id"),
    ],
)
def test_two_calls_stay_two(deltas: list[list[dict[str, Any]]]) -> None:
    result = played(*deltas)
    assert calls(result) == [("f", '{"a":1}'), ("f", '{"a":2}')]
    assert len({item["call_id"] for item in result.output}) == 2
    assert all(item["call_id"] for item in result.output)


@pytest.mark.parametrize(
    "deltas",
    [
        pytest.param([[piece(0, '{"a"', name="f")], [piece(0, ":1}")]], id="no id"),
        pytest.param([[piece(0, '{"a"', id="A", name="f")], [piece(0, ":1}", id="A", name="f")]], id="repeated"),
        pytest.param([[piece(0, '{"a"', id="A", name="f")], [piece(0, ":1}", id="B")]], id="changed"),
        pytest.param([[piece(0, '{"a"', name="f")], [piece(0, ":1}", id="A", name="f")]], id="late id"),
        pytest.param([[piece(0, '{"a"', name="f")], [piece(0, ":1}", name="f")]], id="repeated name"),
        pytest.param([[piece(0, '{"a"', id="A", name="f")], [piece(None, ":1}")]], id="index left out"),
        pytest.param([[piece(0, '{"a"', id="A")], [piece(0, ":1}", name="f")]], id="late name"),
        pytest.param([[piece(0, '{"a":1}', id="A", name="f")], [piece(0, "", id="A", name="f")]], id="empty tail"),
    ],
)
def test_one_call_stays_one(deltas: list[list[dict[str, Any]]]) -> None:
    result = played(*deltas)
    assert calls(result) == [("f", '{"a":1}')]
    added, done = result.of("output_item.added")[0]["item"], result.of("output_item.done")[0]["item"]
    assert (added["id"], added["call_id"]) == (done["id"], done["call_id"])
    assert result.output == [done]


def test_another_name_at_a_used_index_begins_another_call() -> None:
    assert calls(played([piece(0, "", name="f")], [piece(0, "", name="g")])) == [("f", "{}"), ("g", "{}")]


@pytest.mark.parametrize("arguments", ["", None, "  "])
def test_a_call_without_arguments_becomes_an_empty_object(arguments: str | None) -> None:
    result = played([piece(0, arguments, id="Z", name="f")])
    assert calls(result) == [("f", "{}")]
    assert [event["delta"] for event in result.of("function_call_arguments.delta")] == ["{}"]
    assert result.of("function_call_arguments.done")[0]["arguments"] == "{}"


def test_blanks_around_arguments_are_kept() -> None:
    result = played([piece(0, " ", id="Z", name="f")], [piece(0, "{")], [piece(0, " ")], [piece(0, "}\n")])
    deltas = "".join(event["delta"] for event in result.of("function_call_arguments.delta"))
    assert calls(result) == [("f", deltas)] == [("f", " { }\n")]


def test_a_call_that_never_gets_a_name_is_nothing_or_an_error() -> None:
    empty = played([piece(0, "", id="A")])
    assert [item["type"] for item in empty.output] == ["message"]
    named_late = played([piece(0, "{}", id="A")])
    assert named_late.response["error"]["code"] == "invalid_tool_call"


@pytest.mark.behaviour("MS-11")
def test_a_custom_tools_input_is_streamed_as_raw_text() -> None:
    result = played(
        [piece(0, '{"inp', id="P", name="shell")],
        [piece(0, 'ut": "cat caf\\u00')],
        [piece(0, "e9\\")],
        [piece(0, 'n\\"x\\""')],
        [piece(0, "}")],
        tools=(SHELL,),
    )
    (item,) = result.output
    assert (item["type"], item["call_id"], item["name"]) == ("custom_tool_call", "P", "shell")
    assert item["input"] == 'cat café\n"x"'
    deltas = [event["delta"] for event in result.of("custom_tool_call_input.delta")]
    assert "".join(deltas) == item["input"]
    assert deltas[0] == "cat caf"
    assert result.of("custom_tool_call_input.done")[0]["input"] == item["input"]
    assert not result.of("function_call_arguments.delta")


def test_a_custom_input_in_another_form_is_given_whole_at_the_end() -> None:
    result = played([piece(0, "ls ", id="P", name="shell")], [piece(0, "-l")], tools=(SHELL,))
    assert result.output[0]["input"] == "ls -l"
    assert [event["delta"] for event in result.of("custom_tool_call_input.delta")] == ["ls -l"]


def test_a_custom_input_that_breaks_off_fails_the_stream() -> None:
    result = played([piece(0, '{"input":"rm -rf /tmp/bu', id="P", name="shell")], tools=(SHELL,))
    assert result.response["error"]["code"] == "truncated_tool_call"
    assert result.output == []


@pytest.mark.behaviour("MS-11")
def test_a_tool_search_comes_back_as_one() -> None:
    result = played([piece(0, '{"query":"q"}', id="S", name="tool_search")], tools=(SEARCH,))
    (item,) = result.output
    assert (item["type"], item["execution"], item["arguments"]) == ("tool_search_call", "client", {"query": "q"})
    assert result.kinds[2:] == ["output_item.added", "output_item.done", "completed"]
