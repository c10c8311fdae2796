"""Keep claims alive: one timer per process renews all leases at a third of their life."""

import asyncio
import logging
from collections.abc import Callable
from contextvars import Context

from shared.errors import FencedError, StoreUnavailableError
from shared.metrics import Metrics
from shared.ports.store import Lease, Store

_log = logging.getLogger(__name__)


class LeaseKeeper:
    """Renews what it was given until it is told to stop. `lost` is called once when a claim was lost."""

    def __init__(self, store: Store, *, ttl_s: float, metrics: Metrics | None = None) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._metrics = Metrics() if metrics is None else metrics
        self._kept: dict[tuple[str, int], tuple[Lease, Callable[[], None]]] = {}
        self._timer: asyncio.Task[None] | None = None

    def keep(self, lease: Lease, lost: Callable[[], None]) -> None:
        self._kept[lease.name, lease.fence] = (lease, lost)
        self._metrics.leases_held.labels(kind_of(lease)).inc()
        if self._timer is None:
            # In a context of its own: it renews for all, not for the episode whose claim happens to be the first.
            self._timer = asyncio.create_task(self._renew_for_ever(), name="lease keeper", context=Context())

    async def release(self, lease: Lease) -> None:
        """Stop renewing and give the claim up."""
        self._drop(lease)
        await self._store.release(lease)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            await asyncio.gather(self._timer, return_exceptions=True)
            self._timer = None

    def _drop(self, lease: Lease) -> bool:
        """Keep it no longer; whether it was kept."""
        kept = self._kept.pop((lease.name, lease.fence), None) is not None
        if kept:
            self._metrics.leases_held.labels(kind_of(lease)).dec()
        return kept

    async def _renew_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            # At once: a store that batches sends one message for all.
            await asyncio.gather(*(self._renew(lease, lost) for lease, lost in list(self._kept.values())))

    async def _renew(self, lease: Lease, lost: Callable[[], None]) -> None:
        try:
            await self._store.renew(lease, ttl_s=self._ttl_s)
        except FencedError:
            if self._drop(lease):
                self._metrics.leases_lost.labels(kind_of(lease)).inc()
                _log.warning("lost the claim on %s", lease.name)
                lost()
        except StoreUnavailableError as error:
            self._metrics.lease_renew_failures.labels(kind_of(lease)).inc()
            _log.warning("cannot renew the claim on %s: %s", lease.name, error.message)


def kind_of(lease: Lease) -> str:
    """What the claim is on: the first word of its name."""
    return lease.name.partition(":")[0]
