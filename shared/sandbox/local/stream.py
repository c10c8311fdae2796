"""A command in a local sandbox: the keeper's socket is its input, two pipes are its output."""

import asyncio
import contextlib
import os
import socket
from pathlib import Path
from typing import Final

from shared.sandbox.command import OutputName

_PIECE_BYTES: Final = 256 << 10
_WAITING_PIECES: Final = 4
_LAST_WORDS_S: Final = 0.5
"""The end is told before the process ends; what stands in the pipes then takes no longer to arrive."""


class LocalStream:
    """It ends when both pipes do, or soon after the supervisor's process: what it left behind may hold the pipes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._pieces: asyncio.Queue[tuple[OutputName, bytes] | None] = asyncio.Queue(_WAITING_PIECES)
        self._pumps: list[asyncio.Task[None]] = [asyncio.create_task(self._watch(reader))]
        self._transports: list[asyncio.ReadTransport] = []
        self._open = 0

    @classmethod
    async def open(cls, control: Path) -> "LocalStream":
        """Ask the keeper for a command's process.

        Raises:
            OSError: nobody listens.
        """
        ends = {"stdout": os.pipe(), "stderr": os.pipe()}
        try:
            connection = _ask(control, [ends["stdout"][1], ends["stderr"][1]])
        except BaseException:
            for reading, _ in ends.values():
                os.close(reading)
            raise
        finally:
            for _, writing in ends.values():
                os.close(writing)
        stream = cls(*await asyncio.open_unix_connection(sock=connection))
        await stream._read_from("stdout", ends["stdout"][0])
        await stream._read_from("stderr", ends["stderr"][0])
        return stream

    async def _read_from(self, name: OutputName, end: int) -> None:
        reader = asyncio.StreamReader(limit=_PIECE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(end, "rb", buffering=0)
        )
        self._transports.append(transport)
        self._open += 1
        self._pumps.append(asyncio.create_task(self._pump(name, reader)))

    async def _pump(self, name: OutputName, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(_PIECE_BYTES):
            await self._pieces.put((name, data))
        self._open -= 1
        if self._open == 0:
            await self._pieces.put(None)

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            await reader.read()
        await asyncio.sleep(_LAST_WORDS_S)
        await self._pieces.put(None)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def end_input(self) -> None:
        self._writer.write_eof()

    async def read(self) -> tuple[OutputName, bytes] | None:
        return await self._pieces.get()

    async def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for transport in self._transports:
            transport.close()
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


def _ask(control: Path, outputs: list[int]) -> socket.socket:
    """Connect and give the output's ends. Through the folder's descriptor: a socket's path may have 107 bytes only."""
    folder = os.open(control.parent, os.O_PATH | os.O_DIRECTORY)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(f"/proc/self/fd/{folder}/{control.name}")
        socket.send_fds(connection, [b"\0"], outputs)
        connection.setblocking(False)
    except BaseException:
        connection.close()
        raise
    finally:
        os.close(folder)
    return connection
