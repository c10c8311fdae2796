"""A balancer of a few lines on a real socket, which does to each exchange what the test says.

Connections are kept alive as a balancer does, so that a cut meets clients in the middle of one and between two.
"""

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

PAGE = b"<html><body><h1>%d</h1><p>No server is available to handle this request.</p></body></html>"


@dataclass(slots=True)
class Exchange:
    """One request as it arrived; a fault forwards it or does not, and answers or does not."""

    method: str
    path: str
    head: bytes
    body: bytes
    targets: list[tuple[str, int]]
    writer: asyncio.StreamWriter

    async def forward(self) -> bytes:
        """The server's whole answer.

        Raises:
            ConnectionError: there is no server, or it left in the middle.
        """
        return b"".join([part async for part in self.parts()])

    async def parts(self) -> AsyncIterator[bytes]:
        """The server's answer as it comes; the first part is its head."""
        reader, writer = await self._connected()
        try:
            writer.write(_without(self.head, b"connection") + b"connection: close\r\n\r\n" + self.body)
            try:
                yield _without(await reader.readuntil(b"\r\n\r\n"), b"connection") + b"\r\n"
            except asyncio.IncompleteReadError as error:
                raise ConnectionResetError("the server left without an answer") from error
            while data := await reader.read(65_536):
                yield data
        finally:
            writer.close()

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the first server that takes one."""
        for target in self.targets:
            with contextlib.suppress(ConnectionRefusedError):
                return await asyncio.open_connection(*target)
        raise ConnectionRefusedError("there is no server")

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def cut(self) -> None:
        """Close the client's connection so that it sees a reset."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Fault = Callable[[Exchange], Awaitable[None]]
Choose = Callable[[Exchange], Fault]


async def passes(exchange: Exchange) -> None:
    """No fault: the answer as it comes; 502 where there is no server."""
    begun = False
    try:
        async for part in exchange.parts():
            begun = True
            await exchange.send(part)
    except ConnectionError:
        if begun:
            exchange.cut()
        else:
            await says(502)(exchange)


async def cuts(exchange: Exchange) -> None:
    """The server never sees the request."""
    exchange.cut()


async def loses_the_answer(exchange: Exchange) -> None:
    await exchange.forward()
    exchange.cut()


async def cuts_the_answer(exchange: Exchange) -> None:
    answer = await exchange.forward()
    await exchange.send(answer[: max(1, len(answer) - 5)])
    exchange.cut()


def says(status: int, *headers: bytes) -> Fault:
    """The balancer's own page; the server never sees the request."""

    async def fault(exchange: Exchange) -> None:
        page = PAGE % status
        lines = [b"HTTP/1.1 %d No" % status, b"content-type: text/html", b"content-length: %d" % len(page), *headers]
        await exchange.send(b"\r\n".join([*lines, b"", b""]) + page)

    return fault


def says_in_the_end(status: int) -> Fault:
    """The server did it, but was too slow for the balancer."""

    async def fault(exchange: Exchange) -> None:
        await exchange.forward()
        await says(status)(exchange)

    return fault


def delays(seconds: float) -> Fault:
    async def fault(exchange: Exchange) -> None:
        await asyncio.sleep(seconds)
        await passes(exchange)

    return fault


def at_random(seed: int, share: float) -> Choose:
    """Any fault, for this share of all exchanges; what asks whether the server is ready is left alone."""
    dice = random.Random(seed)
    faults = [
        cuts, loses_the_answer, cuts_the_answer, says(502), says(503, b"retry-after: 1"), says(504), says(404),
        says(200), says_in_the_end(504), delays(0.3),
    ]  # fmt: skip

    def choose(exchange: Exchange) -> Fault:
        if exchange.path == "/readyz" or dice.random() > share:
            return passes
        return dice.choice(faults)

    return choose


class FaultProxy:
    """`url` is what clients are given; `choose` says what happens to each exchange, and may be changed at any time."""

    def __init__(self, *targets: str, choose: Choose | None = None) -> None:
        self.aim(*targets)
        self._server: asyncio.Server | None = None
        self._port = 0
        self._clients: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.choose: Choose = choose or (lambda _: passes)
        self.seen: list[tuple[str, str]] = []
        """Method and path of every exchange."""

    def aim(self, *targets: str) -> None:
        """What is forwarded goes there from now on, to one server after the other."""
        self._targets = [(address.hostname or "", address.port or 0) for address in map(urlsplit, targets)]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> "FaultProxy":
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Listen; after `close` at the same address again."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Refuse connections, and cut those that there are."""
        assert self._server is not None
        self._server.close()
        for writer in self._clients:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def away(self, seconds: float) -> None:
        """What a reload does to clients that are unlucky."""
        await self.close()
        await asyncio.sleep(seconds)
        await self.open()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._clients.add(writer)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while not writer.is_closing():
                    exchange = await self._read(reader, writer)
                    self.seen.append((exchange.method, exchange.path))
                    await self.choose(exchange)(exchange)
        finally:
            self._tasks.discard(task)
            self._clients.discard(writer)
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Exchange:
        head = await reader.readuntil(b"\r\n\r\n")
        method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
        length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0")
        body = await reader.readexactly(int(length.partition(b":")[2]))
        self._targets = self._targets[1:] + self._targets[:1]
        return Exchange(method, path, head, body, self._targets, writer)


def _without(head: bytes, name: bytes) -> bytes:
    """The lines of a head without this header, and without the empty line at its end."""
    lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    return b"".join(line + b"\r\n" for line in lines if not line.lower().startswith(name + b":"))
