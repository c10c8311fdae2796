"""What the upstream is asked: fields, formats, limits, defaults and overrides, refusals."""

from copy import deepcopy
from typing import Any

import pytest

from services.model_proxy.bridge.capabilities import PROFILES, Capabilities
from services.model_proxy.bridge.refusals import RequestError
from shared.contracts.chat import REQUEST_FIELDS
from tests.bridge.chats import LOOK_UP, SHELL, asking, chat_of

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
EVERYTHING = asking(
    [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
    instructions="Be brief.",
    tools=[LOOK_UP, SHELL],
    tool_choice="auto",
    parallel_tool_calls=False,
    reasoning={"effort": "low", "summary": "auto"},
    text={"format": {"type": "json_object"}, "verbosity": "low"},
    include=["reasoning.encrypted_content", "message.output_text.logprobs"],
    store=False,
    stream=True,
    temperature=0.5,
    top_p=0.9,
    top_logprobs=2,
    max_output_tokens=77,
    prompt_cache_key="k",
    client_metadata={"a": "b"},
    metadata={"run": "7"},
    service_tier="auto",
    truncation="disabled",
    user="u",
    seed=3,
    stop=["END"],
)


@pytest.mark.behaviour("MS-7")
@pytest.mark.parametrize("profile", ["openai", "codex"])
def test_the_callers_request_is_never_changed(profile: str) -> None:
    request = deepcopy(EVERYTHING)
    chat_of(request, profile=profile, defaults={"top_p": 0.1}, overrides={"temperature": 1.0, "stop": None})
    assert request == EVERYTHING


@pytest.mark.behaviour("MS-8")
def test_only_known_chat_fields_are_sent() -> None:
    body = chat_of(EVERYTHING, capabilities=Capabilities(reasoning_effort=True)).body
    assert body.keys() <= REQUEST_FIELDS
    assert body["reasoning_effort"] == "low"
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert (body["temperature"], body["top_p"], body["seed"], body["stop"], body["user"]) == (0.5, 0.9, 3, ["END"], "u")
    assert (body["logprobs"], body["top_logprobs"]) == (True, 2)
    assert body["parallel_tool_calls"] is False


def test_what_has_no_effect_is_recorded() -> None:
    dropped = chat_of(EVERYTHING).dropped
    assert set(dropped) == {
        "store", "prompt_cache_key", "client_metadata", "service_tier", "truncation", "text.verbosity",
        "reasoning.effort", "reasoning.summary", "include",
    }  # fmt: skip


def test_a_plain_request_becomes_a_plain_body() -> None:
    chat = chat_of(asking(instructions=""))
    assert chat.body == {"model": "upstream-model", "messages": [{"role": "user", "content": "hi"}]}
    assert chat.dropped == ()
    assert chat.effective == {}


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_the_output_limit_goes_by_the_upstreams_name(field: Any) -> None:
    chat = chat_of(asking(max_output_tokens=64), capabilities=Capabilities(max_tokens_field=field))
    assert chat.effective == {field: 64}


def test_a_stream_asks_for_usage_only_where_the_upstream_takes_it() -> None:
    body = chat_of(asking(stream=True), capabilities=Capabilities(stream_usage=False)).body
    assert body["stream"] is True
    assert "stream_options" not in body


@pytest.mark.behaviour("MS-8")
@pytest.mark.parametrize(
    ("wanted", "sent"),
    [
        (
            {"type": "json_schema", "name": "ans", "strict": True, "schema": SCHEMA, "description": None},
            {"type": "json_schema", "json_schema": {"name": "ans", "strict": True, "schema": SCHEMA}},
        ),
        ({"type": "json_object"}, {"type": "json_object"}),
        ({"type": "text"}, None),
        (None, None),
    ],
)
def test_the_text_format_becomes_a_response_format(wanted: Any, sent: Any) -> None:
    assert chat_of(asking(text={"format": wanted})).body.get("response_format") == sent


def test_an_unknown_text_format_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="'grammar'") as refusal:
        chat_of(asking(text={"format": {"type": "grammar"}}))
    assert (refusal.value.param, refusal.value.code) == ("text.format", "unsupported_value")


@pytest.mark.behaviour("MS-8")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("background", True),
        ("context_management", [{"type": "compaction"}]),
        ("conversation", "conv_1"),
        ("max_tool_calls", 3),
        ("moderation", {"model": "x"}),
        ("previous_response_id", "resp_1"),
        ("prompt", {"id": "p"}),
        ("truncation", "auto"),
    ],
)
@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_what_has_no_chat_form_is_refused_by_name(profile: str, name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as refusal:
        chat_of(asking(**{name: value}), profile=profile)
    assert (refusal.value.param, refusal.value.code) == (name, "unsupported_parameter")


def test_a_previous_response_is_refused_with_the_remedy() -> None:
    with pytest.raises(RequestError, match="send the whole conversation in 'input'"):
        chat_of(asking(previous_response_id="resp_1"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"prompt_cache_key": "k"}, "prompt_cache_key"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"tools": [LOOK_UP], "parallel_tool_calls": False}, "parallel_tool_calls"),
    ],
)
def test_the_strict_profile_drops_nothing_that_means_something(fields: dict[str, Any], param: str) -> None:
    capabilities = Capabilities(parallel_tool_calls=False)
    with pytest.raises(RequestError) as refusal:
        chat_of(asking(**fields), profile="strict", capabilities=capabilities)
    assert refusal.value.param == param
    assert param in chat_of(asking(**fields), profile="openai", capabilities=capabilities).dropped


def test_the_strict_profile_lets_pass_what_says_what_happens_anyway() -> None:
    neutral = {"store": False, "include": [], "background": False, "service_tier": "auto", "truncation": "disabled"}
    nothing = {"prompt_cache_key": None, "reasoning": {"effort": None}, "text": {"verbosity": None}, "tools": None}
    assert set(chat_of(asking(**neutral, **nothing), profile="strict").dropped) == set(neutral)


def test_log_probabilities_alone_drop_nothing() -> None:
    chat = chat_of(asking(include=["message.output_text.logprobs"]), profile="strict")
    assert chat.body["logprobs"] is True
    assert chat.dropped == ()


@pytest.mark.behaviour("MS-16")
def test_defaults_fill_overrides_win_and_the_effective_values_are_told() -> None:
    chat = chat_of(
        asking(temperature=0.2, max_output_tokens=10, user="u", stop=["x"]),
        defaults={"temperature": 0.9, "top_p": 0.8, "max_output_tokens": 5},
        overrides={"temperature": 1.0, "max_tokens": 99, "top_k": 20, "stop": None},
        capabilities=Capabilities(max_tokens_field="max_completion_tokens"),
    )
    assert chat.effective == {"temperature": 1.0, "top_p": 0.8, "max_completion_tokens": 99, "top_k": 20}
    assert chat.body["user"] == "u"


@pytest.mark.behaviour("MS-16")
def test_template_arguments_are_laid_over_each_other_one_by_one() -> None:
    request = asking(metadata={"chat_template_kwargs": '{"thinking": true, "b": 2, "c": 3}'})
    layers: dict[str, Any] = {
        "defaults": {"chat_template_kwargs": {"thinking": False, "a": 1}},
        "overrides": {"chat_template_kwargs": {"c": 4}},
    }
    allowed = chat_of(request, capabilities=Capabilities(chat_template_kwargs=True), **layers)
    assert allowed.body["chat_template_kwargs"] == {"thinking": True, "a": 1, "b": 2, "c": 4}
    assert chat_of(request, **layers).body["chat_template_kwargs"] == {"thinking": False, "a": 1, "c": 4}
    assert chat_of(request, overrides=layers["overrides"]).body["chat_template_kwargs"] == {"c": 4}
    given = asking(metadata={"chat_template_kwargs": {"d": 1}})
    assert chat_of(given, capabilities=Capabilities(chat_template_kwargs=True)).body["chat_template_kwargs"] == {"d": 1}


@pytest.mark.parametrize("given", ["{not json", "[1]"])
def test_template_arguments_that_are_no_object_are_refused(given: str) -> None:
    with pytest.raises(RequestError) as refusal:
        chat_of(asking(metadata={"chat_template_kwargs": given}), capabilities=Capabilities(chat_template_kwargs=True))
    assert refusal.value.param == "metadata.chat_template_kwargs"


def test_an_input_that_is_neither_text_nor_a_list_is_refused() -> None:
    with pytest.raises(RequestError) as refusal:
        chat_of(asking(7))
    assert refusal.value.param == "input"
