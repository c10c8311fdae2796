"""A started program in a container: Docker's framed connection as a `CommandStream`."""

import asyncio
import contextlib
import socket
import struct
from typing import Final

from shared.sandbox.command import OutputName

_STREAMS: Final[dict[int, OutputName]] = {1: "stdout", 2: "stderr"}
_PIECE_BYTES: Final = 256 << 10


class DockerStream:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._name: OutputName = "stdout"
        self._left = 0

    @classmethod
    async def over(cls, connection: socket.socket) -> "DockerStream":
        connection.setblocking(False)
        if connection.family == socket.AF_UNIX:
            return cls(*await asyncio.open_unix_connection(sock=connection, limit=_PIECE_BYTES))
        return cls(*await asyncio.open_connection(sock=connection, limit=_PIECE_BYTES))

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def end_input(self) -> None:
        self._writer.write_eof()

    async def read(self) -> tuple[OutputName, bytes] | None:
        if self._left == 0:
            try:
                head = await self._reader.readexactly(8)
            except asyncio.IncompleteReadError:
                return None
            number, self._left = struct.unpack(">BxxxI", head)
            self._name = _STREAMS.get(number, "stderr")
        data = await self._reader.read(min(self._left, _PIECE_BYTES)) if self._left else b""
        if not data and self._left:
            return None
        self._left -= len(data)
        return self._name, data

    async def close(self) -> None:
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
