"""The capture of calls that have only begun: seen by every seal, and read once however often they were written."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from services.model_proxy.capture import Captures
from services.model_proxy.capture_log import Standing, begun_entry, lost_entry, void_entry
from shared.contracts.capture import Capture
from shared.ports.store import Appended, Record
from shared.store.memory import MemoryStore

SEED = 7
RACES = 100


class DistantStore(MemoryStore):
    """Each operation is one step, done some time after it was asked for, and answered some time later."""

    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random(SEED)

    async def _travel(self) -> None:
        await asyncio.sleep(self._random.random() * 0.002)

    async def get(self, key: str) -> Record | None:
        await self._travel()
        found = await super().get(key)
        await self._travel()
        return found

    async def create(self, key: str, value: bytes, *, ttl_s: float) -> Record | None:
        await self._travel()
        created = await super().create(key, value, ttl_s=ttl_s)
        await self._travel()
        return created

    async def append(self, key: str, entries: Sequence[bytes], *, ttl_s: float) -> int:
        await self._travel()
        length = await super().append(key, entries, ttl_s=ttl_s)
        await self._travel()
        return length

    async def append_and_get(self, log: str, entries: Sequence[bytes], key: str, *, ttl_s: float) -> Appended:
        await self._travel()
        appended = await super().append_and_get(log, entries, key, ttl_s=ttl_s)
        await self._travel()
        return appended

    async def read_log(self, key: str, start: int = 0) -> list[bytes]:
        await self._travel()
        entries = await super().read_log(key, start)
        await self._travel()
        return entries


def _facts(call_id: str, **more: Any) -> dict[str, Any]:
    return {
        "call_id": call_id, "phase": "agent", "session": "", "instance": "i", "dialect": "responses", "model": "m",
        "stream": False, "started_at": 1.0, **more,
    }  # fmt: skip


def _ended(call_id: str, **more: Any) -> dict[str, Any]:
    usage = {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}
    return _facts(call_id, ended_at=2.0, status=200, usage=usage, **more)


async def _read(captures: Captures, key: str = "k") -> Capture:
    return Capture.model_validate_json(await captures.read(key))


async def test_a_call_sees_the_seal_or_the_seal_sees_the_call() -> None:
    store = DistantStore()
    replicas = [Captures(store, ttl_s=60) for _ in range(3)]

    async def call(replica: Captures, key: str, call_id: str) -> str | None:
        begun = await replica.begin(key, _facts(call_id))
        if begun.sealed:
            await replica.void(key, call_id)
            return None
        await replica.append(key, _ended(call_id), b"{}", b"{}")
        return call_id

    async def seal(key: str) -> set[str]:
        await replicas[0].close(key)
        capture = Capture.model_validate_json(await replicas[0].settled(key))
        assert all(one.ended_at is not None for one in capture.calls)
        return {one.call_id for one in capture.calls}

    async def race(key: str) -> bool:
        seen, *made = await asyncio.gather(seal(key), *(call(replicas[n % 3], key, f"{n}") for n in range(6)))
        assert seen == {call_id for call_id in made if call_id is not None}
        return 0 < len(seen) < 6

    mixed = await asyncio.gather(*(race(f"k{n}") for n in range(RACES)))
    # Else the races decide nothing.
    assert sum(mixed) > RACES / 10


async def test_what_is_written_twice_is_read_once() -> None:
    store = MemoryStore()
    captures = Captures(store, ttl_s=60)
    await captures.begin("k", _facts("one"))
    await captures.append("k", _ended("one"), b'{"input":"x"}', b"{}")
    await store.append("capture:{k}", await store.read_log("capture:{k}"), ttl_s=60)
    (call,) = (await _read(captures)).calls
    assert (call.call_id, call.request, call.status) == ("one", {"input": "x"}, 200)
    assert await captures.spent("k", 100) == (1, 2)


async def test_the_record_of_a_lost_call_takes_its_place() -> None:
    captures = Captures(MemoryStore(), ttl_s=60)
    await captures.begin("k", _facts("slow"))
    await captures.close("k")
    (lost,) = Capture.model_validate_json(await captures.settled("k")).calls
    assert (lost.error_category, lost.usage) == ("lost", None)
    await captures.append("k", _ended("slow"), None, None)
    (ended,) = Capture.model_validate_json(await captures.settled("k")).calls
    assert (ended.error_category, ended.status) == (None, 200)


async def test_a_void_call_is_in_no_capture_also_when_its_begin_arrives_last() -> None:
    captures = Captures(MemoryStore(), ttl_s=60)
    await captures.void("k", "late")
    begun = await captures.begin("k", _facts("late"))
    assert (await _read(captures)).calls == ()
    assert await captures.spent("k", begun.position + 1) == (0, 0)


async def test_calls_that_have_begun_follow_those_that_have_ended() -> None:
    captures = Captures(MemoryStore(), ttl_s=60)
    for call_id in ("first", "second", "third"):
        await captures.begin("k", _facts(call_id))
    for call_id in ("third", "first"):
        await captures.append("k", _ended(call_id), None, None)
    assert [call.call_id for call in (await _read(captures)).calls] == ["third", "first", "second"]


async def test_a_record_that_does_not_fit_a_call_is_counted_and_nobody_waits_for_it() -> None:
    store = MemoryStore()
    captures = Captures(store, ttl_s=60)
    await store.append("capture:{k}", [b"o{", b'o{"call_id": 1}', b"c[]", b"v\xff", b"l\xff"], ttl_s=60)
    await captures.close("k")
    capture = Capture.model_validate_json(await captures.settled("k"))
    assert (capture.calls, capture.damaged) == ((), 3)


@pytest.mark.parametrize("start", [0, 1, 3])
def test_a_log_may_be_taken_in_overlapping_pieces(start: int) -> None:
    entries = [begun_entry(_facts("a")), begun_entry(_facts("b")), void_entry("a"), begun_entry(_facts("c"))]
    standing = Standing()
    standing.take(0, entries[:3])
    standing.take(start, [*entries, lost_entry("b")][start:])
    assert (standing.seen, standing.open_calls()) == (5, ["c"])
    assert [standing.begun_before(position) for position in range(5)] == [0, 0, 1, 1, 2]
