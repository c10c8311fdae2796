"""An episode's record as its owner writes it, and the names of its keys in the store.

The braces make one episode's keys share a slot in a clustered store.
"""

from services.environment.record import EpisodeRecord
from shared.ports.store import Lease, Record, Store


class Page:
    """The owner's hand on an episode's record: every write is a compare-and-set under the owner's lease."""

    def __init__(self, store: Store, record: EpisodeRecord, stored: Record, ttl_s: float) -> None:
        self.record = record
        self.lease: Lease | None = None
        self._store = store
        self._version = stored.version
        self._ttl_s = ttl_s

    async def turn(self, record: EpisodeRecord, *, ttl_s: float | None = None) -> None:
        stored = await self._store.replace(
            episode_key(record.key),
            record.encoded(),
            version=self._version,
            ttl_s=self._ttl_s if ttl_s is None else ttl_s,
            lease=self.lease,
        )
        self.record, self._version = record, stored.version


def episode_key(key: str) -> str:
    return f"episode:{{{key}}}"


def promise_key(key: str) -> str:
    return f"episode:{{{key}}}:promised"
