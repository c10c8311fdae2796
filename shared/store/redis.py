"""The store of several replicas: Redis 7, reached by `redis://`, `rediss://` or `unix://`.

Owns the translation of commands and errors; the wire is in `redis_connection.py`, what happens inside Redis in
`redis_scripts.py`, waiting for messages in `redis_hints.py`. Commands of one tick of the event loop go out together.

No command is repeated: a connection that broke before the answer leaves open whether the write was done, and
`StoreUnavailableError` says so to the caller. What a server loses that crashed between two writes of its
append-only file (one second with Redis's default) is lost; versions and fences grow all the same.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Final

from hiredis import ReplyError

from shared.errors import StoreUnavailableError
from shared.ports.store import Appended, Lease, Record
from shared.redaction import redact
from shared.store import redis_scripts as scripts
from shared.store.redis_connection import ANSWER_TIMEOUT_S, Address, Connection, ConnectionLostError, SharedConnection
from shared.store.redis_hints import Hints, rung
from shared.store.redis_scripts import (
    CHANGED,
    LEASE_PARTS,
    LINE_PARTS,
    LOG,
    RECORD,
    SET,
    TURN,
    accepted,
    decoded,
    digest,
    keys_under,
    ms,
    slot_key,
)

RETRY_AFTER_S: Final = 1.0
REREAD_S: Final = 1.0
"""A waiter looks for itself this often, whatever messages say."""
WAITER_LIVES_S: Final = 2.5
"""A waiter in line that was not heard of for so long has died, and is passed over."""
SILENCE_S: Final = 10.0
"""A subscription without any message for so long is asked for a sign of life."""


class RedisStore:
    """Implements `shared.ports.store.Store`. Connects on first use; is used in one event loop."""

    outlives_process = True

    def __init__(self, url: str) -> None:
        self._address = Address.of(url)
        self._connection = SharedConnection(self._address, lambda size: self._batch_sent(size))
        self._tasks: set[asyncio.Task[Any]] = set()
        self._hints = Hints(self._subscribe)
        self._batch_sent: Callable[[int], None] = lambda _size: None

    def tell_batches(self, told: Callable[[int], None]) -> None:
        """Call this with the number of commands that went out together, each time."""
        self._batch_sent = told

    async def ping(self) -> None:
        await self._ask("PING")

    async def close(self) -> None:
        await self._hints.close()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._connection.close()

    async def get(self, key: str) -> Record | None:
        return decoded(await self._ask("GET", slot_key(RECORD, key)))

    async def create(self, key: str, value: bytes, *, ttl_s: float) -> Record | None:
        version = await self._run(scripts.CREATE, [slot_key(RECORD, key)], value, ms(ttl_s), CHANGED + key)
        return Record(value, version) if version else None

    async def replace(
        self, key: str, value: bytes, *, version: int, ttl_s: float, lease: Lease | None = None
    ) -> Record:
        keys, claim = keys_under(key, lease)
        answer = await self._run(scripts.REPLACE, keys, value, ms(ttl_s), CHANGED + key, version, *claim)
        return Record(value, accepted(answer, key, lease))

    async def delete(self, key: str, *, version: int | None = None, lease: Lease | None = None) -> bool:
        keys, claim = keys_under(key, lease)
        expected = "" if version is None else version
        return bool(accepted(await self._run(scripts.DELETE, keys, CHANGED + key, expected, *claim), key, lease))

    async def wait_for_change(self, key: str, *, version: int, timeout_s: float) -> Record | None:
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        record = await self.get(key)
        if (record.version if record else 0) != version or timeout_s <= 0:
            return record
        with self._hints.watch(CHANGED + key) as bell:
            while True:
                await rung(bell, min(REREAD_S, end - loop.time()))
                # The header tells whether anything changed: an unchanged record is not sent once a second.
                header = await self._ask("GETRANGE", slot_key(RECORD, key), 0, scripts.HEADER_BYTES - 1)
                record = decoded(header)
                if (record.version if record else 0) != version or loop.time() >= end:
                    return await self.get(key)

    async def acquire(
        self, name: str, owner: str, *, ttl_s: float, places: int = 1, wait_s: float = 0.0
    ) -> Lease | None:
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_s
        token = uuid.uuid4().hex
        keys = [slot_key(part, name) for part in LINE_PARTS]
        waits_ms = ms(WAITER_LIVES_S) if wait_s > 0 else 0

        def attempt() -> asyncio.Task[Any]:
            return self._start(self._run(scripts.ACQUIRE, keys, owner, ms(ttl_s), places, token, waits_ms))

        asked = attempt()
        try:
            fence, retry_ms = await asyncio.shield(asked)
            if not fence and waits_ms:
                with self._hints.watch(TURN + token) as bell:
                    while not fence and loop.time() < end:
                        await rung(bell, min(REREAD_S, max(retry_ms, 10) / 1000, end - loop.time()))
                        asked = attempt()
                        fence, retry_ms = await asyncio.shield(asked)
        except BaseException:
            # Cancelled or cut off: the answer may still come, and be a claim that nobody would give back.
            self._start(self._leave(asked, keys, owner, token))
            raise
        if fence:
            return Lease(name, owner, fence)
        if waits_ms:
            await self._leave(asked, keys, owner, token)
        return None

    async def _leave(self, asked: asyncio.Task[Any], keys: list[str], owner: str, token: str) -> None:
        await asyncio.wait([asked])
        if not asked.cancelled():
            asked.exception()  # whoever asked has gone: nobody else takes note of it
        with contextlib.suppress(StoreUnavailableError):  # a waiter that is not heard of is passed over anyway
            await self._run(scripts.LEAVE, keys, owner, token)

    async def renew(self, lease: Lease, *, ttl_s: float) -> None:
        keys = [slot_key(part, lease.name) for part in LEASE_PARTS]
        accepted(await self._run(scripts.RENEW, keys, lease.owner, lease.fence, ms(ttl_s)), "", lease)

    async def release(self, lease: Lease) -> None:
        keys = [slot_key(part, lease.name) for part in LINE_PARTS]
        await self._run(scripts.RELEASE, keys, lease.owner, lease.fence)

    async def append(self, key: str, entries: Sequence[bytes], *, ttl_s: float) -> int:
        return int(await self._run(scripts.APPEND, [slot_key(LOG, key)], ms(ttl_s), *entries))

    async def append_and_get(self, log: str, entries: Sequence[bytes], key: str, *, ttl_s: float) -> Appended:
        keys = [slot_key(LOG, log), slot_key(RECORD, key)]
        length, record = await self._run(scripts.APPEND_AND_GET, keys, ms(ttl_s), *entries)
        return Appended(int(length), decoded(record))

    async def read_log(self, key: str, start: int = 0) -> list[bytes]:
        return list(await self._ask("LRANGE", slot_key(LOG, key), start, -1))

    async def add_member(self, key: str, member: str, *, ttl_s: float) -> None:
        await self._run(scripts.ADD_MEMBER, [slot_key(SET, key)], member, ms(ttl_s))

    async def remove_member(self, key: str, member: str) -> None:
        await self._ask("ZREM", slot_key(SET, key), member)

    async def members(self, key: str) -> set[str]:
        return {member.decode() for member in await self._run(scripts.MEMBERS, [slot_key(SET, key)])}

    async def _run(self, script: str, keys: Sequence[str], *arguments: bytes | str | int) -> Any:
        """Run a script by its digest; a server that does not know it, a restarted one say, is given its text."""
        rest = (len(keys), *keys, *arguments)
        found = await self._answer("EVALSHA", digest(script), *rest)
        if isinstance(found, ReplyError) and str(found).startswith("NOSCRIPT"):
            found = await self._answer("EVAL", script, *rest)
        return self._accepted(found)

    async def _ask(self, *command: bytes | str | int) -> Any:
        """The answer to one command.

        Raises:
            StoreUnavailableError: there was none, or it was an error.
        """
        return self._accepted(await self._answer(*command))

    async def _answer(self, *command: bytes | str | int) -> Any:
        try:
            return await self._connection.ask(*command)
        except (ConnectionLostError, ReplyError) as error:
            raise self._unavailable(error) from error

    def _accepted(self, found: Any) -> Any:
        if isinstance(found, ReplyError):
            raise self._unavailable(found) from found
        return found

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name="store command")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _subscribe(self) -> "_RedisSubscription":
        try:
            return _RedisSubscription(await Connection.open(self._address, lambda _size: None), self._unavailable)
        except (ConnectionLostError, ReplyError) as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: Exception) -> StoreUnavailableError:
        told = redact(str(error)).strip().rstrip(".") or type(error).__name__
        return StoreUnavailableError(
            f"The store at {self._address.place} cannot be used: {told}. Start it, or correct store.url.",
            retry_after_s=RETRY_AFTER_S,
        )


class _RedisSubscription:
    """Implements `shared.store.redis_hints.Subscription` on a connection of its own, which never reconnects."""

    def __init__(self, connection: Connection, unavailable: Callable[[Exception], StoreUnavailableError]) -> None:
        self._connection = connection
        self._unavailable = unavailable
        self._came: asyncio.Queue[Any] = asyncio.Queue()
        connection.listen(self._came.put_nowait)

    async def subscribe(self, channels: Sequence[str]) -> None:
        self._connection.send("SUBSCRIBE", *channels)

    async def unsubscribe(self, channels: Sequence[str]) -> None:
        self._connection.send("UNSUBSCRIBE", *channels)

    async def heard(self) -> AsyncIterator[tuple[str, str]]:
        while True:
            message = await self._next()
            if isinstance(message, Exception):
                raise self._unavailable(message) from message
            if isinstance(message, list) and message[0] != b"pong":
                yield message[0].decode(), message[1].decode()

    async def _next(self) -> Any:
        """What comes next; after a long silence the server is asked whether it lives."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SILENCE_S):
                return await self._came.get()
        self._connection.send("PING")
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await self._came.get()
        except TimeoutError:
            return ConnectionLostError("the subscription gives no sign of life")

    async def close(self) -> None:
        await self._connection.close()
