"""An episode's record as its owner writes it, and the names of what the store holds of an episode.

The braces make one episode's keys share a slot in a clustered store.
"""

import asyncio
from typing import Final

from services.environment.record import EpisodeRecord, decoded
from services.environment.rows import Row
from shared.deadline import Deadline
from shared.errors import FencedError, StoreUnavailableError, VersionConflictError
from shared.ports.store import Lease, Store

OPEN: Final = "episodes:open"
"""Set of the keys of episodes that have not ended: where a server looks for what another one left behind."""
DONE: Final = "episodes:done"
STORE_PATIENCE_S: Final = 600.0
"""How long an owner waits for a store that is away; then whoever finds the record continues the episode."""
STORE_PAUSE_S: Final = 1.0


class Page:
    """The owner's hand on an episode's record: every write is a compare-and-set under the owner's lease."""

    def __init__(
        self, store: Store, record: EpisodeRecord, version: int, lease: Lease, *, ttl_s: float, lease_s: float
    ) -> None:
        self.record = record
        self.lease = lease
        self._store = store
        self._version = version
        self._ttl_s = ttl_s
        self._lease_s = lease_s

    async def open(self, row: Row) -> None:
        """As `open_episode`: the store has lost it, perhaps."""
        await open_episode(self._store, row, ttl_s=self._ttl_s)

    async def turn(self, record: EpisodeRecord, *, ttl_s: float | None = None) -> None:
        """Write the record; waits while the store is away.

        Raises:
            FencedError: the episode is another server's now: this one may do nothing more.
            StoreUnavailableError: the store stayed away.
        """
        patience = Deadline.after(STORE_PATIENCE_S)
        written = False
        while not written:
            try:
                written = await self._write(record, self._ttl_s if ttl_s is None else ttl_s)
            except StoreUnavailableError:
                if patience.passed:
                    raise
                await asyncio.sleep(STORE_PAUSE_S)
        self.record = record

    async def _write(self, record: EpisodeRecord, ttl_s: float) -> bool:
        key = episode_key(record.key)
        try:
            stored = await self._store.replace(
                key, record.encoded(), version=self._version, ttl_s=ttl_s, lease=self.lease
            )
        except VersionConflictError:
            await self._find()
            return False
        except FencedError:
            await self.reclaim()
            return False
        self._version = stored.version
        return True

    async def reclaim(self) -> None:
        """Claim the episode again after the lease ran out, perhaps unnoticed by others.

        Raises:
            FencedError: another server has claimed it.
        """
        lease = await self._store.acquire(self.lease.name, self.lease.owner, ttl_s=self._lease_s)
        if lease is None:
            raise FencedError(f"The episode '{self.record.key}' is claimed by another server.")
        self.lease = lease
        await self._find()

    async def _find(self) -> None:
        """The version to build on: an earlier write whose answer was lost, or a store that lost some of them."""
        key = episode_key(self.record.key)
        found = await self._store.get(key)
        if found is None:
            # What this server knows is all there is.
            found = await self._store.create(key, self.record.encoded(), ttl_s=self._ttl_s)
        elif decoded(found.value).owner != self.record.owner:
            raise FencedError(f"The episode '{self.record.key}' is run by another server now.")
        self._version = 0 if found is None else found.version


async def open_episode(store: Store, row: Row, *, ttl_s: float) -> None:
    """Let every server find the episode, and its row, should the one that runs it die. Idempotent."""
    key = row.episode_id.key
    await asyncio.gather(
        store.create(row_key(key), row.encoded(), ttl_s=ttl_s),
        store.add_member(OPEN, key, ttl_s=ttl_s),
    )


def episode_key(key: str) -> str:
    return f"episode:{{{key}}}"


def row_key(key: str) -> str:
    """The row, as long as the episode runs: a server that takes it over needs it."""
    return f"episode:{{{key}}}:row"


def promise_key(key: str) -> str:
    """There when someone was told that the episode goes on."""
    return f"episode:{{{key}}}:promised"


def cancel_key(key: str) -> str:
    """There when the episode is to be cancelled."""
    return f"episode:{{{key}}}:cancel"
