"""Small servers that the mesh is measured against, each a process of its own: `python -m tests.bench.programs NAME`.

Each listens on a free loopback port and prints it. `hops` answers a request by asking `leaf` seven times:
what an episode's hops cost when nothing else is done. `upstream` answers Chat Completions as cheaply as a
Python server can, so that it does not limit what is measured.
"""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Final, cast

import aiohttp
import orjson
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.serving import free_port

HOPS: Final = 7
CHUNKS: Final = 20

_MESSAGE = {"role": "assistant", "content": "The answer is \\boxed{Paris}."}
_USAGE = {"prompt_tokens": 20, "completion_tokens": 8, "total_tokens": 28}
_COMMON = {"id": "chatcmpl-1", "created": 1700000000, "model": "m"}
COMPLETION: Final = orjson.dumps(
    {
        **_COMMON,
        "object": "chat.completion",
        "choices": [{"index": 0, "message": _MESSAGE, "finish_reason": "stop"}],
        "usage": _USAGE,
    }
)


def _chunk(delta: dict[str, str], finish: str | None = None, **more: object) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    body = {**_COMMON, "object": "chat.completion.chunk", "choices": [choice], **more}
    return b"data: " + orjson.dumps(body) + b"\n\n"


STREAM: Final = (
    _chunk({"role": "assistant", "content": ""}),
    *(_chunk({"content": f"word{n} "}) for n in range(CHUNKS)),
    _chunk({}, "stop", usage=_USAGE),
    b"data: [DONE]\n\n",
)


class Upstream(asyncio.Protocol):
    """HTTP/1.1 with keep-alive, just enough for a JSON or a streamed completion."""

    def __init__(self) -> None:
        self._seen = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class has the same methods

    def data_received(self, data: bytes) -> None:
        self._seen += data
        while (end := self._seen.find(b"\r\n\r\n")) >= 0:
            head = self._seen[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._seen) < end + 4 + length:
                return
            body, self._seen = self._seen[end + 4 : end + 4 + length], self._seen[end + 4 + length :]
            self._answer(b'"stream":true' in body or b'"stream": true' in body)

    def _answer(self, stream: bool) -> None:
        assert self._transport is not None
        if not stream:
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            self._transport.write(head % len(COMPLETION) + COMPLETION)
            return
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self._transport.write(head)
        for chunk in STREAM:
            self._transport.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        self._transport.write(b"0\r\n\r\n")


async def upstream() -> None:
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def leaf() -> None:
    async def answer(request: Request) -> Response:
        return Response(await request.body(), media_type="application/json")

    await _serve(Starlette(routes=[Route("/", answer, methods=["POST"])]))


async def hops(leaf_url: str) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def answer(request: Request) -> Response:
            body = await request.body()
            for _ in range(HOPS):
                async with session.post(leaf_url, data=body) as reply:
                    body = await reply.read()
            return Response(body, media_type="application/json")

        await _serve(Starlette(routes=[Route("/run", answer, methods=["POST"])]))


async def _serve(app: Starlette) -> None:
    port = free_port()
    config = uvicorn.Config(app, port=port, log_config=None, access_log=False, http="httptools", lifespan="off")
    server = uvicorn.Server(config)
    asyncio.get_running_loop().call_later(0.5, lambda: print(port, flush=True))
    await server.serve()


if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    programs: dict[str, Callable[..., Coroutine[None, None, None]]] = {"upstream": upstream, "leaf": leaf, "hops": hops}
    uvloop.run(programs[name](*rest))
