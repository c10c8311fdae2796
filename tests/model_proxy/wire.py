"""A model server that answers exact bytes, and the model proxy in front of it, both on real sockets."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson

from services.model_proxy.app import create_app
from services.model_proxy.capture import RECORD_WITHIN_S
from shared.contracts.capture import Capture, ModelCall
from shared.settings import LoadedSettings, Settings
from tests.serving import serving

WAIT_S = 10.0
KEY = "episode-1"


@dataclass(slots=True)
class Asked:
    """One request as it arrived; `connection` counts connections from 1, `gone` is set when the peer has left."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int
    nth_on_connection: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def hang_up(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        """Close so that the peer gets a reset instead of an end of file."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Handler = Callable[[Asked], Awaitable[None]]


class RawUpstream:
    """Reads requests and leaves the answer, byte by byte, to `handler`."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.asked: list[Asked] = []
        self.arrived = asyncio.Event()
        self.url = ""
        self._connections = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        connection, nth = self._connections, 0
        current: Asked | None = None
        serving = asyncio.current_task()
        assert serving is not None
        self._serving.add(serving)
        try:
            while True:
                nth += 1
                current = await _read_request(reader, writer, connection, nth)
                self.asked.append(current)
                self.arrived.set()
                task = asyncio.create_task(self._answer(current))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except (asyncio.IncompleteReadError, ConnectionError):
            if current is not None:
                current.gone.set()
        except asyncio.CancelledError:
            # By `stop` only; asyncio would report a cancelled connection as an error.
            return
        finally:
            self._serving.discard(serving)
            with contextlib.suppress(ConnectionError, RuntimeError):
                writer.close()

    async def _answer(self, asked: Asked) -> None:
        with contextlib.suppress(ConnectionError):
            await self.handler(asked)

    async def wait_until_asked(self, times: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.asked) < times:
                self.arrived.clear()
                await self.arrived.wait()

    async def stop(self) -> None:
        tasks = [*self._tasks, *self._serving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int, nth: int) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Asked(method, path, headers, body, connection, nth, reader, writer)


@contextlib.asynccontextmanager
async def raw_upstream(handler: Handler) -> AsyncIterator[RawUpstream]:
    upstream = RawUpstream(handler)
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
    upstream.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield upstream
    finally:
        server.close()
        await upstream.stop()


def reply(status: int, body: bytes, *headers: tuple[str, str], reason: str = "Whatever") -> bytes:
    lines = [f"HTTP/1.1 {status} {reason}", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode("latin-1") + body


def json_body(value: Any, status: int = 200, *headers: tuple[str, str]) -> bytes:
    return reply(status, orjson.dumps(value), ("Content-Type", "application/json"), *headers)


SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def piece(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    return piece(b"data: " + orjson.dumps(value) + b"\n\n")


def delta(part: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {
        "id": "chatcmpl-9",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": "up",
        "choices": [{"index": 0, "delta": part, "finish_reason": finish}],
    }


COMPLETION: dict[str, Any] = {
    "id": "chatcmpl-9",
    "object": "chat.completion",
    "created": 1_700_000_000,
    "model": "up",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "fine"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9},
}
RESPONSE: dict[str, Any] = {
    "id": "resp_9",
    "object": "response",
    "created_at": 1_700_000_000,
    "model": "up",
    "status": "completed",
    "error": None,
    "output": [
        {
            "type": "message",
            "id": "msg_9",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "fine", "annotations": []}],
        }
    ],
    "usage": {"input_tokens": 7, "output_tokens": 2, "total_tokens": 9},
}


def always(*parts: bytes, then_close: bool = False) -> Handler:
    async def handler(asked: Asked) -> None:
        await asked.write(b"".join(parts))
        if then_close:
            asked.hang_up()

    return handler


# Answers anything; for tests that are not about what is answered.
SCRIPTED: dict[str, Any] = {"upstream": "scripted", "script": str(Path(__file__).with_name("anything.yaml"))}


def settings_of(model: dict[str, Any], **sections: Any) -> LoadedSettings:
    return LoadedSettings(Settings.model_validate({"models": {"policy": model}, **sections}), {})


@dataclass(slots=True)
class Proxy:
    """The model proxy as its callers see it."""

    url: str
    http: httpx.AsyncClient

    async def call(self, dialect: str, *, stream: bool = False, key: str = KEY, **fields: Any) -> httpx.Response:
        return await self.http.post(path_of(dialect, key), json=request_of(dialect, stream=stream) | fields)

    async def seal(self, key: str = KEY) -> Capture:
        answer = await self.http.post(f"/captures/{key}/seal")
        assert answer.status_code == 200, answer.text
        return Capture.model_validate_json(answer.content)

    async def capture(self, key: str = KEY) -> Capture:
        answer = await self.http.get(f"/captures/{key}")
        assert answer.status_code == 200, answer.text
        return Capture.model_validate_json(answer.content)

    async def last_call(self, key: str = KEY) -> ModelCall:
        return (await self.capture(key)).calls[-1]

    async def calls(self, count: int, key: str = KEY) -> tuple[ModelCall, ...]:
        """The calls as soon as `count` of them have ended."""
        async with asyncio.timeout(WAIT_S):
            while True:
                calls = (await self.capture(key)).calls
                if sum(call.ended_at is not None for call in calls) >= count:
                    return calls
                await asyncio.sleep(0.005)


_PATHS = {"responses": "responses", "chat_completions": "chat/completions", "messages": "messages"}


def path_of(dialect: str, key: str = KEY) -> str:
    return f"/rollouts/{key}/v1/{_PATHS[dialect]}"


def request_of(dialect: str, *, stream: bool = False) -> dict[str, Any]:
    asked: dict[str, Any] = {"model": "policy", "stream": stream}
    if dialect == "responses":
        return asked | {"input": "go"}
    if dialect == "messages":
        asked["max_tokens"] = 64
    return asked | {"messages": [{"role": "user", "content": "go"}]}


@contextlib.asynccontextmanager
async def proxy_of(loaded: LoadedSettings, *, record_within_s: float = RECORD_WITHIN_S) -> AsyncIterator[Proxy]:
    async with serving(create_app(loaded, record_within_s=record_within_s)) as url, proxy_at(url) as proxy:
        yield proxy


@contextlib.asynccontextmanager
async def proxy_at(url: str) -> AsyncIterator[Proxy]:
    """A proxy that is served elsewhere."""
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S, trust_env=False) as http:
        yield Proxy(url, http)


@contextlib.asynccontextmanager
async def proxied(
    handler: Handler, kind: str = "chat_completions", **model: Any
) -> AsyncIterator[tuple[Proxy, RawUpstream]]:
    """The proxy with the model `policy` served by `handler`."""
    async with raw_upstream(handler) as upstream:
        loaded = settings_of({"upstream": kind, "base_url": upstream.url, "model": "up", **model})
        async with proxy_of(loaded) as proxy:
            yield proxy, upstream


def events_of(text: str) -> list[dict[str, Any]]:
    """The JSON events of a whole stream."""
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ") and line != "data: [DONE]"]
    return [orjson.loads(line) for line in lines]
