"""Answers by rules, offline and without a model: the embedded default, and a test double with faults.

A rule applies when its `match` is part of the last user message (the first such rule wins; the fall-back
applies when none does). Its `turns` are played one by one: the turn is the number of assistant messages
after that user message, the last turn is repeated. So nothing is remembered, and the same conversation
gets the same answer from any replica. A turn that calls tools which the request does not offer is
passed over.

A script is YAML (a list of rules, or `{rules, fallback}`) or JSON lines (one rule per line):

    - match: What is the capital of France?
      text: Paris                           # short for turns: [{text: Paris}]
    - match: weather
      turns:
        - tool_calls: [{name: get_weather, arguments: {city: Oslo}}]
        - {text: It rains., reasoning: Look at the result., usage: {prompt_tokens: 9, completion_tokens: 3}}
    - match: overloaded
      error: {status: 429, headers: {retry-after: "1"}, body: {error: {message: slow down}}}
    - {match: cut, text: never complete, cut_after_chunks: 2}
    - {match: slow, text: late, delay_s: 2.5, finish_reason: length}

The last user message is all of its text, so a harness may put its own words around the prompt.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Final, Self

import orjson
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shared.ports.upstream import UpstreamBrokenError, UpstreamCall, UpstreamDialect

JSON_HEADERS: Final = {"content-type": "application/json"}
SSE_HEADERS: Final = {"content-type": "text/event-stream"}
WORDS_PER_CHUNK: Final = 4
# The usual rule of thumb for English.
CHARS_PER_TOKEN: Final = 4


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ToolCall(_Closed):
    name: str
    arguments: dict[str, Any] | str = {}

    @property
    def arguments_text(self) -> str:
        return self.arguments if isinstance(self.arguments, str) else orjson.dumps(self.arguments).decode()


class ErrorReply(_Closed):
    status: Annotated[int, Field(ge=400, le=599)]
    headers: dict[str, str] = {}
    body: dict[str, Any] | str = ""


class Turn(_Closed):
    """One answer of the model."""

    text: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    error: ErrorReply | None = None
    delay_s: Annotated[float, Field(ge=0)] = 0.0
    cut_after_chunks: Annotated[int, Field(ge=0)] | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None


class Rule(_Closed):
    """`match` and either `turns` or the fields of a single turn."""

    match: str
    turns: Annotated[tuple[Turn, ...], Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _single_turn(cls, value: Any) -> Any:
        if not isinstance(value, dict) or "turns" in value:
            return value
        turn = {name: part for name, part in value.items() if name != "match"}
        return {"match": value.get("match"), "turns": [turn]}


class Script(_Closed):
    rules: tuple[Rule, ...] = ()
    fallback: Turn = Turn(text="I have no scripted answer for this.")

    def turn(self, body: dict[str, Any]) -> tuple[Turn, int]:
        """The answer that is due, and its place in the conversation since the last user message."""
        prompt, asked = _position(body.get("messages") or [])
        rule = next((rule for rule in self.rules if rule.match in prompt), None)
        if rule is None:
            return self.fallback, asked
        offered = {tool.get("function", {}).get("name") for tool in body.get("tools") or ()}
        usable = [turn for turn in rule.turns if all(call.name in offered for call in turn.tool_calls)]
        if not usable:
            return self.fallback, asked
        return usable[min(asked, len(usable) - 1)], asked


class Options(_Closed):
    model_config = ConfigDict(use_attribute_docstrings=True)

    script: Path | None = None
    """File of rules; the built-in ones, which answer the demo rows, when left out."""

    @model_validator(mode="after")
    def _script_is_valid(self) -> Self:
        if self.script is not None:
            load_script(self.script)
        return self


def create(options: Options) -> "ScriptedUpstream":
    if options.script is not None:
        return ScriptedUpstream(load_script(options.script))
    built_in = files("services.model_proxy.upstreams").joinpath("scripted_answers.yaml").read_text(encoding="utf-8")
    return ScriptedUpstream(parse_script(built_in))


def load_script(path: Path) -> Script:
    """
    Raises:
        ValueError: it cannot be read or does not hold rules; the message says where.
    """
    try:
        text = path.read_text(encoding="utf-8")
        return parse_script(text, lines=path.suffix == ".jsonl")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{path}: {place}: {first['msg']}") from error
    except (yaml.YAMLError, UnicodeDecodeError, orjson.JSONDecodeError) as error:
        raise ValueError(f"{path} is no valid script: {error}") from error


def parse_script(text: str, *, lines: bool = False) -> Script:
    parsed = [orjson.loads(line) for line in text.split("\n") if line.strip()] if lines else yaml.safe_load(text)
    return Script.model_validate({"rules": parsed} if isinstance(parsed, list) else parsed)


class ScriptedUpstream:
    """Implements `shared.ports.upstream.Upstream` in this process."""

    dialect: UpstreamDialect = "chat_completions"

    def __init__(self, script: Script) -> None:
        self._script = script

    async def send(self, call: UpstreamCall) -> "ScriptedReply":
        turn, asked = self._script.turn(call.body)
        if turn.delay_s:
            await asyncio.sleep(turn.delay_s)
        if turn.error is not None:
            body = turn.error.body
            raw = body.encode() if isinstance(body, str) else orjson.dumps(body)
            kind = {"content-type": "text/plain"} if isinstance(body, str) else JSON_HEADERS
            headers = {**kind, **{name.lower(): value for name, value in turn.error.headers.items()}}
            return ScriptedReply(turn.error.status, headers, [raw], cut=False)
        answer = _Answer(turn, call, asked)
        if call.stream:
            return ScriptedReply(200, SSE_HEADERS, answer.frames(), cut=turn.cut_after_chunks is not None)
        return ScriptedReply(200, JSON_HEADERS, [answer.completion()], cut=turn.cut_after_chunks is not None)

    async def close(self) -> None:
        return


class ScriptedReply:
    """Implements `shared.ports.upstream.UpstreamReply`."""

    attempts = 1

    def __init__(self, status: int, headers: dict[str, str], pieces: list[bytes], *, cut: bool) -> None:
        self.status = status
        self.headers = headers
        self._pieces = pieces
        self._cut = cut

    async def read(self) -> bytes:
        self._end()
        return b"".join(self._pieces)

    async def chunks(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece
        self._end()

    async def close(self) -> None:
        return

    def _end(self) -> None:
        if self._cut:
            raise UpstreamBrokenError("the script cuts this answer off")


class _Answer:
    """A turn in the form of Chat Completions. Ids follow from the key and the place: no clock, no chance."""

    def __init__(self, turn: Turn, call: UpstreamCall, asked: int) -> None:
        self._turn = turn
        self._call = call
        seed = f"{call.key} {len(call.body.get('messages') or ())} {asked}".encode()
        self._id = hashlib.blake2b(seed, digest_size=8).hexdigest()
        self._finish = turn.finish_reason or ("tool_calls" if turn.tool_calls else "stop")

    def completion(self) -> bytes:
        message: dict[str, Any] = {"role": "assistant", "content": self._turn.text or None}
        if self._turn.reasoning is not None:
            message["reasoning"] = self._turn.reasoning
        if self._turn.tool_calls:
            message["tool_calls"] = self._tool_calls()
        choice = {"index": 0, "message": message, "finish_reason": self._finish}
        return orjson.dumps({**self._head("chat.completion"), "choices": [choice], "usage": self._usage()})

    def frames(self) -> list[bytes]:
        """Server-sent events in the pieces in which they are sent."""
        frames = [self._frame({"role": "assistant", "content": ""})]
        if self._turn.reasoning is not None:
            frames.append(self._frame({"reasoning": self._turn.reasoning}))
        words = self._turn.text.split(" ") if self._turn.text else []
        for start in range(0, len(words), WORDS_PER_CHUNK):
            text = " ".join(words[start : start + WORDS_PER_CHUNK])
            frames.append(self._frame({"content": f" {text}" if start else text}))
        for index, call in enumerate(self._tool_calls()):
            half = len(call["function"]["arguments"]) // 2
            arguments = call["function"]["arguments"]
            opened = {**call, "index": index, "function": {**call["function"], "arguments": arguments[:half]}}
            frames.append(self._frame({"tool_calls": [opened]}))
            frames.append(self._frame({"tool_calls": [{"index": index, "function": {"arguments": arguments[half:]}}]}))
        if self._turn.cut_after_chunks is not None:
            return frames[: self._turn.cut_after_chunks]
        frames.append(self._frame({}, self._finish))
        if (self._call.body.get("stream_options") or {}).get("include_usage"):
            frames.append(_event({**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage()}))
        return [*frames, b"data: [DONE]\n\n"]

    def _frame(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return _event({**self._head("chat.completion.chunk"), "choices": [choice]})

    def _head(self, kind: str) -> dict[str, Any]:
        model = self._call.body.get("model")
        return {"id": f"chatcmpl-{self._id}", "object": kind, "created": int(time.time()), "model": model}

    def _tool_calls(self) -> list[dict[str, Any]]:
        return [
            {
                "id": f"call_{self._id}_{index}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_text},
            }
            for index, call in enumerate(self._turn.tool_calls)
        ]

    def _usage(self) -> dict[str, Any]:
        if self._turn.usage is not None:
            return self._turn.usage
        asked = sum(len(_text(message.get("content"))) for message in self._call.body.get("messages") or ())
        answered = len(self._turn.text) + sum(len(call.arguments_text) for call in self._turn.tool_calls)
        prompt, completion = asked // CHARS_PER_TOKEN + 1, answered // CHARS_PER_TOKEN + 1
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _event(frame: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(frame) + b"\n\n"


def _position(messages: list[dict[str, Any]]) -> tuple[str, int]:
    """The last user message's text, and how many assistant messages follow it."""
    asked = 0
    for message in reversed(messages):
        if message.get("role") == "user":
            return _text(message.get("content")), asked
        asked += message.get("role") == "assistant"
    return "", asked


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content or () if isinstance(part, dict))
