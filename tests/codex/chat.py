"""A Chat Completions server whose answers are written down in advance, one per request."""

from collections.abc import Sequence
from itertools import count
from typing import Any

import orjson

from tests.model_proxy.wire import DONE, END, SSE_HEAD, Asked, Handler, always, delta, event, json_body, piece

USAGE = {
    "prompt_tokens": 1000,
    "completion_tokens": 50,
    "total_tokens": 1050,
    "prompt_tokens_details": {"cached_tokens": 600},
    "completion_tokens_details": {"reasoning_tokens": 20},
}
# Small and odd, so that names, escapes and characters are cut in the middle.
_PIECE_CHARS = 7
_call_numbers = count(1)


class ScriptedChat:
    """Gives its answers in order. A request beyond them is a finding: `unexpected`."""

    def __init__(self, answers: Sequence[Handler]) -> None:
        self.asked: list[Asked] = []
        self.unexpected: list[str] = []
        self._answers = answers

    async def __call__(self, asked: Asked) -> None:
        if (asked.method, asked.path) != ("POST", "/v1/chat/completions") or len(self.asked) == len(self._answers):
            self.unexpected.append(f"{asked.method} {asked.path}: {asked.body[-2000:]!r}")
            await asked.write(json_body({"error": {"message": "no answer is left for this request"}}, 400))
            return
        self.asked.append(asked)
        await self._answers[len(self.asked) - 1](asked)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [asked.json for asked in self.asked]

    @property
    def left(self) -> int:
        """How many answers were not asked for."""
        return len(self._answers) - len(self.asked)


def streamed(*parts: dict[str, Any], finish: str) -> Handler:
    """An answer of these deltas."""
    return always(SSE_HEAD, *(event(delta(part)) for part in parts), tail(finish))


def tail(finish: str) -> bytes:
    """The end of an answer: why it ended, its usage, the end mark."""
    usage = {**delta({}), "choices": [], "usage": USAGE}
    return event(delta({}, finish)) + event(usage) + piece(DONE) + END


def says(text: str, *, finish: str = "stop") -> Handler:
    return streamed(*text_parts(text), finish=finish)


def text_parts(text: str) -> list[dict[str, Any]]:
    return [{"content": part} for part in _pieces(text)]


def reasoning_parts(text: str) -> list[dict[str, Any]]:
    return [{"reasoning_content": part} for part in _pieces(text)]


def call_parts(index: int, name: str, arguments: dict[str, Any] | str) -> list[dict[str, Any]]:
    """The call at `index` of an answer; arguments that are a string are sent as they are."""
    written = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    call_id = f"call_{next(_call_numbers)}"
    head = {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
    tail = [{"index": index, "function": {"arguments": part}} for part in _pieces(written)]
    return [{"tool_calls": [entry]} for entry in [head, *tail]]


def calls(*wanted: tuple[str, dict[str, Any] | str], before: Sequence[dict[str, Any]] = ()) -> Handler:
    """An answer that calls tools by their flat names, behind the deltas of `before`."""
    parts = [part for index, (name, arguments) in enumerate(wanted) for part in call_parts(index, name, arguments)]
    return streamed(*before, *parts, finish="tool_calls")


def shell(command: str) -> tuple[str, dict[str, Any]]:
    """A call of the CLI's shell tool."""
    return "exec_command", {"cmd": command}


def breaks_off(*parts: dict[str, Any]) -> Handler:
    """An answer whose connection ends behind these deltas."""
    return always(SSE_HEAD, *(event(delta(part)) for part in parts), then_close=True)


def refuses(status: int, error: dict[str, Any], *headers: tuple[str, str]) -> Handler:
    return always(json_body({"error": error}, status, *headers))


def fails_inside(error: dict[str, Any]) -> Handler:
    """An answer that begins and then holds an error."""
    return always(SSE_HEAD, event(delta({"content": "part"})), event({"error": error}), END)


def _pieces(text: str) -> list[str]:
    return [text[at : at + _PIECE_CHARS] for at in range(0, len(text), _PIECE_CHARS)]
