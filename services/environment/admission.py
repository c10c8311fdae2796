"""How many episodes of an environment run at once; the others wait in order, for a bounded time."""

import time
from collections import Counter

from shared.errors import OverloadedError
from shared.metrics import Metrics
from shared.ports.store import Lease, Store
from shared.settings import EnvironmentSettings
from shared.store.leases import LeaseKeeper

RETRY_AFTER_S = 5.0


class Admission:
    """Places are leases in the store, so that all replicas share one limit."""

    def __init__(self, store: Store, keeper: LeaseKeeper, lease_s: float, metrics: Metrics) -> None:
        self._store = store
        self._keeper = keeper
        self._lease_s = lease_s
        self._metrics = metrics
        self._waiting: Counter[str] = Counter()

    async def enter(self, name: str, environment: EnvironmentSettings, key: str, *, admitted: bool) -> Lease | None:
        """Wait for a place; None where there is no limit. Who is cancelled while waiting takes no place.

        An episode that was `admitted` on another server takes its place along: it waits for none, and goes on
        over the limit when its place was given to another one meanwhile.

        Raises:
            OverloadedError: the queue is full, or the wait is over.
        """
        if environment.max_concurrent is None:
            return None
        if admitted:
            return await self._take_along(name, environment.max_concurrent, key)
        waiting = self._waiting[name]
        full = waiting >= environment.queue_size
        self._waiting[name] += 1
        queued, began, outcome = self._metrics.episodes_queued.labels(name), time.monotonic(), "cancelled"
        queued.inc()
        try:
            place = await self._store.acquire(
                f"admission:{name}",
                key,
                ttl_s=self._lease_s,
                places=environment.max_concurrent,
                wait_s=0.0 if full else environment.queue_timeout_s or 0.0,
            )
            outcome = "refused" if place is None else "admitted"
        finally:
            self._waiting[name] -= 1
            queued.dec()
            self._metrics.admission_wait_seconds.labels(name, outcome).observe(time.monotonic() - began)
        if place is None:
            why = (
                f"All {environment.max_concurrent} places of '{name}' are taken, and {waiting} episodes wait for"
                " admission already."
                if full
                else f"All {environment.max_concurrent} places of '{name}' stayed taken for"
                f" {environment.queue_timeout_s:g} s."
            )
            raise OverloadedError(why, retry_after_s=RETRY_AFTER_S)
        self._keeper.keep(place, lambda: None)
        return place

    async def _take_along(self, name: str, places: int, key: str) -> Lease | None:
        place = await self._store.acquire(f"admission:{name}", key, ttl_s=self._lease_s, places=places)
        if place is not None:
            self._keeper.keep(place, lambda: None)
        return place

    async def leave(self, place: Lease | None) -> None:
        """Give the place up; called only after the episode's cleanup."""
        if place is not None:
            await self._keeper.release(place)
