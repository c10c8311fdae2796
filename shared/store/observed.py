"""A store whose operations are measured: how many, how they ended, how long they took.

It lies around the store itself, so that every implementation is measured alike; but not around the one of this
process, which is a dictionary: there the measurement would be most of what it measures.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

from shared.errors import FencedError, StoreUnavailableError, VersionConflictError
from shared.metrics import Metrics, StoreOutcome
from shared.ports.store import Appended, Lease, Record, Store

_T = TypeVar("_T")
_P = ParamSpec("_P")
_Asked = Coroutine[Any, Any, _T]


@runtime_checkable
class Batching(Protocol):
    """A store that sends several commands as one message implements this, too."""

    def tell_batches(self, told: Callable[[int], None]) -> None:
        """Call `told` with the number of commands of each message."""


def observed(store: Store, metrics: Metrics) -> Store:
    """The store, measured where it is a server's."""
    return ObservedStore(store, metrics) if store.outlives_process else store


class ObservedStore:
    """Implements `shared.ports.store.Store` with the store that it is given."""

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self.outlives_process = store.outlives_process
        self._store = store
        self._seconds = metrics.store_seconds
        if isinstance(store, Batching):
            store.tell_batches(metrics.store_batch_size.labels().observe)

    async def _timed(self, op: str, ask: Callable[_P, _Asked[_T]], *args: _P.args, **options: _P.kwargs) -> _T:
        began = time.perf_counter()
        outcome: StoreOutcome = "ok"
        try:
            return await ask(*args, **options)
        except BaseException as error:
            outcome = _outcome_of(error)
            raise
        finally:
            self._seconds.labels(op, outcome).observe(time.perf_counter() - began)

    async def ping(self) -> None:
        await self._store.ping()

    async def close(self) -> None:
        await self._store.close()

    def get(self, key: str) -> _Asked[Record | None]:
        return self._timed("get", self._store.get, key)

    def create(self, key: str, value: bytes, *, ttl_s: float) -> _Asked[Record | None]:
        return self._timed("create", self._store.create, key, value, ttl_s=ttl_s)

    def replace(
        self, key: str, value: bytes, *, version: int, ttl_s: float, lease: Lease | None = None
    ) -> _Asked[Record]:
        return self._timed("replace", self._store.replace, key, value, version=version, ttl_s=ttl_s, lease=lease)

    def delete(self, key: str, *, version: int | None = None, lease: Lease | None = None) -> _Asked[bool]:
        return self._timed("delete", self._store.delete, key, version=version, lease=lease)

    def wait_for_change(self, key: str, *, version: int, timeout_s: float) -> _Asked[Record | None]:
        return self._timed("wait_for_change", self._store.wait_for_change, key, version=version, timeout_s=timeout_s)

    def acquire(
        self, name: str, owner: str, *, ttl_s: float, places: int = 1, wait_s: float = 0.0
    ) -> _Asked[Lease | None]:
        return self._timed("acquire", self._store.acquire, name, owner, ttl_s=ttl_s, places=places, wait_s=wait_s)

    def renew(self, lease: Lease, *, ttl_s: float) -> _Asked[None]:
        return self._timed("renew", self._store.renew, lease, ttl_s=ttl_s)

    def release(self, lease: Lease) -> _Asked[None]:
        return self._timed("release", self._store.release, lease)

    def append(self, key: str, entries: Sequence[bytes], *, ttl_s: float) -> _Asked[int]:
        return self._timed("append", self._store.append, key, entries, ttl_s=ttl_s)

    def append_and_get(self, log: str, entries: Sequence[bytes], key: str, *, ttl_s: float) -> _Asked[Appended]:
        return self._timed("append_and_get", self._store.append_and_get, log, entries, key, ttl_s=ttl_s)

    def read_log(self, key: str, start: int = 0) -> _Asked[list[bytes]]:
        return self._timed("read_log", self._store.read_log, key, start)

    def add_member(self, key: str, member: str, *, ttl_s: float) -> _Asked[None]:
        return self._timed("add_member", self._store.add_member, key, member, ttl_s=ttl_s)

    def remove_member(self, key: str, member: str) -> _Asked[None]:
        return self._timed("remove_member", self._store.remove_member, key, member)

    def members(self, key: str) -> _Asked[set[str]]:
        return self._timed("members", self._store.members, key)


def _outcome_of(error: BaseException) -> StoreOutcome:
    if isinstance(error, VersionConflictError):
        return "conflict"
    if isinstance(error, FencedError):
        return "fenced"
    if isinstance(error, StoreUnavailableError):
        return "unavailable"
    return "cancelled" if isinstance(error, asyncio.CancelledError) else "error"
