"""The Redis store: the contract, and what several processes make of it."""

import asyncio
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from itertools import chain, pairwise
from pathlib import Path

import pytest
import uvloop
from redis.crc import key_slot

from shared.errors import StoreUnavailableError
from shared.ports.store import Store
from shared.store.redis import WAITER_LIVES_S, RedisStore
from shared.store.redis_scripts import LINE_PARTS, RECORD, slot_key
from tests.serving import free_port
from tests.store.contender import ROUNDS
from tests.store.contract import LONG_S, SOON_S, StoreContract
from tests.store.redis_server import RedisServer

CONTEND_S = 60.0


@pytest.mark.redis
class TestRedisStore(StoreContract):
    """The server's fixture looks after every test whether each key that it left has a TTL."""

    @pytest.fixture
    async def store(self, redis_server: RedisServer) -> AsyncIterator[Store]:
        store = RedisStore(redis_server.url)
        yield store
        await store.close()


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[RedisStore]:
    store = RedisStore(redis_server.url)
    yield store
    await store.close()


@pytest.fixture
async def other(redis_server: RedisServer) -> AsyncIterator[RedisStore]:
    """Another replica's."""
    store = RedisStore(redis_server.url)
    yield store
    await store.close()


async def _until(reached: Callable[[], bool]) -> None:
    """Ask the server, which tells nobody, until it is so."""
    end = asyncio.get_running_loop().time() + SOON_S
    while not reached():
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.01)


def _length_is(server: RedisServer, name: str, length: int) -> bool:
    """Whether so many stand in line."""
    return bool(server.ask("ZCARD", slot_key(LINE_PARTS[2], name)) == length)


def _contend(server: RedisServer, mode: str, owner: str, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.store.contender", server.url, mode, owner, str(folder)]
    return subprocess.Popen(command, cwd=Path(__file__).parents[2])


@pytest.mark.redis
async def test_two_processes_never_hold_one_claim_at_once(
    redis_server: RedisServer, store: RedisStore, tmp_path: Path
) -> None:
    (tmp_path / "number").write_text("0")
    start = await store.acquire("count", "start", ttl_s=LONG_S)
    assert start is not None
    processes = [_contend(redis_server, "count", owner, tmp_path) for owner in ("a", "b")]
    try:
        await _until(partial(_length_is, redis_server, "count", 2))
        await store.release(start)
        ends = [await asyncio.to_thread(process.wait, CONTEND_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert ends == [0, 0]
    assert int((tmp_path / "number").read_text()) == 2 * ROUNDS
    taken = [line.split() for line in (tmp_path / "fences").read_text().splitlines()]
    assert all(int(before[0]) < int(after[0]) for before, after in pairwise(taken))
    turns = sum(before[1] != after[1] for before, after in pairwise(taken))
    assert turns > ROUNDS, "who came back did not stand at the end of the line"


@pytest.mark.redis
async def test_a_killed_waiter_blocks_the_line_only_briefly(
    redis_server: RedisServer, store: RedisStore, tmp_path: Path
) -> None:
    mine = await store.acquire("line", "me", ttl_s=LONG_S)
    assert mine is not None
    process = _contend(redis_server, "wait", "dead", tmp_path)
    try:
        await _until(partial(_length_is, redis_server, "line", 1))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    waiting = asyncio.create_task(store.acquire("line", "next", ttl_s=LONG_S, wait_s=SOON_S))
    await asyncio.sleep(0.1)
    await store.release(mine)
    lease = await asyncio.wait_for(waiting, WAITER_LIVES_S + 2)
    assert lease is not None
    assert lease.owner == "next"


@pytest.mark.redis
async def test_replicas_stand_in_one_line(redis_server: RedisServer, store: RedisStore, other: RedisStore) -> None:
    mine = await store.acquire("name", "me", ttl_s=LONG_S)
    assert mine is not None
    order: list[int] = []

    async def queue(at: RedisStore, n: int) -> None:
        lease = await at.acquire("name", f"waiter-{n}", ttl_s=LONG_S, wait_s=SOON_S)
        assert lease is not None
        order.append(n)
        await at.release(lease)

    waiting = []
    for n in range(10):
        waiting.append(asyncio.create_task(queue(store if n % 2 else other, n)))
        await _until(partial(_length_is, redis_server, "name", n + 1))
    await store.release(mine)
    async with asyncio.timeout(SOON_S):
        await asyncio.gather(*waiting)
    assert order == list(range(10))


@pytest.mark.redis
async def test_a_replica_is_told_of_a_change_at_once(store: RedisStore, other: RedisStore) -> None:
    loop = asyncio.get_running_loop()
    record = await store.create("k", b"", ttl_s=LONG_S)
    assert record is not None
    delays = []
    for n in range(20):
        waiting = asyncio.create_task(other.wait_for_change("k", version=record.version, timeout_s=SOON_S))
        await asyncio.sleep(0.1)
        started = loop.time()
        record = await store.replace("k", b"%d" % n, version=record.version, ttl_s=LONG_S)
        assert await waiting == record
        delays.append(loop.time() - started)
    assert sorted(delays)[10] < 0.1, "waiters found out by themselves, not by the message"


@pytest.mark.redis
async def test_a_cancelled_claim_is_given_back(store: RedisStore, other: RedisStore) -> None:
    for n in range(50):
        cut_off = asyncio.create_task(store.acquire("name", "cancelled", ttl_s=LONG_S))
        for _ in range(n % 12):
            await asyncio.sleep(0)
        cut_off.cancel()
        ended = (await asyncio.gather(cut_off, return_exceptions=True))[0]
        if not isinstance(ended, BaseException):
            assert ended is not None
            await store.release(ended)
        lease = await other.acquire("name", "next", ttl_s=LONG_S, wait_s=SOON_S)
        assert lease is not None
        await other.release(lease)


@pytest.mark.redis
async def test_answers_reach_who_asked_whoever_is_cancelled(store: RedisStore, redis_server: RedisServer) -> None:
    for n in range(100):
        await store.create(f"k{n}", b"%d" % n, ttl_s=LONG_S)
    chance = random.Random(7)
    for _ in range(30):
        asked = [asyncio.create_task(store.get(f"k{n}")) for n in range(100)]
        for _ in range(chance.randrange(6)):
            await asyncio.sleep(0)
        for n in range(0, 100, 2):
            asked[n].cancel()
        found = await asyncio.gather(*asked, return_exceptions=True)
        kept = [record for record in found[1::2] if not isinstance(record, BaseException) and record is not None]
        assert [record.value for record in kept] == [b"%d" % n for n in range(1, 100, 2)]
    connected = [
        line for line in redis_server.ask("CLIENT", "LIST", "TYPE", "normal").splitlines() if "cmd=get" in line
    ]
    assert len(connected) == 1


@pytest.mark.redis
async def test_a_record_that_is_made_again_is_newer_than_the_deleted_one(store: RedisStore) -> None:
    versions = []
    for _ in range(20):
        record = await store.create("k", b"", ttl_s=LONG_S)
        assert record is not None
        versions.append(record.version)
        await store.delete("k")
    assert all(before < after for before, after in pairwise(versions))


@pytest.mark.redis
async def test_no_change_is_lost_while_the_subscriber_is_killed_again_and_again(
    redis_server: RedisServer, store: RedisStore, other: RedisStore
) -> None:
    loop = asyncio.get_running_loop()
    killed = 0

    async def kill() -> None:
        nonlocal killed
        while True:
            killed += await asyncio.to_thread(redis_server.ask, "CLIENT", "KILL", "TYPE", "pubsub")
            await asyncio.sleep(0.05)

    async def follow(key: str) -> list[float]:
        record = await store.create(key, b"", ttl_s=LONG_S)
        delays = []
        for n in range(20):
            assert record is not None
            waiting = asyncio.create_task(other.wait_for_change(key, version=record.version, timeout_s=SOON_S))
            await asyncio.sleep(0.11)
            changed_at = loop.time()
            record = await store.replace(key, b"%d" % n, version=record.version, ttl_s=LONG_S)
            assert await waiting == record
            delays.append(loop.time() - changed_at)
        return delays

    killer = asyncio.create_task(kill())
    try:
        async with asyncio.timeout(CONTEND_S):
            delays = sorted(chain.from_iterable(await asyncio.gather(*(follow(f"k{n}") for n in range(10)))))
    finally:
        killer.cancel()
        await asyncio.gather(killer, return_exceptions=True)
    assert len(delays) == 200
    assert delays[int(0.99 * len(delays))] < 1.2
    assert killed > 20


@pytest.mark.redis
async def test_names_with_one_tag_share_a_script_in_a_cluster(tmp_path: Path) -> None:
    with RedisServer(tmp_path, "--cluster-enabled", "yes", "--cluster-port", str(free_port())) as server:
        server.ask("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        await _until(lambda: "cluster_state:ok" in server.ask("CLUSTER", "INFO"))
        store = RedisStore(server.url)
        try:
            for name in ("episode:{1-0}", "admission:math", "}", "{", "{}", "a}b{c"):
                lease = await store.acquire(name, "me", ttl_s=LONG_S)
                record = await store.create(name, b"1", ttl_s=LONG_S)
                assert lease is not None
                assert record is not None
                record = await store.replace(name, b"2", version=record.version, ttl_s=LONG_S, lease=lease)
                await store.renew(lease, ttl_s=LONG_S)
                assert await store.acquire(name, "you", ttl_s=LONG_S, wait_s=0.05) is None
                assert await store.delete(name, version=record.version, lease=lease)
                await store.release(lease)
            lease = await store.acquire("here", "me", ttl_s=LONG_S)
            record = await store.create("there", b"1", ttl_s=LONG_S)
            assert record is not None
            with pytest.raises(StoreUnavailableError, match="slot"):
                await store.replace("there", b"2", version=record.version, ttl_s=LONG_S, lease=lease)
        finally:
            await store.close()


@pytest.mark.parametrize("name", ["episode:{1-0}", "plain", "}", "{", "{}", "{=plain}", "a}b{c", ""])
def test_all_keys_of_a_name_lie_in_one_slot_and_no_two_names_share_a_key(name: str) -> None:
    assert len({key_slot(slot_key(kind, name).encode()) for kind in (RECORD, *LINE_PARTS)}) == 1
    others = {"episode:{1-0}", "plain", "}", "{", "{}", "{=plain}", "a}b{c", ""} - {name}
    assert slot_key(RECORD, name) not in {slot_key(RECORD, other) for other in others}


def test_a_tag_of_ones_own_is_kept() -> None:
    assert key_slot(slot_key(RECORD, "episode:{1-0}").encode()) == key_slot(b"1-0")


@pytest.mark.redis
async def test_the_event_loop_that_services_run_on_carries_it(redis_server: RedisServer) -> None:
    async def use() -> None:
        store, other = RedisStore(redis_server.url), RedisStore(redis_server.url)
        record = await store.create("k", b"1" * 100_000, ttl_s=LONG_S)
        assert record is not None
        waiting = asyncio.create_task(other.wait_for_change("k", version=record.version, timeout_s=SOON_S))
        lease = await store.acquire("name", "me", ttl_s=LONG_S)
        queueing = asyncio.create_task(other.acquire("name", "you", ttl_s=LONG_S, wait_s=SOON_S))
        assert lease is not None
        changed = await store.replace("k", b"2", version=record.version, ttl_s=LONG_S)
        await store.release(lease)
        assert await waiting == changed
        assert await queueing is not None
        await store.close()
        await other.close()

    await asyncio.to_thread(uvloop.run, use())
