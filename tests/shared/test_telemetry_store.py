"""What is counted of a store and of the claims in it, and that being counted changes nothing."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from shared.errors import StoreUnavailableError, VersionConflictError
from shared.metric_families import OTHER
from shared.metrics import LEASED, Metrics
from shared.ports.store import Lease, Store
from shared.store.leases import LeaseKeeper, kind_of
from shared.store.memory import MemoryStore
from shared.store.observed import ObservedStore, observed
from shared.store.redis import RedisStore
from tests.shared.test_telemetry_metrics import value
from tests.store.conftest import redis_server as redis_server
from tests.store.conftest import running_redis as running_redis
from tests.store.contract import LONG_S, SOON_S, StoreContract
from tests.store.redis_server import RedisServer


class TestObservedStore(StoreContract):
    """What is measured keeps the store's whole contract."""

    @pytest.fixture
    async def store(self) -> AsyncIterator[Store]:
        store = ObservedStore(MemoryStore(), Metrics())
        yield store
        await store.close()


async def test_operations_are_counted_by_how_they_ended() -> None:
    metrics = Metrics()
    store = ObservedStore(MemoryStore(), metrics)
    record = await store.create("k", b"1", ttl_s=LONG_S)
    assert record is not None
    await store.get("k")
    await store.get("absent")
    with pytest.raises(VersionConflictError):
        await store.replace("k", b"2", version=record.version + 1, ttl_s=LONG_S)
    waiting = asyncio.create_task(store.wait_for_change("k", version=record.version, timeout_s=LONG_S))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    never_begun = asyncio.create_task(store.append("log", [b"x"], ttl_s=LONG_S))
    never_begun.cancel()
    await asyncio.gather(never_begun, return_exceptions=True)
    counted = {
        ("create", "ok"): 1, ("get", "ok"): 2, ("replace", "conflict"): 1, ("wait_for_change", "cancelled"): 1,
        ("append", "cancelled"): 0,
    }  # fmt: skip
    for (op, outcome), times in counted.items():
        assert value(metrics, "paddock_store_seconds_count", op=op, outcome=outcome) == times


def test_the_store_of_this_process_is_not_measured() -> None:
    store = MemoryStore()
    assert observed(store, Metrics()) is store


@pytest.mark.redis
async def test_commands_of_one_tick_are_one_batch_and_a_store_that_is_away_is_told(redis_server: RedisServer) -> None:
    metrics = Metrics()
    inner = RedisStore(redis_server.url)
    store = observed(inner, metrics)
    assert store.outlives_process
    await store.get("k")
    await asyncio.gather(*(store.get(f"k{n}") for n in range(20)))
    assert value(metrics, "paddock_store_batch_size_count") == 2
    assert value(metrics, "paddock_store_batch_size_sum") == 21
    await store.close()
    away = ObservedStore(RedisStore("redis://127.0.0.1:1/0"), metrics)
    with pytest.raises(StoreUnavailableError):
        await away.get("k")
    assert value(metrics, "paddock_store_seconds_count", op="get", outcome="unavailable") == 1
    await away.close()


class _Away(MemoryStore):
    """A store that does not renew while it is away."""

    def __init__(self) -> None:
        super().__init__()
        self.away = True
        self.refused = asyncio.Event()

    async def renew(self, lease: Lease, *, ttl_s: float) -> None:
        if self.away:
            self.refused.set()
            raise StoreUnavailableError("The store is away.")
        await super().renew(lease, ttl_s=ttl_s)


async def test_claims_are_counted_while_they_are_held_and_when_they_are_lost() -> None:
    metrics, store, lost = Metrics(), _Away(), asyncio.Event()
    keeper = LeaseKeeper(store, ttl_s=0.15, metrics=metrics)
    leases = [await store.acquire(f"{kind}:{{x}}", "me", ttl_s=LONG_S) for kind in ("episode", "admission", "episode2")]
    for lease in leases:
        assert lease is not None
        keeper.keep(lease, lost.set)
    for what in ("episode", "admission", OTHER):
        assert value(metrics, "paddock_leases_held", what=what) == 1
    await asyncio.wait_for(store.refused.wait(), SOON_S)
    assert value(metrics, "paddock_lease_renew_failures_total", what="episode") >= 1
    first, second, _ = leases
    assert first is not None
    assert second is not None
    await keeper.release(second)
    await keeper.release(second)
    assert value(metrics, "paddock_leases_held", what="admission") == 0
    await store.release(first)
    store.away = False
    await asyncio.wait_for(lost.wait(), SOON_S)
    assert value(metrics, "paddock_leases_lost_total", what="episode") == 1
    assert value(metrics, "paddock_leases_lost_total", what="admission") == 0
    assert value(metrics, "paddock_leases_held", what="episode") == 0
    await keeper.close()


def test_the_kinds_of_claims_are_the_first_words_of_their_names() -> None:
    assert {kind_of(Lease(f"{word}:{{r1}}", "me", 1)) for word in LEASED} == set(LEASED)
