"""A Chat Completions server whose every answer is written by the test: right, wrong, an error, a cut, or silence.

A request belongs to the scene whose marker stands in its body; each scene gives its answers in order and
repeats the last one.
"""

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Any

import orjson

from tests.mesh.background import Background
from tests.model_proxy.wire import COMPLETION, Asked, Handler, RawUpstream, json_body, raw_upstream, reply

BOUND_S = 30.0


@dataclass
class Scene:
    """The answers to one marker, and the requests that came for it."""

    answers: list[Handler]
    asked: list[Asked] = field(default_factory=list)
    _arrived: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def take(self, asked: Asked) -> Handler:
        self.asked.append(asked)
        self._arrived.release()
        return self.answers[min(len(self.asked), len(self.answers)) - 1]

    def wait_for_call(self, bound_s: float = BOUND_S) -> Asked:
        """The next request that was not yet waited for."""
        if not self._arrived.acquire(timeout=bound_s):
            raise TimeoutError("the model was not asked")
        return self.asked[-1]


class ChatServer:
    """`url` is a base URL as in PADDOCK_MODEL_BASE_URL."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._scenes: dict[str, Scene] = {}
        self._upstream: RawUpstream = background.enter(raw_upstream(self._handle))
        self.url = self._upstream.url

    @property
    def asked(self) -> list[Asked]:
        return self._upstream.asked

    def on(self, marker: str, *answers: Handler) -> Scene:
        scene = Scene(list(answers))
        self._scenes[marker] = scene
        return scene

    def wait_until_gone(self, asked: Asked, bound_s: float = BOUND_S) -> None:
        """Until the peer of this request has closed its connection."""
        self._background.run(_wait(asked.gone), bound_s)

    async def _handle(self, asked: Asked) -> None:
        # The longest marker first: one may be the beginning of another.
        for marker in sorted(self._scenes, key=len, reverse=True):
            if marker.encode() in asked.body:
                await self._scenes[marker].take(asked)(asked)
                return
        await asked.write(json_body({"error": {"message": "no scene is set for this request"}}, 418))


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


class Gate:
    """Holds an answer back until the test opens it."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    def before(self, then: Handler) -> Handler:
        async def held(asked: Asked) -> None:
            await asyncio.to_thread(self._open.wait, BOUND_S)
            await then(asked)

        return held


def completion(message: dict[str, Any], finish: str = "stop") -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    return json_body({**COMPLETION, "choices": [choice]})


def sends(data: bytes, *, then_close: bool = False) -> Handler:
    async def handler(asked: Asked) -> None:
        await asked.write(data)
        if then_close:
            asked.hang_up()

    return handler


def says(text: str) -> Handler:
    return sends(completion({"content": text}))


def calls(name: str, arguments: dict[str, Any]) -> Handler:
    function = {"name": name, "arguments": orjson.dumps(arguments).decode()}
    tool_calls = [{"id": "call_1", "type": "function", "function": function}]
    return sends(completion({"content": None, "tool_calls": tool_calls}, "tool_calls"))


def refuses(status: int, error: dict[str, Any], *headers: tuple[str, str]) -> Handler:
    return sends(json_body({"error": error}, status, *headers))


def answers_text(status: int, text: str, *headers: tuple[str, str]) -> Handler:
    return sends(reply(status, text.encode(), ("Content-Type", "text/html"), *headers))


async def hangs(asked: Asked) -> None:
    """Never answers."""
    await asked.gone.wait()
