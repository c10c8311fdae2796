"""Tool definitions and the choice among them, in Chat form.

Every tool becomes a function with a flat name. A custom tool becomes a function with one string, `input`;
its grammar stands in that string's description, since Chat Completions has no place to enforce it.
"""

from collections.abc import Iterator
from typing import Any

from services.model_proxy.bridge.capabilities import Profile
from services.model_proxy.bridge.content import type_of
from services.model_proxy.bridge.names import NameMap, ToolKind, ToolName
from services.model_proxy.bridge.refusals import RequestError

_CALLABLE: dict[str, ToolKind] = {"function": "function", "custom": "custom"}
_NO_PARAMETERS = {"type": "object", "properties": {}}
TOOL_SEARCH = ToolName(None, "tool_search", "tool_search")


class ToolTable:
    """Collects every tool that the model may call, wherever the request declares it."""

    def __init__(self, names: NameMap, profile: Profile, dropped: list[str]) -> None:
        self._names = names
        self._profile = profile
        self._dropped = dropped
        self._found: dict[ToolName, dict[str, Any]] = {}

    def collect(self, tools: Any, at: str) -> list[tuple[str, dict[str, Any]]]:
        """Take a list of tools and give their flat names and definitions; a known tool is not taken twice.

        Tools outside any namespace are named first, so that they keep their own names.

        Raises:
            RequestError: a tool has no Chat form and the profile does not drop it.
        """
        if not isinstance(tools, list):
            raise RequestError(f"'{at}' must be a list of tools.", at, "invalid_value")
        listed = [named for index, tool in enumerate(tools) for named in self._named(tool, f"{at}[{index}]")]
        for name, _ in sorted(listed, key=lambda named: named[0].namespace is not None):
            self._names.add(name)
        for name, definition in listed:
            self._found.setdefault(name, definition)
        return [(self._names.add(name), definition) for name, definition in listed]

    def chat_tools(self) -> list[dict[str, Any]]:
        """All of them, in the order in which they were taken."""
        return [_chat_tool(self._names.add(name), name, definition) for name, definition in self._found.items()]

    def _named(self, tool: Any, at: str) -> Iterator[tuple[ToolName, dict[str, Any]]]:
        kind = type_of(tool)
        if kind == "namespace":
            yield from self._members(tool, at)
        elif kind in _CALLABLE:
            yield ToolName(None, _name_of(tool, at), _CALLABLE[kind]), tool
        elif kind == "tool_search" and tool.get("execution") == "client":
            yield TOOL_SEARCH, tool
        elif kind in self._profile.drops_tools:
            self._dropped.append(f"tools.{kind}")
        else:
            raise RequestError(
                f"'{at}': a tool of type {kind!r} has no form in Chat Completions. Leave it out, or declare a"
                " function tool and run it yourself.",
                at,
                "unsupported_value",
            )

    def _members(self, group: dict[str, Any], at: str) -> Iterator[tuple[ToolName, dict[str, Any]]]:
        namespace = _name_of(group, at)
        members = group.get("tools") or []
        if not isinstance(members, list):
            raise RequestError(f"'{at}.tools' must be a list of tools.", f"{at}.tools", "invalid_value")
        if group.get("description") and members:
            self._dropped.append("tools.namespace.description")
        for index, tool in enumerate(members):
            kind, where = type_of(tool), f"{at}.tools[{index}]"
            if kind not in _CALLABLE:
                raise RequestError(f"'{where}' must be a function or custom tool.", where, "unsupported_value")
            yield ToolName(namespace, _name_of(tool, where), _CALLABLE[kind]), tool


def _name_of(tool: dict[str, Any], at: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"'{at}.name' must be a non-empty string.", f"{at}.name", "invalid_value")
    return name


def called_tool(call: dict[str, Any], kind: ToolKind, at: str) -> ToolName:
    """The tool that a call or a choice names.

    Raises:
        RequestError: its name or namespace is not a string.
    """
    namespace = call.get("namespace")
    if namespace is not None and not isinstance(namespace, str):
        raise RequestError(f"'{at}.namespace' must be a string.", f"{at}.namespace", "invalid_value")
    return ToolName(namespace or None, _name_of(call, at), kind)


def _chat_tool(flat: str, name: ToolName, tool: dict[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = {"name": flat}
    if tool.get("description"):
        function["description"] = tool["description"]
    function["parameters"] = _freeform(tool) if name.kind == "custom" else tool.get("parameters") or _NO_PARAMETERS
    if tool.get("strict") is True:
        function["strict"] = True
    return {"type": "function", "function": function}


def _freeform(tool: dict[str, Any]) -> dict[str, Any]:
    described = "The tool's whole input as raw text."
    grammar = tool.get("format")
    if isinstance(grammar, dict) and grammar.get("definition"):
        described += f" It must match this {grammar.get('syntax', '')} grammar:\n{grammar['definition']}"
    return {
        "type": "object",
        "properties": {"input": {"type": "string", "description": described}},
        "required": ["input"],
        "additionalProperties": False,
    }


def chat_tool_choice(
    choice: Any, tools: list[dict[str, Any]], names: NameMap
) -> tuple[list[dict[str, Any]], str | dict[str, Any] | None]:
    """The tools that may be called, and the choice among them, null where none has to be sent.

    A list of allowed tools is said by sending only those: few servers know Chat's own form of it.

    Raises:
        RequestError: the choice has no Chat form, or names a tool that is not there.
    """
    if choice in (None, "auto", "none", "required"):
        if choice == "required" and not tools:
            raise RequestError("tool_choice 'required' needs tools.", "tool_choice", "invalid_value")
        return tools, choice if tools else None
    kind = type_of(choice)
    if kind == "allowed_tools":
        return _allowed(choice, tools, names)
    if kind in ("function", "custom", "tool_search"):
        return tools, {"type": "function", "function": {"name": _chosen(choice, tools, names, "tool_choice")}}
    raise RequestError(
        f"tool_choice {kind or choice!r} has no form in Chat Completions. Known: auto, none, required, and a choice"
        " of type function, custom, tool_search or allowed_tools.",
        "tool_choice",
        "unsupported_value",
    )


def _allowed(
    choice: dict[str, Any], tools: list[dict[str, Any]], names: NameMap
) -> tuple[list[dict[str, Any]], str | dict[str, Any] | None]:
    mode, listed = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required") or not isinstance(listed, list):
        raise RequestError(
            "tool_choice allowed_tools needs a list of tools and the mode 'auto' or 'required'.",
            "tool_choice",
            "invalid_value",
        )
    allowed = {_chosen(tool, tools, names, f"tool_choice.tools[{index}]") for index, tool in enumerate(listed)}
    return chat_tool_choice(mode, [tool for tool in tools if tool["function"]["name"] in allowed], names)


def _chosen(choice: Any, tools: list[dict[str, Any]], names: NameMap, at: str) -> str:
    kind = type_of(choice)
    if kind == "tool_search":
        wanted = TOOL_SEARCH
    elif kind in _CALLABLE:
        wanted = called_tool(choice, _CALLABLE[kind], at)
    else:
        raise RequestError(f"'{at}' must choose a function or custom tool.", at, "unsupported_value")
    flat = names.flat(wanted)
    if flat is None or all(tool["function"]["name"] != flat for tool in tools):
        raise RequestError(f"'{at}' names a tool that is not among 'tools': {wanted.name!r}.", at, "invalid_value")
    return flat
