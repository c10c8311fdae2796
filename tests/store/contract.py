"""What every store must do. A store's test module subclasses `StoreContract` and offers the `store` fixture.

Times are short and real, because a store's own clock decides; the fixture `ttl_s` is how long a short-lived
thing lives in this store.
"""

import asyncio
from itertools import pairwise

import pytest

from shared.errors import FencedError, VersionConflictError
from shared.ports.store import Store

SOON_S = 10.0
LONG_S = 60.0


class StoreContract:
    @pytest.fixture
    def ttl_s(self) -> float:
        return 0.2

    async def test_a_record_is_read_as_it_was_written(self, store: Store) -> None:
        assert await store.get("k") is None
        record = await store.create("k", b"\x00value\xff", ttl_s=LONG_S)
        assert record is not None
        assert await store.get("k") == record
        assert record.value == b"\x00value\xff"

    async def test_a_record_is_created_once(self, store: Store) -> None:
        assert await store.create("k", b"1", ttl_s=LONG_S) is not None
        assert await store.create("k", b"2", ttl_s=LONG_S) is None
        created = await asyncio.gather(*(store.create("other", b"%d" % n, ttl_s=LONG_S) for n in range(20)))
        assert sum(record is not None for record in created) == 1

    async def test_versions_grow_with_every_write(self, store: Store) -> None:
        record = await store.create("k", b"0", ttl_s=LONG_S)
        assert record is not None
        versions = [record.version]
        for n in range(5):
            record = await store.replace("k", b"%d" % n, version=record.version, ttl_s=LONG_S)
            versions.append(record.version)
        assert all(before < after for before, after in pairwise(versions))
        assert versions[0] > 0

    async def test_a_write_that_expects_another_version_is_refused(self, store: Store) -> None:
        record = await store.create("k", b"1", ttl_s=LONG_S)
        assert record is not None
        await store.replace("k", b"2", version=record.version, ttl_s=LONG_S)
        with pytest.raises(VersionConflictError):
            await store.replace("k", b"3", version=record.version, ttl_s=LONG_S)
        with pytest.raises(VersionConflictError):
            await store.replace("absent", b"3", version=record.version, ttl_s=LONG_S)
        found = await store.get("k")
        assert found is not None
        assert found.value == b"2"

    async def test_of_many_writers_of_one_version_one_wins(self, store: Store) -> None:
        record = await store.create("k", b"", ttl_s=LONG_S)
        assert record is not None
        version = record.version

        async def write(n: int) -> bool:
            try:
                await store.replace("k", b"%d" % n, version=version, ttl_s=LONG_S)
            except VersionConflictError:
                return False
            return True

        assert sum(await asyncio.gather(*(write(n) for n in range(20)))) == 1

    async def test_a_deleted_record_is_gone_and_may_be_made_again_with_a_newer_version(self, store: Store) -> None:
        record = await store.create("k", b"1", ttl_s=LONG_S)
        assert record is not None
        with pytest.raises(VersionConflictError):
            await store.delete("k", version=record.version + 1000)
        assert await store.delete("k", version=record.version) is True
        assert await store.delete("k") is False
        assert await store.get("k") is None
        again = await store.create("k", b"2", ttl_s=LONG_S)
        assert again is not None
        assert again.version != record.version

    async def test_a_record_expires(self, store: Store, ttl_s: float) -> None:
        assert await store.create("k", b"1", ttl_s=ttl_s) is not None
        await asyncio.sleep(2 * ttl_s)
        assert await store.get("k") is None
        assert await store.create("k", b"2", ttl_s=LONG_S) is not None

    async def test_a_write_renews_the_records_life(self, store: Store, ttl_s: float) -> None:
        record = await store.create("k", b"1", ttl_s=ttl_s)
        assert record is not None
        await store.replace("k", b"2", version=record.version, ttl_s=LONG_S)
        await asyncio.sleep(2 * ttl_s)
        assert await store.get("k") is not None

    async def test_a_waiter_is_given_the_change(self, store: Store) -> None:
        record = await store.create("k", b"1", ttl_s=LONG_S)
        assert record is not None
        waiting = [
            asyncio.create_task(store.wait_for_change("k", version=record.version, timeout_s=SOON_S)) for _ in range(10)
        ]
        await asyncio.sleep(0)
        changed = await store.replace("k", b"2", version=record.version, ttl_s=LONG_S)
        assert await asyncio.gather(*waiting) == [changed] * 10

    async def test_a_waiter_sees_creation_and_deletion(self, store: Store) -> None:
        waiting = asyncio.create_task(store.wait_for_change("k", version=0, timeout_s=SOON_S))
        await asyncio.sleep(0)
        record = await store.create("k", b"1", ttl_s=LONG_S)
        assert record is not None
        assert await waiting == record
        waiting = asyncio.create_task(store.wait_for_change("k", version=record.version, timeout_s=SOON_S))
        await asyncio.sleep(0)
        await store.delete("k")
        assert await waiting is None

    async def test_a_change_that_came_before_the_wait_is_not_missed(self, store: Store) -> None:
        record = await store.create("k", b"1", ttl_s=LONG_S)
        assert record is not None
        changed = await store.replace("k", b"2", version=record.version, ttl_s=LONG_S)
        assert await store.wait_for_change("k", version=record.version, timeout_s=SOON_S) == changed

    async def test_a_wait_ends_with_the_unchanged_record(self, store: Store) -> None:
        record = await store.create("k", b"1", ttl_s=LONG_S)
        assert record is not None
        assert await store.wait_for_change("k", version=record.version, timeout_s=0.05) == record
        assert await store.wait_for_change("absent", version=0, timeout_s=0.05) is None

    async def test_a_lease_is_held_by_one_until_it_is_released(self, store: Store) -> None:
        mine = await store.acquire("name", "me", ttl_s=LONG_S)
        assert mine is not None
        assert await store.acquire("name", "you", ttl_s=LONG_S) is None
        await store.release(mine)
        await store.release(mine)
        yours = await store.acquire("name", "you", ttl_s=LONG_S)
        assert yours is not None
        assert yours.fence > mine.fence

    async def test_fences_grow_across_expiry_and_reacquisition(self, store: Store, ttl_s: float) -> None:
        fences = []
        for owner in ("a", "b", "b", "a"):
            lease = await store.acquire("name", owner, ttl_s=ttl_s)
            assert lease is not None
            fences.append(lease.fence)
            if owner != "b" or len(fences) == 3:
                await asyncio.sleep(2 * ttl_s)
        assert all(before < after for before, after in pairwise(fences))

    async def test_an_expired_owner_can_neither_write_nor_renew_nor_release(self, store: Store, ttl_s: float) -> None:
        record = await store.create("k", b"1", ttl_s=LONG_S)
        assert record is not None
        old = await store.acquire("name", "old", ttl_s=ttl_s)
        assert old is not None
        await asyncio.sleep(2 * ttl_s)
        with pytest.raises(FencedError):
            await store.replace("k", b"2", version=record.version, ttl_s=LONG_S, lease=old)
        new = await store.acquire("name", "new", ttl_s=LONG_S)
        assert new is not None
        for refused in (
            store.replace("k", b"2", version=record.version, ttl_s=LONG_S, lease=old),
            store.delete("k", lease=old),
            store.renew(old, ttl_s=LONG_S),
        ):
            with pytest.raises(FencedError):
                await refused
        await store.release(old)
        assert await store.acquire("name", "third", ttl_s=LONG_S) is None
        changed = await store.replace("k", b"2", version=record.version, ttl_s=LONG_S, lease=new)
        assert changed.value == b"2"

    async def test_an_owner_that_claims_again_fences_its_own_earlier_claim(self, store: Store) -> None:
        record = await store.create("k", b"1", ttl_s=LONG_S)
        assert record is not None
        first = await store.acquire("name", "me", ttl_s=LONG_S)
        second = await store.acquire("name", "me", ttl_s=LONG_S)
        assert first is not None
        assert second is not None
        with pytest.raises(FencedError):
            await store.replace("k", b"2", version=record.version, ttl_s=LONG_S, lease=first)
        await store.replace("k", b"2", version=record.version, ttl_s=LONG_S, lease=second)

    async def test_a_renewed_lease_lives_on(self, store: Store, ttl_s: float) -> None:
        lease = await store.acquire("name", "me", ttl_s=ttl_s)
        assert lease is not None
        await store.renew(lease, ttl_s=LONG_S)
        await asyncio.sleep(2 * ttl_s)
        assert await store.acquire("name", "you", ttl_s=LONG_S) is None

    async def test_places_are_given_in_order_of_arrival(self, store: Store) -> None:
        held = [await store.acquire("name", f"holder-{n}", ttl_s=LONG_S, places=2) for n in range(2)]
        order: list[int] = []

        async def queue(n: int) -> None:
            lease = await store.acquire("name", f"waiter-{n}", ttl_s=LONG_S, places=2, wait_s=SOON_S)
            assert lease is not None
            order.append(n)
            await store.release(lease)

        waiters = []
        for n in range(5):
            waiters.append(asyncio.create_task(queue(n)))
            await asyncio.sleep(0.02)
        assert order == []
        assert held[0] is not None
        await store.release(held[0])
        async with asyncio.timeout(SOON_S):
            await asyncio.gather(*waiters)
        assert order == [0, 1, 2, 3, 4]

    async def test_a_wait_for_a_place_ends(self, store: Store) -> None:
        assert await store.acquire("name", "me", ttl_s=LONG_S) is not None
        assert await store.acquire("name", "you", ttl_s=LONG_S, wait_s=0.1) is None

    async def test_a_cancelled_waiter_takes_no_place_and_blocks_nobody(self, store: Store) -> None:
        mine = await store.acquire("name", "me", ttl_s=LONG_S)
        assert mine is not None
        first = asyncio.create_task(store.acquire("name", "first", ttl_s=LONG_S, wait_s=SOON_S))
        await asyncio.sleep(0.02)
        second = asyncio.create_task(store.acquire("name", "second", ttl_s=LONG_S, wait_s=SOON_S))
        await asyncio.sleep(0.02)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await store.release(mine)
        lease = await asyncio.wait_for(second, SOON_S)
        assert lease is not None
        assert lease.owner == "second"

    async def test_a_waiter_takes_the_place_of_an_owner_that_expired(self, store: Store, ttl_s: float) -> None:
        assert await store.acquire("name", "dead", ttl_s=ttl_s) is not None
        lease = await asyncio.wait_for(store.acquire("name", "next", ttl_s=LONG_S, wait_s=SOON_S), SOON_S)
        assert lease is not None

    async def test_never_more_claims_than_places(self, store: Store) -> None:
        inside = most = 0

        async def enter(n: int) -> None:
            nonlocal inside, most
            lease = await store.acquire("name", f"owner-{n}", ttl_s=LONG_S, places=3, wait_s=SOON_S)
            assert lease is not None
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.001)
            inside -= 1
            await store.release(lease)

        async with asyncio.timeout(SOON_S):
            await asyncio.gather(*(enter(n) for n in range(40)))
        assert most == 3

    async def test_a_log_keeps_its_order(self, store: Store) -> None:
        assert await store.read_log("log") == []
        assert await store.append("log", [b"a", b"b"], ttl_s=LONG_S) == 2
        assert await store.append("log", [b"c"], ttl_s=LONG_S) == 3
        assert await store.read_log("log") == [b"a", b"b", b"c"]
        assert await store.read_log("log", 2) == [b"c"]
        assert await store.read_log("log", 3) == []

    async def test_a_log_expires(self, store: Store, ttl_s: float) -> None:
        await store.append("log", [b"a"], ttl_s=ttl_s)
        await asyncio.sleep(2 * ttl_s)
        assert await store.read_log("log") == []
        assert await store.append("log", [b"b"], ttl_s=LONG_S) == 1

    async def test_an_entry_is_in_the_log_for_whoever_wrote_the_record_or_its_writer_sees_the_record(
        self, store: Store
    ) -> None:
        first = await store.append_and_get("log:{k}", [b"first", b"second"], "shut:{k}", ttl_s=LONG_S)
        assert (first.length, first.record) == (2, None)

        async def enter(n: int) -> bytes | None:
            await asyncio.sleep(n * 0.0005)
            appended = await store.append_and_get("log:{k}", [b"%d" % n], "shut:{k}", ttl_s=LONG_S)
            return b"%d" % n if appended.record is None else None

        async def shut() -> list[bytes]:
            await asyncio.sleep(0.02)
            assert await store.create("shut:{k}", b"shut", ttl_s=LONG_S) is not None
            return await store.read_log("log:{k}")

        seen, *entered = await asyncio.gather(shut(), *(enter(n) for n in range(80)))
        assert isinstance(seen, list)
        missed = {entry for entry in entered if entry is not None} - set(seen)
        assert missed == set()
        late = await store.append_and_get("log:{k}", [b"late"], "shut:{k}", ttl_s=LONG_S)
        assert late.length == 2 + 80 + 1
        assert late.record == await store.get("shut:{k}")

    async def test_a_set_has_its_members_once(self, store: Store, ttl_s: float) -> None:
        assert await store.members("set") == set()
        for member in ("a", "b", "a"):
            await store.add_member("set", member, ttl_s=LONG_S)
        await store.add_member("set", "short", ttl_s=ttl_s)
        await store.remove_member("set", "b")
        await store.remove_member("set", "absent")
        await asyncio.sleep(2 * ttl_s)
        assert await store.members("set") == {"a"}

    async def test_it_answers_and_closes_twice(self, store: Store) -> None:
        await store.ping()
        await store.close()
        await store.close()
