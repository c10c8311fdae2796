"""The served side: request heads are bounded, bodies are not taken for heads."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator

import pytest

from shared.http.serve import HEAD_MAX_BYTES
from tests.serving import free_port

SOON_S = 30.0


@contextlib.asynccontextmanager
async def service() -> AsyncIterator[int]:
    """The port of an environment server in a process of its own."""
    port = free_port()
    environ = {**os.environ, "PADDOCK_DRAIN_LEAD_S": "0"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.cli", "serve", "environment", "--port", str(port), env=environ
    )
    try:
        async with asyncio.timeout(SOON_S):
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    await writer.wait_closed()
                    break
                await asyncio.sleep(0.05)
        yield port
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), SOON_S)


async def _answer(port: int, pieces: list[bytes]) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await asyncio.wait_for(reader.readuntil(b"\r\n"), SOON_S)
    except ConnectionError:
        return b"closed"
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_an_endless_head_is_ended_and_a_large_body_is_not() -> None:
    endless = [b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-long: "] + [b"a" * 16_384] * 64
    many = [b"GET /healthz HTTP/1.1\r\nhost: x\r\n"] + [b"x-one: 1\r\n" * 1_000] * 64
    body = b'{"x":"' + b"y" * 5_000_000 + b'"}'
    large = [b"POST /run HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body), body]
    fitting = [b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * (HEAD_MAX_BYTES // 2) + b"\r\n\r\n"]
    async with service() as port:
        for head in (endless, many):
            assert (await _answer(port, head)).startswith((b"HTTP/1.1 431", b"closed"))
        assert (await _answer(port, large)).startswith(b"HTTP/1.1 422")
        assert (await _answer(port, fitting)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("requests", [3])
async def test_large_bodies_follow_each_other_on_one_connection(requests: int) -> None:
    body = b'{"x":"' + b"y" * 1_000_000 + b'"}'
    async with service() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(requests):
            writer.write(b"POST /run HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SOON_S)
            assert head.startswith(b"HTTP/1.1 422")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
        writer.close()
        await writer.wait_closed()
