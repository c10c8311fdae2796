"""Tool calls: graded by what was served, never by what the agent says, and never vacuously."""

from typing import Any

import pytest
from pydantic import ValidationError

from services.resources.strict_schema import fits, same_json
from services.resources.verifiers.tool_calls import Options, create
from shared.errors import BadRowError
from shared.ports.verifier import Answer, ToolCallRecord

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
NODE = {"type": ["object", "null"], "properties": {"a": {"$ref": "#/$defs/n"}}}
OFFER = {"input": "x", "tools": [{"type": "function", "name": "get_weather", "strict": True, "parameters": SCHEMA}]}


def _served(city: Any, *, name: str = "get_weather", ok: bool = True) -> ToolCallRecord:
    return ToolCallRecord(name, {"city": city}, ok)


def _call(arguments: str, name: str = "get_weather") -> dict[str, Any]:
    return {"type": "function_call", "name": name, "arguments": arguments, "call_id": "c"}


SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is mild."}]}
SILENT = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": " "}]}
OSLO = '{"city": "Oslo"}'


async def _expected(calls: list[dict[str, Any]], *served: ToolCallRecord, order: str = "any") -> float:
    verifier = create(Options.model_validate({"order": order}))
    task = verifier.task_data.model_validate({"expected_calls": calls})
    verdict = await verifier.verify(task, Answer({}, {"output": [_call(OSLO), SAID]}, served), None)  # type: ignore[arg-type]
    return verdict.reward


async def _offered(
    *served: ToolCallRecord, output: list[dict[str, Any]], params: dict[str, Any] = OFFER
) -> tuple[float, dict[str, float]]:
    verifier = create(Options(without_expected_calls="offered_tool"))
    task = verifier.task_data.model_validate({})
    verdict = await verifier.verify(task, Answer(params, {"output": output}, served), None)  # type: ignore[arg-type]
    assert verdict.reward_components is not None
    return verdict.reward, verdict.reward_components


@pytest.mark.parametrize(
    ("expected", "served", "any_order", "exact"),
    [
        ([("Oslo",)], ["Oslo"], 1, 1),
        ([("Oslo",)], [], 0, 0),
        ([("Oslo",)], ["Rome"], 0, 0),
        ([("Oslo",)], ["oslo"], 0, 0),
        ([("Oslo",)], ["Rome", "Oslo"], 1, 0),
        ([("Oslo",), ("Rome",)], ["Oslo", "Rome"], 1, 1),
        ([("Oslo",), ("Rome",)], ["Rome", "Oslo"], 1, 0),
        ([("Oslo",), ("Oslo",)], ["Oslo"], 0, 0),
        ([(), ("Oslo",)], ["Oslo", "Rome"], 1, 0),
        ([(), ("Oslo",)], ["Rome", "Oslo"], 1, 1),
        ([()], ["Rome"], 1, 1),
    ],
)
async def test_expected_calls_must_have_been_served(
    expected: list[tuple[str, ...]], served: list[str], any_order: int, exact: int
) -> None:
    calls = [{"name": "get_weather"} | ({"arguments": {"city": city[0]}} if city else {}) for city in expected]
    records = [_served(city) for city in served]
    assert await _expected(calls, *records) == any_order
    assert await _expected(calls, *records, order="exact") == exact


async def test_a_call_that_was_not_served_well_or_had_another_name_is_not_made() -> None:
    expected = [{"name": "get_weather", "arguments": {"city": "Oslo"}}]
    assert await _expected(expected, _served("Oslo", ok=False)) == 0
    assert await _expected(expected, _served("Oslo", name="get_climate")) == 0
    assert await _expected(expected, _served("Oslo", ok=False), _served("Oslo"), order="exact") == 0


async def test_arguments_are_equal_as_json() -> None:
    expected = [{"name": "get_weather", "arguments": {"city": {"b": 1, "a": [1.0, True]}}}]
    assert await _expected(expected, _served({"a": [1, True], "b": 1.0})) == 1
    assert await _expected(expected, _served({"a": [1, 1], "b": 1})) == 0


@pytest.mark.parametrize("expected", [None, []])
@pytest.mark.parametrize("rule", ["reject", "offered_tool"])
def test_a_row_that_expects_nothing_is_refused(rule: str, expected: Any) -> None:
    model = create(Options.model_validate({"without_expected_calls": rule})).task_data
    if rule == "offered_tool" and expected is None:
        assert model.model_validate({"expected_calls": None}) == model.model_validate({})
        return
    with pytest.raises(ValidationError):
        model.model_validate({"expected_calls": expected})


def test_a_row_without_the_field_is_refused_by_default() -> None:
    with pytest.raises(ValidationError, match="expected_calls"):
        create(Options()).task_data.model_validate({})


async def test_an_offered_tool_that_was_called_well_and_answered_from_earns_all() -> None:
    for output in ([_call(OSLO), SAID], [SAID], [_call(OSLO), {"type": "function_call_output", "call_id": "c"}, SAID]):
        reward, components = await _offered(_served("Oslo"), output=output)
        assert reward == 1.0
        assert components == {"called": 1, "arguments_fit": 1, "served": 1, "answered": 1}


@pytest.mark.parametrize(
    ("served", "output", "lacks"),
    [
        ([], [SAID], {"called"}),
        ([], [_call(OSLO), SAID], {"called", "served"}),
        ([_served("Oslo")], [_call(OSLO), _call(OSLO), SAID], {"served"}),
        ([_served("Oslo")], [_call('{"city": "Rome"}'), SAID], {"served"}),
        ([_served("Oslo"), _served("Rome", ok=False)], [SAID], {"served"}),
        ([_served("Oslo")], [_call(OSLO), _call('{"town": "Rome"}'), SAID], {"served", "arguments_fit"}),
        ([_served("Oslo")], [_call("{broken"), SAID], {"served", "arguments_fit"}),
        ([_served("Oslo")], [_call("[" * 100_000), SAID], {"served", "arguments_fit"}),
        ([_served(5)], [SAID], {"arguments_fit"}),
        ([_served("Oslo")], [_call(OSLO)], {"answered"}),
        ([_served("Oslo")], [_call(OSLO), SILENT], {"answered"}),
        ([_served("Oslo")], [SAID, _call(OSLO)], {"answered"}),
        ([_served("Oslo", name="other")], [_call(OSLO, "other"), SAID], {"called"}),
        ([], [], {"called", "answered"}),
    ],
)
async def test_whatever_is_lacking_earns_nothing_and_is_told(
    served: list[ToolCallRecord], output: list[dict[str, Any]], lacks: set[str]
) -> None:
    reward, components = await _offered(*served, output=output)
    assert reward == 0.0
    assert {name for name, value in components.items() if not value} == lacks


@pytest.mark.parametrize("params", [{}, {"tools": []}, {"tools": None}, {"tools": [{"type": "web_search"}]}])
async def test_a_row_that_offers_no_tool_cannot_be_graded(params: dict[str, Any]) -> None:
    with pytest.raises(BadRowError, match=r"responses_create_params\.tools"):
        await _offered(output=[SAID], params=params)


@pytest.mark.parametrize(
    ("value", "schema", "fit"),
    [
        ({"city": "x"}, SCHEMA, True),
        ({"city": "x", "more": 1}, SCHEMA, False),
        ({"city": None}, SCHEMA, False),
        ({}, SCHEMA, False),
        ([], SCHEMA, False),
        (1.0, {"type": "integer"}, True),
        (1.5, {"type": "integer"}, False),
        (True, {"type": "integer"}, False),
        (True, {"type": "boolean"}, True),
        (None, {"type": ["string", "null"]}, True),
        ([1, "x"], {"type": "array", "items": {"type": "number"}}, False),
        ([1, 2.5], {"type": "array", "items": {"type": "number"}}, True),
        ("c", {"enum": ["c", "f"]}, True),
        (1, {"enum": [True]}, False),
        ("x", {"const": "y"}, False),
        ("x", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, False),
        (None, {"anyOf": [{"type": "integer"}, {"type": "null"}]}, True),
        ({"a": {"a": None}}, {"$ref": "#/$defs/n", "$defs": {"n": NODE}}, True),
        ({"a": {"a": 1}}, {"$ref": "#/$defs/n", "$defs": {"n": NODE}}, False),
        (1, {"$ref": "#/$defs/loop", "$defs": {"loop": {"$ref": "#/$defs/loop"}}}, False),
        (1, {"$ref": "#/$defs/none"}, False),
        ("x", {"type": "colour"}, False),
        ("x", {}, True),
    ],
)  # fmt: skip
def test_arguments_are_held_against_the_declared_schema(value: Any, schema: dict[str, Any], fit: bool) -> None:
    assert fits(value, schema) is fit


def test_numbers_are_equal_by_value_but_are_no_truth_values() -> None:
    assert same_json(1, 1.0)
    assert not same_json(1, True)
    assert same_json({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert not same_json([1, 2], [2, 1])
