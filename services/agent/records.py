"""The session records in the store: read, create, change by compare-and-set.

What this process wrote last is remembered, so that its next change need not read it first. That is only a
hint: every change names the version that it builds on, and answers are never replayed from it.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from services.agent.record import AgentSession, record_key
from shared.metrics import Metrics
from shared.ports.store import Lease, Record, Store

# After its deadline a session is kept this long, so that a late close still finds it.
KEPT_AFTER_DEADLINE_S: Final = 3600.0
REMEMBERED: Final = 1024


@dataclass(frozen=True, slots=True)
class Found:
    """A record as it was at `version`."""

    session: AgentSession
    version: int


class Records:
    """`lease_s`: how long a claim on a record lives; it is renewed, and looked at, every `renew_s`."""

    def __init__(self, store: Store, clock: Callable[[], float], lease_s: float, metrics: Metrics) -> None:
        self.store = store
        self.lease_s = lease_s
        self.renew_s = lease_s / 3
        self._clock = clock
        self._metrics = metrics
        self._recent: OrderedDict[str, Found] = OrderedDict()

    async def read(self, session_id: str) -> Found | None:
        record = await self.store.get(record_key(session_id))
        return None if record is None else _found(record)

    async def read_or_recall(self, session_id: str) -> Found | None:
        """What was remembered, once; else what the store holds."""
        return self._recent.pop(session_id, None) or await self.read(session_id)

    def remember(self, found: Found) -> None:
        self._recent[found.session.session_id] = found
        if len(self._recent) > REMEMBERED:
            self._recent.popitem(last=False)

    def forget(self, session_id: str) -> None:
        self._recent.pop(session_id, None)

    async def create(self, session: AgentSession, *, ttl_s: float | None = None) -> Found | None:
        """None when there is one already."""
        record = await self.store.create(
            record_key(session.session_id), session.to_bytes(), ttl_s=self._ttl_s(session, ttl_s)
        )
        if record is None:
            return None
        self.count(session)
        return Found(session, record.version)

    async def change(
        self, found: Found, session: AgentSession, *, lease: Lease | None = None, ttl_s: float | None = None
    ) -> Found:
        """Write `session` in place of `found`.

        Raises:
            VersionConflictError: the record has changed meanwhile.
            FencedError: `lease` was lost.
        """
        record = await self.store.replace(
            record_key(session.session_id),
            session.to_bytes(),
            version=found.version,
            ttl_s=self._ttl_s(session, ttl_s),
            lease=lease,
        )
        if session.state is not found.session.state:
            self.count(session)
        return Found(session, record.version)

    async def delete(self, found: Found, *, lease: Lease | None = None) -> None:
        """Remove `found`; raises as `change` does."""
        await self.store.delete(record_key(found.session.session_id), version=found.version, lease=lease)

    async def wait_for_change(self, found: Found, *, timeout_s: float) -> Found | None:
        """The record as it is when it has changed or the time is over; None when it is gone."""
        record = await self.store.wait_for_change(
            record_key(found.session.session_id), version=found.version, timeout_s=timeout_s
        )
        return None if record is None else _found(record)

    async def claim(self, session_id: str, owner: str) -> Lease | None:
        """The lease on the record; None while another holds it."""
        return await self.store.acquire(record_key(session_id), owner, ttl_s=self.lease_s)

    def count(self, session: AgentSession) -> None:
        """It came into its state."""
        self._metrics.agent_sessions.labels(session.agent, session.state).inc()

    def _ttl_s(self, session: AgentSession, ttl_s: float | None) -> float:
        return ttl_s if ttl_s is not None else max(0.0, session.expires_at - self._clock()) + KEPT_AFTER_DEADLINE_S


def _found(record: Record) -> Found:
    return Found(AgentSession.from_bytes(record.value), record.version)
