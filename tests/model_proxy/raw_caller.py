"""A caller of the model proxy that sees bytes as they arrive and can leave at any moment."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import orjson

from tests.model_proxy.wire import WAIT_S, Proxy, path_of, request_of


@dataclass(slots=True)
class RawCaller:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def head(self) -> str:
        async with asyncio.timeout(WAIT_S):
            return (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()

    async def sse_data(self) -> dict[str, Any]:
        """The data of the next event."""
        async with asyncio.timeout(WAIT_S):
            while True:
                line = await self.reader.readline()
                assert line, "the connection ended"
                if line.startswith(b"data: "):
                    value: dict[str, Any] = orjson.loads(line[6:])
                    return value

    async def is_told_of_the_seal(self, stream: bool) -> None:
        """A call of the Responses API, whose head was read if it is a stream, ends because its capture was sealed."""
        if not stream:
            assert "409" in (await self.head()).split("\r\n")[0]
            return
        while (one := await self.sse_data())["type"] != "response.failed":
            pass
        assert one["response"]["error"]["code"] == "capture_sealed"

    def leave(self) -> None:
        self.writer.transport.abort()


@contextlib.asynccontextmanager
async def raw_call(proxy: Proxy, dialect: str, *headers: str, **fields: Any) -> AsyncIterator[RawCaller]:
    host, port = proxy.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = orjson.dumps(request_of(dialect) | fields)
    lines = [f"POST {path_of(dialect)} HTTP/1.1", "Host: proxy", *headers, f"Content-Length: {len(body)}", "", ""]
    writer.write("\r\n".join(lines).encode() + body)
    await writer.drain()
    try:
        yield RawCaller(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
