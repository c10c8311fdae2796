"""A Responses request → a Chat Completions body.

Pure: the caller's request is never changed; the body may share parts with it and is for reading only.
What has no Chat form is refused with the field's name, except what the profile drops, which is recorded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from services.model_proxy.bridge.capabilities import Capabilities, Profile
from services.model_proxy.bridge.content import type_of
from services.model_proxy.bridge.history import ChatHistory
from services.model_proxy.bridge.names import NameMap
from services.model_proxy.bridge.refusals import RequestError
from services.model_proxy.bridge.tools import ToolTable, chat_tool_choice

# Fields that are translated, or only echoed in the response (`metadata`).
_KNOWN_FIELDS = frozenset(
    {
        "include", "input", "instructions", "max_output_tokens", "metadata", "model", "parallel_tool_calls",
        "reasoning", "seed", "stop", "stream", "temperature", "text", "tool_choice", "tools", "top_logprobs",
        "top_p", "user",
    }
)  # fmt: skip
_SAME_FIELDS = ("temperature", "top_p", "seed", "stop", "user")
# Values that say what happens anyway: no profile refuses them.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "include": ([],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "truncation": ("disabled",),
}
_LOGPROBS = "message.output_text.logprobs"
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_TEMPLATE = "chat_template_kwargs"
# What is not sampling: the rest of a body is reported as the effective values.
_NOT_SAMPLING = frozenset(
    {
        "messages", "model", "parallel_tool_calls", "response_format", "stream", "stream_options", "tool_choice",
        "tools", "user",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """`names` reads the answer, `dropped` names the fields without effect, `effective` holds the sampling values."""

    body: dict[str, Any]
    names: NameMap
    dropped: tuple[str, ...]
    effective: dict[str, Any]


def to_chat(
    request: Mapping[str, Any],
    *,
    model: str,
    capabilities: Capabilities,
    profile: Profile,
    defaults: Mapping[str, Any],
    overrides: Mapping[str, Any],
) -> ChatRequest:
    """Translate. `defaults` fill fields of the body that would be absent, `overrides` win last (null removes a field).

    Raises:
        RequestError: a field has no Chat form and the profile does not drop it.
    """
    dropped: list[str] = []
    screen = _Screen(profile, dropped)
    screen.refuse_unknown(request)
    names = NameMap()
    table = ToolTable(names, profile, dropped)
    body: dict[str, Any] = {"model": model, "messages": _messages(request, names, table, capabilities, screen)}
    _add_tools(body, request, names, table, capabilities, screen)
    _add_format(body, request, screen)
    _add_reasoning(body, request, capabilities, screen)
    _add_logprobs(body, request, screen)
    for name in _SAME_FIELDS:
        if request.get(name) is not None:
            body[name] = request[name]
    if request.get("max_output_tokens") is not None:
        body[capabilities.max_tokens_field] = request["max_output_tokens"]
    if request.get("stream") is True:
        body["stream"] = True
        if capabilities.stream_usage:
            body["stream_options"] = {"include_usage": True}
    _lay_over(body, request, capabilities, defaults, overrides)
    effective = {name: value for name, value in body.items() if name not in _NOT_SAMPLING}
    return ChatRequest(body, names, tuple(dict.fromkeys(dropped)), effective)


class _Screen:
    """Decides what may be left out."""

    def __init__(self, profile: Profile, dropped: list[str]) -> None:
        self.profile = profile
        self.dropped = dropped

    def refuse_unknown(self, request: Mapping[str, Any]) -> None:
        for name, value in request.items():
            if name not in _KNOWN_FIELDS and value is not None:
                self.drop(name, value)

    def drop(self, name: str, value: Any) -> None:
        """Record that a field has no effect, or refuse it."""
        if value not in _NEUTRAL.get(name, ()) and name not in self.profile.drops_fields:
            raise RequestError(_refusal(name), name, "unsupported_parameter")
        self.dropped.append(name)


def _refusal(name: str) -> str:
    if name == "previous_response_id":
        return (
            "previous_response_id needs stored responses, and none are kept here:"
            " send the whole conversation in 'input'."
        )
    return f"'{name}' has no form in Chat Completions, which this model's server speaks: leave it out."


def _messages(
    request: Mapping[str, Any], names: NameMap, table: ToolTable, capabilities: Capabilities, screen: _Screen
) -> list[dict[str, Any]]:
    if request.get("tools") is not None:
        table.collect(request["tools"], "tools")
    history = ChatHistory(names, table, capabilities, screen.profile, screen.dropped)
    if request.get("instructions"):
        history.instruct(request["instructions"])
    given = request.get("input")
    if isinstance(given, str):
        history.take({"role": "user", "content": given}, "input")
    elif isinstance(given, list):
        for index, item in enumerate(given):
            history.take(item, f"input[{index}]")
    else:
        raise RequestError("'input' must be a string or a list of items.", "input", "invalid_value")
    return history.messages()


def _add_tools(
    body: dict[str, Any],
    request: Mapping[str, Any],
    names: NameMap,
    table: ToolTable,
    capabilities: Capabilities,
    screen: _Screen,
) -> None:
    tools, choice = chat_tool_choice(request.get("tool_choice"), table.chat_tools(), names)
    if not tools:
        return
    body["tools"] = tools
    if choice is not None:
        body["tool_choice"] = choice
    parallel = request.get("parallel_tool_calls")
    if parallel is None:
        return
    if capabilities.parallel_tool_calls:
        body["parallel_tool_calls"] = parallel
    else:
        screen.drop("parallel_tool_calls", parallel)


def _add_format(body: dict[str, Any], request: Mapping[str, Any], screen: _Screen) -> None:
    text: dict[str, Any] = request.get("text") or {}
    for name, value in text.items():
        if name != "format" and value is not None:
            screen.drop(f"text.{name}", value)
    wanted = text.get("format")
    kind = type_of(wanted)
    if isinstance(wanted, dict) and kind == "json_schema":
        schema = {name: value for name, value in wanted.items() if name != "type" and value is not None}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif kind == "json_object":
        body["response_format"] = {"type": "json_object"}
    elif kind != "text" and wanted is not None:
        raise RequestError(
            f"text.format {kind!r} has no form in Chat Completions. Known: text, json_object, json_schema.",
            "text.format",
            "unsupported_value",
        )


def _add_reasoning(
    body: dict[str, Any], request: Mapping[str, Any], capabilities: Capabilities, screen: _Screen
) -> None:
    reasoning: dict[str, Any] = request.get("reasoning") or {}
    for name, value in reasoning.items():
        if value is None:
            continue
        if name == "effort" and capabilities.reasoning_effort:
            body["reasoning_effort"] = value
        else:
            screen.drop(f"reasoning.{name}", value)


def _add_logprobs(body: dict[str, Any], request: Mapping[str, Any], screen: _Screen) -> None:
    include = request.get("include")
    if include is not None:
        others = [name for name in include if name != _LOGPROBS]
        if others != include:
            body["logprobs"] = True
        if others or not include:
            screen.drop("include", others)
    if request.get("top_logprobs") is not None:
        body["logprobs"] = True
        body["top_logprobs"] = request["top_logprobs"]


def _lay_over(
    body: dict[str, Any],
    request: Mapping[str, Any],
    capabilities: Capabilities,
    defaults: Mapping[str, Any],
    overrides: Mapping[str, Any],
) -> None:
    """Defaults below, overrides above. Template arguments are merged one by one: default, request, override."""
    limit = capabilities.max_tokens_field
    template = {**(defaults.get(_TEMPLATE) or {}), **_template_of(request, capabilities)}
    for name, value in defaults.items():
        body.setdefault(limit if name in _LIMITS else name, value)
    if template:
        body[_TEMPLATE] = {**template, **(overrides.get(_TEMPLATE) or {})}
    for name, value in overrides.items():
        if name == _TEMPLATE and template:
            continue
        body[limit if name in _LIMITS else name] = value
    for name in [name for name, value in body.items() if value is None]:
        del body[name]


def _template_of(request: Mapping[str, Any], capabilities: Capabilities) -> dict[str, Any]:
    given = (request.get("metadata") or {}).get(_TEMPLATE)
    if given is None or not capabilities.chat_template_kwargs:
        return {}
    at = f"metadata.{_TEMPLATE}"
    try:
        arguments = orjson.loads(given) if isinstance(given, str) else given
    except orjson.JSONDecodeError as error:
        raise RequestError(f"'{at}' is not valid JSON: {error}", at, "invalid_value") from error
    if not isinstance(arguments, dict):
        raise RequestError(f"'{at}' must be a JSON object.", at, "invalid_value")
    return arguments
