"""Input items → chat messages.

Neighbouring assistant items become one message (text, reasoning, calls), as one answer of the model was.
A tool's output stands right behind the message with its call, wherever the input has it: Chat
Completions knows no other place.
"""

from typing import Any

import orjson

from services.model_proxy.bridge.capabilities import Capabilities, Profile
from services.model_proxy.bridge.content import chat_content, text_of, type_of
from services.model_proxy.bridge.names import NameMap, ToolName
from services.model_proxy.bridge.refusals import RequestError
from services.model_proxy.bridge.tools import TOOL_SEARCH, ToolTable, called_tool

_SYSTEM_ROLES = ("system", "developer")
_BETWEEN_MESSAGES = "\n\n"


class _Turn:
    """One answer of the model, and what its calls gave."""

    __slots__ = ("calls", "images", "outputs", "reasoning", "texts")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.outputs: list[dict[str, Any]] = []
        self.images: list[dict[str, Any]] = []


class ChatHistory:
    """Takes the input item by item; `messages` gives the result."""

    def __init__(
        self, names: NameMap, tools: ToolTable, capabilities: Capabilities, profile: Profile, dropped: list[str]
    ) -> None:
        self._names = names
        self._tools = tools
        self._capabilities = capabilities
        self._profile = profile
        self._dropped = dropped
        self._system: list[str] = []
        self._entries: list[_Turn | dict[str, Any]] = []
        self._turn: _Turn | None = None
        self._turn_of_call: dict[str, _Turn] = {}

    def instruct(self, instructions: Any) -> None:
        """The request's `instructions`: always the first words of the system message.

        Raises:
            RequestError: they are not a string.
        """
        self._system.append(text_of(instructions, "instructions"))

    def take(self, item: Any, at: str) -> None:
        """One input item.

        Raises:
            RequestError: it has no Chat form and the profile does not drop it.
        """
        kind = "message" if isinstance(item, dict) and item.get("type") is None else type_of(item)
        handler = _HANDLERS.get(kind)
        if handler is not None:
            handler(self, item, at)
        elif kind in self._profile.drops_items:
            self._dropped.append(f"input.{kind}")
        else:
            raise RequestError(
                f"'{at}': an input item of type {kind!r} has no form in Chat Completions.", at, "unsupported_value"
            )

    def messages(self) -> list[dict[str, Any]]:
        """All messages in order, the one system message first."""
        messages: list[dict[str, Any]] = []
        if self._system:
            messages.append({"role": "system", "content": _BETWEEN_MESSAGES.join(self._system)})
        for entry in self._answerable():
            if isinstance(entry, _Turn):
                messages += self._turn_messages(entry)
            else:
                messages.append(entry)
        return messages

    def _answerable(self) -> list[_Turn | dict[str, Any]]:
        """All entries but reasoning at the very end, which is what a client keeps of an answer that was cut off
        before it asks again. The model would find an empty answer of its own in its prompt."""
        last = self._entries[-1] if self._entries else None
        if not isinstance(last, _Turn) or last.texts or last.calls:
            return self._entries
        self._dropped.append("input.reasoning")
        return self._entries[:-1]

    def _turn_messages(self, turn: _Turn) -> list[dict[str, Any]]:
        content = _BETWEEN_MESSAGES.join(turn.texts) if turn.texts else None
        message: dict[str, Any] = {"role": "assistant", "content": content}
        field = self._capabilities.reasoning_field
        if turn.reasoning:
            reasoning = _BETWEEN_MESSAGES.join(turn.reasoning)
            if field == "think_tags":
                message["content"] = f"<think>{reasoning}</think>{content or ''}"
            elif field == "none":
                self._dropped.append("input.reasoning")
            else:
                message[field] = reasoning
        if turn.calls:
            message["tool_calls"] = turn.calls
        elif message["content"] is None:
            # Most templates cannot render an assistant message that has neither text nor calls.
            message["content"] = ""
        messages = [message, *turn.outputs]
        if turn.images:
            messages.append({"role": "user", "content": turn.images})
        return messages

    def _message(self, item: dict[str, Any], at: str) -> None:
        role, content, at = item.get("role"), item.get("content"), f"{at}.content"
        if role == "assistant":
            self._open_turn().texts.append(text_of(content, at))
        elif role == "user":
            self._entries.append({"role": "user", "content": chat_content(content, at)})
            self._turn = None
        elif role not in _SYSTEM_ROLES:
            raise RequestError(f"'{at}': role {role!r} is not known.", at.replace(".content", ".role"), "invalid_value")
        elif self._capabilities.developer_role:
            self._entries.append({"role": role, "content": text_of(content, at, "\n")})
            self._turn = None
        else:
            self._system.append(text_of(content, at, "\n"))

    def _reasoning(self, item: dict[str, Any], at: str) -> None:
        text = text_of(item.get("content") or [], f"{at}.content")
        if not text:
            text = text_of(item.get("summary") or [], f"{at}.summary", "\n")
        if text:
            self._open_turn().reasoning.append(text)
        elif item.get("encrypted_content"):
            self._drop_encrypted(at)

    def _drop_encrypted(self, at: str) -> None:
        if "input.reasoning.encrypted_content" not in self._profile.drops_fields:
            raise RequestError(
                f"'{at}' holds only encrypted reasoning, which no other server can read.",
                f"{at}.encrypted_content",
                "unsupported_value",
            )
        self._dropped.append("input.reasoning.encrypted_content")

    def _function_call(self, item: dict[str, Any], at: str) -> None:
        self._call(item, at, called_tool(item, "function", at), item.get("arguments"))

    def _custom_call(self, item: dict[str, Any], at: str) -> None:
        self._call(item, at, called_tool(item, "custom", at), _json({"input": _string(item, "input", at)}))

    def _search_call(self, item: dict[str, Any], at: str) -> None:
        self._call(item, at, TOOL_SEARCH, item.get("arguments"))

    def _call(self, item: dict[str, Any], at: str, tool: ToolName, arguments: Any) -> None:
        call_id = _string(item, "call_id", at)
        turn = self._open_turn()
        turn.calls.append(
            {
                "id": call_id,
                "type": "function",
                "function": {
                    "name": self._names.add(tool),
                    "arguments": _arguments(arguments),
                },
            }
        )
        self._turn_of_call[call_id] = turn

    def _output(self, item: dict[str, Any], at: str) -> None:
        output = chat_content(item.get("output"), f"{at}.output")
        call_id, turn = self._answered(item, at)
        if isinstance(output, list) and self._capabilities.tool_images == "user_message":
            texts = [part["text"] for part in output if part["type"] == "text"]
            turn.images.append({"type": "text", "text": f"Beside its text, the tool call {call_id} returned:"})
            turn.images += [part for part in output if part["type"] != "text"]
            output = "\n".join(texts) or "The output follows in the next user message."
        turn.outputs.append({"role": "tool", "tool_call_id": call_id, "content": output})

    def _search_output(self, item: dict[str, Any], at: str) -> None:
        """The found tools themselves are sent among `tools`."""
        call_id, turn = self._answered(item, at)
        tools = self._tools.collect(item.get("tools"), f"{at}.tools")
        found = [{"name": flat, "description": tool.get("description")} for flat, tool in tools]
        turn.outputs.append({"role": "tool", "tool_call_id": call_id, "content": _json({"tools": found})})

    def _answered(self, item: dict[str, Any], at: str) -> tuple[str, _Turn]:
        call_id = _string(item, "call_id", at)
        turn = self._turn_of_call.get(call_id)
        if turn is None:
            raise RequestError(
                f"'{at}.call_id': the input has no tool call {call_id!r} before this output.",
                f"{at}.call_id",
                "invalid_value",
            )
        if turn is self._turn:
            self._turn = None
        return call_id, turn

    def _additional_tools(self, item: dict[str, Any], at: str) -> None:
        self._tools.collect(item.get("tools"), f"{at}.tools")

    def _open_turn(self) -> _Turn:
        if self._turn is None:
            self._turn = _Turn()
            self._entries.append(self._turn)
        return self._turn


_HANDLERS = {
    "message": ChatHistory._message,
    "reasoning": ChatHistory._reasoning,
    "function_call": ChatHistory._function_call,
    "function_call_output": ChatHistory._output,
    "custom_tool_call": ChatHistory._custom_call,
    "custom_tool_call_output": ChatHistory._output,
    "tool_search_call": ChatHistory._search_call,
    "tool_search_output": ChatHistory._search_output,
    "additional_tools": ChatHistory._additional_tools,
}


def _string(item: dict[str, Any], name: str, at: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"'{at}.{name}' must be a string.", f"{at}.{name}", "invalid_value")
    return value


def _arguments(arguments: Any) -> str:
    """Byte for byte as they were, except that nothing is said as an empty object: templates parse it."""
    if isinstance(arguments, str):
        return arguments if arguments.strip() else "{}"
    return _json(arguments or {})


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()
