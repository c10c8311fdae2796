"""Where state lives. One port; `tests/store/contract.py` is the suite that every implementation passes.

A record is bytes with a version that grows with every write. A lease is a claim on a name with a
fencing number that only grows, also across expiry and loss of data: a write that carries an older
lease than the newest is refused, so an owner that was frozen and wakes up can change nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Record:
    value: bytes
    version: int


@dataclass(frozen=True, slots=True)
class Appended:
    """A log's new length, and a record as it was when the log had that length."""

    length: int
    record: Record | None


@dataclass(frozen=True, slots=True)
class Lease:
    """A claim on `name` until it expires; `fence` orders all claims on that name."""

    name: str
    owner: str
    fence: int


class Store(Protocol):
    """All calls raise `StoreUnavailableError` when the store cannot be reached. Times are in seconds."""

    outlives_process: bool
    """Whether another process finds what this one wrote, also after it has died."""

    async def ping(self) -> None:
        """Return when the store answers."""

    async def close(self) -> None:
        """End connections; idempotent."""

    async def get(self, key: str) -> Record | None: ...

    async def create(self, key: str, value: bytes, *, ttl_s: float) -> Record | None:
        """Write a record that does not exist yet; None when it exists."""

    async def replace(
        self, key: str, value: bytes, *, version: int, ttl_s: float, lease: Lease | None = None
    ) -> Record:
        """Compare-and-set.

        Raises:
            VersionConflictError: the record has another version, or is gone.
            FencedError: `lease` is not the newest claim on its name, or has expired.
        """

    async def delete(self, key: str, *, version: int | None = None, lease: Lease | None = None) -> bool:
        """Remove a record, if `version` is given only that version; False when there was none.

        Raises:
            VersionConflictError, FencedError: as for `replace`.
        """

    async def wait_for_change(self, key: str, *, version: int, timeout_s: float) -> Record | None:
        """Wait until the record's version differs from `version` (0: until it exists) or the time is over.

        Returns the record as it is then; None when it does not exist.
        """

    async def acquire(
        self, name: str, owner: str, *, ttl_s: float, places: int = 1, wait_s: float = 0.0
    ) -> Lease | None:
        """Claim one of `places` places of `name`, waiting up to `wait_s` in order of arrival; None when all are taken.

        An owner that already holds a live claim is given it again with a new, higher fence.
        """

    async def renew(self, lease: Lease, *, ttl_s: float) -> None:
        """Extend a live claim.

        Raises:
            FencedError: it expired or was taken over.
        """

    async def release(self, lease: Lease) -> None:
        """Give a claim up; does nothing when it is no longer the caller's."""

    async def append(self, key: str, entries: Sequence[bytes], *, ttl_s: float) -> int:
        """Add entries to the end of a log; returns its new length."""

    async def append_and_get(self, log: str, entries: Sequence[bytes], key: str, *, ttl_s: float) -> Appended:
        """Add entries to the end of a log and read a record, as one step that nobody else's comes between.

        So whoever writes the record and then reads the log finds all entries of those who did not find the
        record. Both names have the same hash tag.
        """

    async def read_log(self, key: str, start: int = 0) -> list[bytes]:
        """The entries of a log from `start` on; empty when there is none."""

    async def add_member(self, key: str, member: str, *, ttl_s: float) -> None:
        """Put a member into a set."""

    async def remove_member(self, key: str, member: str) -> None: ...

    async def members(self, key: str) -> set[str]: ...
