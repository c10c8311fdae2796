"""A Messages request → a Responses request, which is what the bridge translates further or a server takes as it is.

Pure: the caller's request is never changed. What has no form is refused with the field's name, except what
the profile drops, which is recorded. Marks of prompt caching (`cache_control`) ask for nothing that could
be seen in an answer and are passed over.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from services.model_proxy.bridge.capabilities import Capabilities, Profile
from services.model_proxy.bridge.content import type_of
from services.model_proxy.bridge.messages_history import MessageItems, blocks_of, string, text_of_blocks
from services.model_proxy.bridge.refusals import RequestError
from services.model_proxy.bridge.request import ChatRequest, to_chat

Speaks = Literal["chat_completions", "responses"]

_APIS: dict[str, str] = {"chat_completions": "Chat Completions", "responses": "the Responses API"}
_KNOWN_FIELDS = frozenset(
    {
        "cache_control", "max_tokens", "messages", "metadata", "model", "output_config", "output_format",
        "stop_sequences", "stream", "system", "temperature", "thinking", "tool_choice", "tools", "top_k", "top_p",
    }
)  # fmt: skip
# Values that ask for what happens anyway: no profile refuses them.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "mcp_servers": ([],),
    "metadata": ({},),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "tools.allowed_callers": (["direct"], []),
    "tools.defer_loading": (False,),
    "tools.eager_input_streaming": (False,),
}
_TOOL_FIELDS = frozenset({"cache_control", "description", "input_schema", "name", "strict", "type"})
_VERSION = re.compile(r"_\d{8}$")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# How the Chat half of the bridge names what it drops.
_NAMES_HERE = {"input.reasoning": "messages.thinking"}


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """`request` is of the Responses API. `top_k` is not, so it stands beside it; `dropped` names what had no effect."""

    request: dict[str, Any]
    top_k: int | None
    dropped: tuple[str, ...]


def from_messages(
    request: Mapping[str, Any], *, speaks: Speaks, capabilities: Capabilities, profile: Profile
) -> MessagesRequest:
    """Translate for a server that speaks Chat Completions or the Responses API.

    Raises:
        RequestError: a field has no form there and the profile does not drop it.
    """
    screen = _Screen(profile, speaks)
    for name, value in request.items():
        if name not in _KNOWN_FIELDS and value is not None:
            screen.drop(name, value)
    translated: dict[str, Any] = {
        "model": request.get("model"),
        "input": _items(request, screen),
        "max_output_tokens": _limit(request),
    }
    if request.get("system"):
        translated["instructions"] = text_of_blocks(blocks_of(request["system"], "system"), "system")
    if request.get("stream") is True:
        translated["stream"] = True
    _add_tools(translated, request, capabilities, screen)
    _add_output_config(translated, request, capabilities, screen)
    _add_metadata(translated, request, capabilities, screen)
    _add_stops(translated, request, screen)
    top_k = _add_sampling(translated, request, capabilities, screen)
    return MessagesRequest(translated, top_k, tuple(dict.fromkeys(screen.dropped)))


def messages_to_chat(
    messages: MessagesRequest,
    *,
    model: str,
    capabilities: Capabilities,
    profile: Profile,
    defaults: Mapping[str, Any],
    overrides: Mapping[str, Any],
) -> ChatRequest:
    """The Chat Completions body; see `to_chat`.

    Raises:
        RequestError: `metadata.chat_template_kwargs` is not a JSON object.
    """
    if messages.top_k is not None:
        defaults = {**defaults, "top_k": messages.top_k}
    chat = to_chat(
        messages.request,
        model=model,
        capabilities=capabilities,
        profile=profile,
        defaults=defaults,
        overrides=overrides,
    )
    dropped = (*messages.dropped, *(_NAMES_HERE.get(name, name) for name in chat.dropped))
    return replace(chat, dropped=dropped)


class _Screen:
    """Decides what may be left out."""

    def __init__(self, profile: Profile, speaks: Speaks) -> None:
        self.profile = profile
        self.speaks = speaks
        self.dropped: list[str] = []

    def drop(self, name: str, value: Any = None) -> None:
        """Record that a field has no effect, or refuse it."""
        if name not in self.profile.drops_messages_fields and value not in _NEUTRAL.get(name, ()):
            raise RequestError(
                f"'{name}' has no form in {_APIS[self.speaks]}, which this model's server speaks: leave it out.",
                name,
                "unsupported_parameter",
            )
        self.dropped.append(name)


def _items(request: Mapping[str, Any], screen: _Screen) -> list[dict[str, Any]]:
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("'messages' must be a non-empty list of messages.", "messages", "invalid_value")
    history = MessageItems(screen.drop, keeps_encrypted=screen.speaks == "responses")
    for index, message in enumerate(messages):
        history.take(message, f"messages[{index}]")
    if messages[-1]["role"] == "assistant":
        at = f"messages[{len(messages) - 1}]"
        raise RequestError(
            f"'{at}' is of the assistant and the last one. The beginning of an answer has no form in"
            f" {_APIS[screen.speaks]}: end with a message of the user.",
            at,
            "unsupported_value",
        )
    return history.items


def _limit(request: Mapping[str, Any]) -> int:
    limit = request.get("max_tokens")
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise RequestError("'max_tokens' is required and must be a positive integer.", "max_tokens", "invalid_value")
    return limit


def _add_tools(
    translated: dict[str, Any], request: Mapping[str, Any], capabilities: Capabilities, screen: _Screen
) -> None:
    given = [] if request.get("tools") is None else request["tools"]
    if not isinstance(given, list):
        raise RequestError("'tools' must be a list of tools.", "tools", "invalid_value")
    listed = [_tool(tool, f"tools[{index}]", screen) for index, tool in enumerate(given)]
    tools = [tool for tool in listed if tool is not None]
    if tools:
        translated["tools"] = tools
    choice = request.get("tool_choice")
    if choice is None:
        return
    translated["tool_choice"] = _choice(choice, [tool["name"] for tool in tools])
    if choice.get("disable_parallel_tool_use") is True and tools:
        if screen.speaks == "responses" or capabilities.parallel_tool_calls:
            translated["parallel_tool_calls"] = False
        else:
            screen.drop("tool_choice.disable_parallel_tool_use")


def _tool(tool: Any, at: str, screen: _Screen) -> dict[str, Any] | None:
    if not isinstance(tool, dict):
        raise RequestError(f"'{at}' must be a tool.", at, "invalid_value")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        _drop_foreign_tool(kind, at, screen)
        return None
    name = string(tool, "name", at)
    if not name or not isinstance(tool.get("input_schema"), dict):
        raise RequestError(f"'{at}' must have a name and an input_schema.", at, "invalid_value")
    for field, value in tool.items():
        if field not in _TOOL_FIELDS and value is not None:
            screen.drop(f"tools.{field}", value)
    # Said in any case: where it is left out, servers of the Responses API take it for true.
    function = {
        "type": "function",
        "name": name,
        "parameters": tool["input_schema"],
        "strict": tool.get("strict") is True,
    }
    if tool.get("description"):
        function["description"] = tool["description"]
    return function


def _drop_foreign_tool(kind: Any, at: str, screen: _Screen) -> None:
    """A tool that Anthropic's servers run, or whose definition only their models know."""
    plain = _VERSION.sub("", str(kind))
    if plain not in screen.profile.drops_tools:
        raise RequestError(
            f"'{at}': a tool of type {kind!r} is known to Anthropic's own servers only. Leave it out, or declare a"
            " custom tool with an input_schema and run it yourself.",
            at,
            "unsupported_value",
        )
    screen.dropped.append(f"tools.{plain}")


def _choice(choice: Any, names: list[str]) -> str | dict[str, Any]:
    kind = type_of(choice)
    if kind == "tool":
        name = string(choice, "name", "tool_choice")
        if name not in names:
            raise RequestError(
                f"'tool_choice.name': no tool of 'tools' is named {name!r}.", "tool_choice.name", "invalid_value"
            )
        return {"type": "function", "name": name}
    if kind not in _CHOICES:
        raise RequestError("'tool_choice.type' must be auto, any, tool or none.", "tool_choice.type", "invalid_value")
    if kind == "any" and not names:
        raise RequestError("tool_choice 'any' needs tools.", "tool_choice", "invalid_value")
    return _CHOICES[kind]


def _add_output_config(
    translated: dict[str, Any], request: Mapping[str, Any], capabilities: Capabilities, screen: _Screen
) -> None:
    config = request.get("output_config") or {}
    if not isinstance(config, dict):
        raise RequestError("'output_config' must be an object.", "output_config", "invalid_value")
    for name, value in config.items():
        if value is None or name == "format":
            continue
        if name == "effort" and (screen.speaks == "responses" or capabilities.reasoning_effort):
            translated["reasoning"] = {"effort": value}
        else:
            screen.drop(f"output_config.{name}", value)
    at = "output_format" if config.get("format") is None else "output_config.format"
    wanted = config.get("format") or request.get("output_format")
    if wanted is None:
        return
    if type_of(wanted) != "json_schema" or not isinstance(wanted.get("schema"), dict):
        raise RequestError(f"'{at}' must be of type json_schema and have a schema.", at, "invalid_value")
    schema = {"type": "json_schema", "name": "answer", "schema": wanted["schema"], "strict": True}
    translated["text"] = {"format": schema}


def _add_sampling(
    translated: dict[str, Any], request: Mapping[str, Any], capabilities: Capabilities, screen: _Screen
) -> int | None:
    """Gives `top_k`, if it can be sent on."""
    for name in ("temperature", "top_p"):
        if request.get(name) is not None:
            translated[name] = request[name]
    if request.get("thinking") is not None:
        screen.drop("thinking", request["thinking"])
    top_k: int | None = request.get("top_k")
    if top_k is not None and not capabilities.top_k:
        screen.drop("top_k", top_k)
        return None
    return top_k


def _add_stops(translated: dict[str, Any], request: Mapping[str, Any], screen: _Screen) -> None:
    stops = request.get("stop_sequences") or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise RequestError("'stop_sequences' must be a list of strings.", "stop_sequences", "invalid_value")
    if stops and screen.speaks == "responses":
        screen.drop("stop_sequences", stops)
    elif stops:
        translated["stop"] = stops


def _add_metadata(
    translated: dict[str, Any], request: Mapping[str, Any], capabilities: Capabilities, screen: _Screen
) -> None:
    metadata = request.get("metadata")
    if metadata is None:
        return
    if not isinstance(metadata, dict):
        raise RequestError("'metadata' must be an object.", "metadata", "invalid_value")
    arguments = metadata.get("chat_template_kwargs")
    if arguments is not None and capabilities.chat_template_kwargs and screen.speaks == "chat_completions":
        translated["metadata"] = {"chat_template_kwargs": arguments}
    else:
        screen.drop("metadata", metadata)
