"""Keep claims alive: one timer per process renews all leases at a third of their life."""

import asyncio
import logging
from collections.abc import Callable

from shared.errors import FencedError, StoreUnavailableError
from shared.ports.store import Lease, Store

_log = logging.getLogger(__name__)


class LeaseKeeper:
    """Renews what it was given until it is told to stop. `lost` is called once when a claim was lost."""

    def __init__(self, store: Store, *, ttl_s: float) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._kept: dict[tuple[str, int], tuple[Lease, Callable[[], None]]] = {}
        self._timer: asyncio.Task[None] | None = None

    def keep(self, lease: Lease, lost: Callable[[], None]) -> None:
        self._kept[lease.name, lease.fence] = (lease, lost)
        if self._timer is None:
            self._timer = asyncio.create_task(self._renew_for_ever(), name="lease keeper")

    async def release(self, lease: Lease) -> None:
        """Stop renewing and give the claim up."""
        self._kept.pop((lease.name, lease.fence), None)
        await self._store.release(lease)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            await asyncio.gather(self._timer, return_exceptions=True)
            self._timer = None

    async def _renew_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            # At once: a store that batches sends one message for all.
            await asyncio.gather(*(self._renew(lease, lost) for lease, lost in list(self._kept.values())))

    async def _renew(self, lease: Lease, lost: Callable[[], None]) -> None:
        try:
            await self._store.renew(lease, ttl_s=self._ttl_s)
        except FencedError:
            if self._kept.pop((lease.name, lease.fence), None) is not None:
                _log.warning("lost the claim on %s", lease.name)
                lost()
        except StoreUnavailableError as error:
            _log.warning("cannot renew the claim on %s: %s", lease.name, error.message)
