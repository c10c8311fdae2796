"""An upstream that echoes our key: it reaches nobody, however the bytes are cut."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.model_proxy.upstream_http import _Chunks
from shared.http.http1 import Http1Client, Target

KEY = b"sk-0123456789abcdef"
SOON_S = 10.0


async def _pieces_of(pieces: list[bytes]) -> bytes:
    """What a streamed body is after a real connection brought it in these pieces."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.002)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = Http1Client(connect_timeout_s=SOON_S, keep_alive_s=1.0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    try:
        reply = await client.send(Target.of("POST", url, {}), b"", silence_s=SOON_S, total_s=SOON_S)
        chunks: AsyncIterator[bytes] = _Chunks(reply, KEY)
        return b"".join([chunk async for chunk in chunks])
    finally:
        client.close()
        server.close()


@pytest.mark.parametrize("size", [1, 5, 18, 19, 20, 1000])
async def test_a_key_that_is_cut_anywhere_is_blanked(size: int) -> None:
    body = b"data: sk-" + KEY + b" and again " + KEY + b" and a beginning sk-01234"
    told = await _pieces_of([body[start : start + size] for start in range(0, len(body), size)])
    assert told == body.replace(KEY, b"[credential]")
