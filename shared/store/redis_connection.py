"""One connection to Redis: commands go out together, answers come back in their order.

Owns the wire; what commands mean is the store's. The format is read and written by hiredis, Redis's own C parser.
A connection that broke stays broken: whoever waits for an answer is told, and a new one has to be opened.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast
from urllib.parse import parse_qs, unquote, urlsplit

import hiredis

CONNECT_TIMEOUT_S: Final = 2.0
ANSWER_TIMEOUT_S: Final = 5.0
DEFAULT_PORT: Final = 6379

Word = bytes | str | int


class ConnectionLostError(Exception):
    """The connection could not be made, broke, or gave no answer in time: whether a command was run is not known."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is, and who one is there. `place` is the address without the password."""

    host: str
    port: int
    path: str | None
    username: str | None
    password: str | None
    database: int
    tls: bool

    @classmethod
    def of(cls, url: str) -> "Address":
        """The address of a `redis://`, `rediss://` or `unix://` URL that `shared.store.open` has checked."""
        parts = urlsplit(url)
        unix = parts.scheme == "unix"
        database = parse_qs(parts.query).get("db", ["0"])[0] if unix else parts.path.strip("/") or "0"
        return cls(
            host=parts.hostname or "localhost",
            port=parts.port or DEFAULT_PORT,
            path=unquote(parts.path) if unix else None,
            username=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None,
            database=int(database),
            tls=parts.scheme == "rediss",
        )

    @property
    def place(self) -> str:
        return f"unix:{self.path}" if self.path is not None else f"{self.host}:{self.port}"

    def greeting(self) -> list[tuple[Word, ...]]:
        """What is said first."""
        said: list[tuple[Word, ...]] = []
        if self.password is not None:
            said.append(("AUTH", *((self.username,) if self.username else ()), self.password))
        if self.database:
            said.append(("SELECT", self.database))
        return said


class Connection(asyncio.Protocol):
    """Made by `open`. `told` is given how many commands went out together."""

    def __init__(self, told: Callable[[int], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._told = told
        self._reader = hiredis.Reader()
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes] = []
        self._asked: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._watch: asyncio.TimerHandle | None = None
        self._heard: Callable[[Any], None] | None = None
        self._lost: Exception | None = None
        self._gone = asyncio.Event()

    @classmethod
    async def open(cls, address: Address, told: Callable[[int], None]) -> "Connection":
        """A connection over which commands are answered.

        Raises:
            ConnectionLostError: there is no server, or it gives no answer.
            hiredis.ReplyError: it refuses us.
        """
        connection = cls(told)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await connection._connect(address)
                for said in address.greeting():
                    _require_accepted(await connection.ask(*said))
        except (OSError, TimeoutError) as error:
            await connection.close()
            raise ConnectionLostError(str(error) or f"no answer within {CONNECT_TIMEOUT_S:g} s") from error
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _connect(self, address: Address) -> None:
        if address.path is not None:
            await self._loop.create_unix_connection(lambda: self, address.path)
        else:
            tls = ssl.create_default_context() if address.tls else None
            await self._loop.create_connection(lambda: self, address.host, address.port, ssl=tls)

    @property
    def lost(self) -> bool:
        return self._lost is not None

    def ask(self, *command: Word) -> "asyncio.Future[Any]":
        """Send a command with all others of this tick of the event loop; resolved with the answer, also an error.

        The future fails with ConnectionLostError where there is none.
        """
        answer: asyncio.Future[Any] = self._loop.create_future()
        if self._lost is not None:
            answer.set_exception(ConnectionLostError(str(self._lost)))
            return answer
        self._asked.append((answer, self._loop.time()))
        if self._watch is None:
            self._watch = self._loop.call_later(ANSWER_TIMEOUT_S, self._look)
        self.send(*command)
        return answer

    def send(self, *command: Word) -> None:
        """Send a command whose answer is heard by `listen`."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(hiredis.pack_command(command))  # type: ignore[arg-type]  # it takes a tuple of any length

    def listen(self, heard: Callable[[Any], None]) -> None:
        """From now on give all that comes to `heard`: the answers of a subscription. At the end it is a
        ConnectionLostError."""
        self._heard = heard

    async def close(self) -> None:
        """Idempotent; its socket is closed afterwards."""
        self._lose(ConnectionLostError("it was closed"))
        if self._transport is not None:
            await self._gone.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has the methods, not the base class
        if self._lost is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not False:
                self._receive(reply)
        except hiredis.ProtocolError as error:
            self._lose(error)

    def _receive(self, reply: Any) -> None:
        if self._heard is not None:
            self._heard(reply)
            return
        if not self._asked:
            self._lose(ConnectionLostError("the server answered what nobody asked"))
            return
        answer, _ = self._asked.popleft()
        if not answer.done():
            answer.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone.set()
        self._lose(exc or ConnectionLostError("the server closed the connection"))

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None and self._lost is None:
            self._told(len(out))
            self._transport.write(b"".join(out))

    def _look(self) -> None:
        """Whether the oldest question has waited too long; one timer serves all."""
        self._watch = None
        if not self._asked:
            return
        left_s = self._asked[0][1] + ANSWER_TIMEOUT_S - self._loop.time()
        if left_s <= 0:
            self._lose(TimeoutError(f"no answer within {ANSWER_TIMEOUT_S:g} s"))
        else:
            self._watch = self._loop.call_later(left_s, self._look)

    def _lose(self, why: Exception) -> None:
        if self._lost is not None:
            return
        self._lost = why
        if self._watch is not None:
            self._watch.cancel()
        if self._transport is not None:
            self._transport.abort()
        lost = ConnectionLostError(str(why) or type(why).__name__)
        for answer, _ in self._asked:
            if not answer.done():
                answer.set_exception(lost)
        self._asked.clear()
        if self._heard is not None:
            self._heard(lost)


def _require_accepted(answer: Any) -> None:
    if isinstance(answer, hiredis.ReplyError):
        raise answer


class SharedConnection:
    """The one connection that all commands of a process share; opened on first use, and anew when it broke."""

    def __init__(self, address: Address, told: Callable[[int], None]) -> None:
        self._address = address
        self._told = told
        self._connection: Connection | None = None
        self._opening: asyncio.Task[Connection] | None = None

    async def ask(self, *command: Word) -> Any:
        """The answer, an error of the server's among them.

        Raises:
            ConnectionLostError: there is none.
            hiredis.ReplyError: the server refuses us.
        """
        connection = self._connection
        if connection is None or connection.lost:
            connection = await self._opened()
        return await connection.ask(*command)

    async def _opened(self) -> Connection:
        if self._opening is None:
            self._opening = asyncio.create_task(Connection.open(self._address, self._told), name="store connection")
            self._opening.add_done_callback(self._keep)
        return await asyncio.shield(self._opening)

    def _keep(self, opening: "asyncio.Task[Connection]") -> None:
        self._opening = None
        if not opening.cancelled() and opening.exception() is None:
            self._connection = opening.result()

    async def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        if self._connection is not None:
            await self._connection.close()
