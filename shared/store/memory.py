"""The store of the embedded mesh: one process, nothing on disk. Time comes from an injected clock."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shared.errors import FencedError, VersionConflictError
from shared.ports.store import Appended, Lease, Record

SWEEP_EVERY_S = 30.0


@dataclass(slots=True)
class _Entry:
    record: Record
    expires_at: float


@dataclass(slots=True)
class _Log:
    entries: list[bytes]
    expires_at: float


@dataclass(slots=True)
class _Places:
    """Claims on one name; `fence` is the newest ever given."""

    fence: int = 0
    held: dict[int, tuple[Lease, float]] = field(default_factory=dict)
    queue: deque[asyncio.Future[None]] = field(default_factory=deque)


class MemoryStore:
    """Implements `shared.ports.store.Store`. Fences start at the clock, so they grow across restarts, too."""

    outlives_process = False

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._records: dict[str, _Entry] = {}
        self._logs: dict[str, _Log] = {}
        self._sets: dict[str, dict[str, float]] = {}
        self._places: dict[str, _Places] = {}
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}
        self._version = 0
        self._next_sweep = clock() + SWEEP_EVERY_S

    async def ping(self) -> None:
        return

    async def close(self) -> None:
        return

    async def get(self, key: str) -> Record | None:
        return self._live(key)

    async def create(self, key: str, value: bytes, *, ttl_s: float) -> Record | None:
        if self._live(key) is not None:
            return None
        return self._write(key, value, ttl_s)

    async def replace(
        self, key: str, value: bytes, *, version: int, ttl_s: float, lease: Lease | None = None
    ) -> Record:
        self._check(key, version, lease)
        return self._write(key, value, ttl_s)

    async def delete(self, key: str, *, version: int | None = None, lease: Lease | None = None) -> bool:
        if self._live(key) is None:
            return False
        self._check(key, version, lease)
        del self._records[key]
        self._wake(key)
        return True

    async def wait_for_change(self, key: str, *, version: int, timeout_s: float) -> Record | None:
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while True:
            record = self._live(key)
            if (record.version if record else 0) != version or loop.time() >= end:
                return record
            waiter = loop.create_future()
            waiters = self._waiters.setdefault(key, set())
            waiters.add(waiter)
            timer = loop.call_at(min(end, loop.time() + SWEEP_EVERY_S), _done, waiter)
            try:
                await waiter
            finally:
                timer.cancel()
                waiters.discard(waiter)
                if not waiters:
                    self._waiters.pop(key, None)

    async def acquire(
        self, name: str, owner: str, *, ttl_s: float, places: int = 1, wait_s: float = 0.0
    ) -> Lease | None:
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_s
        line = self._places.setdefault(name, _Places())
        self._expire(line)
        free = len(line.held) < places and not line.queue
        mine = next((fence for fence, (lease, _) in line.held.items() if lease.owner == owner), None)
        if mine is not None:
            del line.held[mine]
            return self._claim(line, name, owner, ttl_s)
        if free:
            return self._claim(line, name, owner, ttl_s)
        turn = loop.create_future()
        line.queue.append(turn)
        try:
            while loop.time() < end:
                await self._wait_turn(line, turn, end)
                if line.queue[0] is turn and len(line.held) < places:
                    return self._claim(line, name, owner, ttl_s)
                if turn.done():
                    # Woken, but not first or still full: wait again in the same place of the line.
                    position = line.queue.index(turn)
                    turn = line.queue[position] = loop.create_future()
            return None
        finally:
            line.queue.remove(turn)
            _wake_first(line)

    async def _wait_turn(self, line: _Places, turn: asyncio.Future[None], end: float) -> None:
        """Wait until woken, until a claim may have expired, or until `end`."""
        loop = asyncio.get_running_loop()
        expiry = min((at for _, at in line.held.values()), default=self._clock())
        timer = loop.call_at(min(end, loop.time() + max(0.0, expiry - self._clock())), _done, turn)
        try:
            await turn
        finally:
            timer.cancel()
        self._expire(line)

    def _claim(self, line: _Places, name: str, owner: str, ttl_s: float) -> Lease:
        line.fence = max(line.fence + 1, int(self._clock() * 1e6))
        lease = Lease(name, owner, line.fence)
        line.held[lease.fence] = (lease, self._clock() + ttl_s)
        return lease

    async def renew(self, lease: Lease, *, ttl_s: float) -> None:
        self._check_lease(lease)
        self._places[lease.name].held[lease.fence] = (lease, self._clock() + ttl_s)

    async def release(self, lease: Lease) -> None:
        line = self._places.get(lease.name)
        if line is not None and line.held.pop(lease.fence, None) is not None:
            _wake_first(line)

    async def append(self, key: str, entries: Sequence[bytes], *, ttl_s: float) -> int:
        return self._append(key, entries, ttl_s)

    async def append_and_get(self, log: str, entries: Sequence[bytes], key: str, *, ttl_s: float) -> Appended:
        return Appended(self._append(log, entries, ttl_s), self._live(key))

    async def read_log(self, key: str, start: int = 0) -> list[bytes]:
        log = self._logs.get(key)
        return log.entries[start:] if log is not None and log.expires_at > self._clock() else []

    async def add_member(self, key: str, member: str, *, ttl_s: float) -> None:
        self._sets.setdefault(key, {})[member] = self._clock() + ttl_s

    async def remove_member(self, key: str, member: str) -> None:
        members = self._sets.get(key, {})
        members.pop(member, None)
        if not members:
            self._sets.pop(key, None)

    async def members(self, key: str) -> set[str]:
        now = self._clock()
        return {member for member, expires_at in self._sets.get(key, {}).items() if expires_at > now}

    def size(self) -> dict[str, int]:
        """How much is held, expired things that were not swept yet included."""
        return {
            "records": len(self._records),
            "logs": len(self._logs),
            "leases": len(self._places),
            "members": sum(map(len, self._sets.values())),
        }

    def _append(self, key: str, entries: Sequence[bytes], ttl_s: float) -> int:
        now = self._clock()
        log = self._logs.get(key)
        if log is None or log.expires_at <= now:
            log = self._logs[key] = _Log([], 0.0)
        log.entries.extend(entries)
        log.expires_at = now + ttl_s
        self._sweep(now)
        return len(log.entries)

    def _live(self, key: str) -> Record | None:
        entry = self._records.get(key)
        return entry.record if entry is not None and entry.expires_at > self._clock() else None

    def _write(self, key: str, value: bytes, ttl_s: float) -> Record:
        now = self._clock()
        self._version += 1
        record = Record(value, self._version)
        self._records[key] = _Entry(record, now + ttl_s)
        self._wake(key)
        self._sweep(now)
        return record

    def _check(self, key: str, version: int | None, lease: Lease | None) -> None:
        record = self._live(key)
        if version is not None and (record is None or record.version != version):
            raise VersionConflictError(f"{key} has changed since it was read.")
        if lease is not None:
            self._check_lease(lease)

    def _check_lease(self, lease: Lease) -> None:
        line = self._places.get(lease.name)
        held = line.held.get(lease.fence) if line is not None else None
        if held is None or held[1] <= self._clock():
            raise FencedError(f"The claim on {lease.name} was lost to a newer owner or has expired.")

    def _wake(self, key: str) -> None:
        for waiter in self._waiters.get(key, ()):
            _done(waiter)

    def _expire(self, line: _Places) -> None:
        now = self._clock()
        for fence in [fence for fence, (_, expires_at) in line.held.items() if expires_at <= now]:
            del line.held[fence]

    def _sweep(self, now: float) -> None:
        """Drop what has expired, now and then, so that memory does not grow with the episodes ever run."""
        if now < self._next_sweep:
            return
        self._next_sweep = now + SWEEP_EVERY_S
        for key in [key for key, entry in self._records.items() if entry.expires_at <= now]:
            del self._records[key]
        for key in [key for key, log in self._logs.items() if log.expires_at <= now]:
            del self._logs[key]
        for members in self._sets.values():
            for member in [member for member, expires_at in members.items() if expires_at <= now]:
                del members[member]
        self._sets = {key: members for key, members in self._sets.items() if members}
        for line in self._places.values():
            self._expire(line)
        for name in [name for name, line in self._places.items() if not line.held and not line.queue]:
            del self._places[name]


def _done(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _wake_first(line: _Places) -> None:
    if line.queue:
        _done(line.queue[0])
