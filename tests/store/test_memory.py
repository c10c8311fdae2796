"""The memory store: the contract, and what only it promises."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from shared.errors import ConfigurationError
from shared.ports.store import Store
from shared.settings import LoadedSettings, Settings
from shared.store.leases import LeaseKeeper
from shared.store.memory import SWEEP_EVERY_S, MemoryStore
from shared.store.open import open_store
from tests.store.contract import LONG_S, SOON_S, StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    async def store(self) -> AsyncIterator[Store]:
        store = MemoryStore()
        yield store
        await store.close()


async def test_what_has_expired_is_swept_away() -> None:
    now = [1000.0]
    store = MemoryStore(clock=lambda: now[0])
    for n in range(100):
        await store.create(f"k{n}", b"x", ttl_s=1.0)
        await store.append(f"log{n}", [b"x"], ttl_s=1.0)
        await store.acquire(f"lease{n}", "me", ttl_s=1.0)
        await store.add_member("set", f"m{n}", ttl_s=1.0)
    now[0] += SWEEP_EVERY_S + 1
    await store.create("last", b"x", ttl_s=1.0)
    assert store.size() == {"records": 1, "logs": 0, "leases": 0, "members": 0}


async def test_the_keeper_renews_what_it_keeps_and_tells_when_a_claim_is_lost() -> None:
    store = MemoryStore()
    keeper = LeaseKeeper(store, ttl_s=0.15)
    lost = asyncio.Event()
    lease = await store.acquire("name", "me", ttl_s=0.15)
    assert lease is not None
    keeper.keep(lease, lost.set)
    await asyncio.sleep(0.5)
    assert await store.acquire("name", "you", ttl_s=LONG_S) is None
    await store.release(lease)
    await store.acquire("name", "you", ttl_s=LONG_S)
    await asyncio.wait_for(lost.wait(), SOON_S)
    await keeper.close()


def test_an_unknown_kind_of_store_is_a_configuration_error() -> None:
    settings = Settings.model_validate({"store": {"url": "tape://0"}})
    with pytest.raises(ConfigurationError, match="'tape'"):
        open_store(LoadedSettings(settings, {"store.url": "mesh.yaml"}))
