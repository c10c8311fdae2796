"""A thousand streams at once through one proxy process."""

import asyncio
import contextlib
import os
import resource
import sys
from collections.abc import AsyncIterator, Iterator

import orjson
import psutil
import pytest

from shared.http.http1 import Http1Client, Target
from tests.serving import free_port

STREAMS = 1000
SOON_S = 60.0
PER_STREAM_MAX_KIB = 200

BODY = orjson.dumps({"model": "policy", "input": "go", "stream": True})
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def chunk(delta: dict[str, str], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    body = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + orjson.dumps(body) + b"\n\n"


class Upstream:
    """Sends the beginning of a stream, and its end once all streams have begun."""

    def __init__(self) -> None:
        self.begun = 0
        self.all_begun = asyncio.Event()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        writer.write(HEAD + chunk({"role": "assistant", "content": "first "}))
        await writer.drain()
        self.begun += 1
        if self.begun == STREAMS:
            self.all_begun.set()
        await self.all_begun.wait()
        writer.write(chunk({"content": "last"}) + chunk({}, "stop") + b"data: [DONE]\n\n")
        await writer.drain()
        writer.close()
        await writer.wait_closed()


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.asynccontextmanager
async def proxy(base_url: str) -> AsyncIterator[tuple[str, psutil.Process]]:
    """A model proxy in a process of its own."""
    port = free_port()
    environ = {**os.environ, "PADDOCK_MODEL_BASE_URL": base_url, "PADDOCK_MODEL_NAME": "m", "PADDOCK_DRAIN_LEAD_S": "0"}
    environ.pop("PADDOCK_MESH_TOKEN", None)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.cli", "serve", "model-proxy", "--port", str(port), env=environ
    )
    url = f"http://127.0.0.1:{port}"
    client = Http1Client(connect_timeout_s=5.0, keep_alive_s=1.0)
    try:
        async with asyncio.timeout(SOON_S):
            while True:
                with contextlib.suppress(Exception):
                    await client.send(Target.of("GET", f"{url}/readyz", {}), b"", silence_s=5.0, total_s=5.0)
                    break
                await asyncio.sleep(0.05)
        yield url, psutil.Process(process.pid)
    finally:
        client.close()
        process.terminate()
        await asyncio.wait_for(process.wait(), SOON_S)


@pytest.mark.usefixtures("many_files")
async def test_a_thousand_streams_at_once_all_end_well() -> None:
    upstream = Upstream()
    server = await asyncio.start_server(upstream.handle, "127.0.0.1", 0, backlog=STREAMS)
    base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    async with proxy(base_url) as (url, process):
        client = Http1Client(connect_timeout_s=SOON_S, keep_alive_s=1.0)
        target = Target.of("POST", f"{url}/rollouts/many/v1/responses", {"content-type": "application/json"})
        before = process.memory_info().rss
        most = before

        async def stream() -> bytes:
            reply = await client.send(target, BODY, silence_s=SOON_S, total_s=2 * SOON_S)
            assert reply.status == 200
            return await reply.read()

        streams = [asyncio.create_task(stream()) for _ in range(STREAMS)]
        await asyncio.wait_for(upstream.all_begun.wait(), SOON_S)
        most = max(most, process.memory_info().rss)
        bodies = await asyncio.wait_for(asyncio.gather(*streams), 2 * SOON_S)
        client.close()
    server.close()
    assert all(b"response.completed" in body and b"first last" in body for body in bodies)
    assert not any(b"response.failed" in body for body in bodies)
    per_stream_kib = (most - before) / 1024 / STREAMS
    assert per_stream_kib < PER_STREAM_MAX_KIB, f"{per_stream_kib:.0f} KiB per stream"
