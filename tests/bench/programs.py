"""Small servers that the mesh is measured against, each a process of its own: `python -m tests.bench.programs NAME`.

Each listens on a free loopback port and prints it. `hops` answers a request by asking `leaf` seven times:
what an episode's hops cost when nothing else is done. `upstream` answers Chat Completions at once; `passer`
is a bare hop before it.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Final

import aiohttp
import orjson
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
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


async def upstream() -> None:
    """Served as the usual inference servers are: uvicorn and Starlette."""

    async def complete(request: Request) -> Response:
        if not orjson.loads(await request.body()).get("stream"):
            return Response(COMPLETION, media_type="application/json")

        async def stream() -> AsyncIterator[bytes]:
            for chunk in STREAM:
                yield chunk

        return StreamingResponse(stream(), media_type="text/event-stream")

    await _serve(Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])]))


async def passer(upstream_url: str) -> None:
    """One bare hop before the upstream: reads the request, sends it on, passes the answer back as it comes."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def pass_on(request: Request) -> Response:
            body = await request.body()
            reply = await session.post(upstream_url + request.url.path, data=body)
            return StreamingResponse(reply.content.iter_any(), media_type=reply.content_type)

        await _serve(Starlette(routes=[Route("/v1/chat/completions", pass_on, methods=["POST"])]))


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
    programs: dict[str, Callable[..., Coroutine[None, None, None]]] = {
        "upstream": upstream,
        "passer": passer,
        "leaf": leaf,
        "hops": hops,
    }
    uvloop.run(programs[name](*rest))
