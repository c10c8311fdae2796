"""A started program in a container: Docker's framed connection as a `CommandStream`."""

import asyncio
import socket
import struct
from typing import Final

from shared.sandbox.command import OutputName

_STREAMS: Final[dict[int, OutputName]] = {1: "stdout", 2: "stderr"}
_PIECE_BYTES: Final = 256 << 10


class DockerStream:
    """Reads and writes by two descriptors: a write that meets a closed peer must not cost what the peer said last."""

    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.BaseTransport, out: socket.socket) -> None:
        self._reader = reader
        self._transport = transport
        self._out = out
        self._name: OutputName = "stdout"
        self._left = 0

    @classmethod
    async def over(cls, connection: socket.socket, early: bytes) -> "DockerStream":
        """A stream that begins with `early`, which came before the connection was handed over."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_PIECE_BYTES)
        reader.feed_data(early)
        connection.setblocking(False)
        out = connection.dup()
        connect = loop.create_unix_connection if connection.family == socket.AF_UNIX else loop.create_connection
        try:
            transport, _ = await connect(lambda: asyncio.StreamReaderProtocol(reader), sock=connection)
        except BaseException:
            out.close()
            raise
        return cls(reader, transport, out)

    async def write(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._out, data)

    async def end_input(self) -> None:
        self._out.shutdown(socket.SHUT_WR)

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
        self._out.close()
        self._transport.close()
