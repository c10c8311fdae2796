"""The record of model calls by key: written here by all replicas, read by whoever holds the mesh token.

A capture opens with its first call. A call is in it before it is sent, so that none is forgotten with the
proxy that made it. Sealing refuses session tokens from then on; the mesh's own calls (a judge's) are recorded
on. Bodies are kept within two bounds and left out beyond them, the response last; every other fact of a call
is always kept. The bound per key counts what this process recorded, so with several replicas a capture may
hold up to that much from each.

How it lies in the store: one log per key (`capture_log.py`) and one record, its seal.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

import orjson

from services.model_proxy.capture_log import (
    Standing,
    assembled,
    begun_entry,
    bodies_size,
    call_entries,
    lost_entry,
    parts_in,
    void_entry,
)
from shared.deadline import Deadline
from shared.errors import StoreUnavailableError
from shared.ports.store import Store

_log = logging.getLogger(__name__)

CALL_BODIES_MAX_BYTES: Final = 2**20
CAPTURE_BODIES_MAX_BYTES: Final = 16 * 2**20
# A store that fails over is back by then; a finished answer that waits longer costs its caller more than asking again.
RECORD_WITHIN_S: Final = 30.0
# Many calls may wait at once, so they ask less and less often.
_FIRST_RETRY_S: Final = 0.1
_LONGEST_RETRY_S: Final = 2.0
# How long a seal waits for calls that other replicas have under way: they notice it within a second.
SETTLE_WITHIN_S: Final = 2.0
_FIRST_PAUSE_S: Final = 0.005
_LONGEST_PAUSE_S: Final = 0.1
# What is known of a key is forgotten when it was not used for so long, here: another replica may have sealed it.
_KNOWN_FOR_S: Final = 3600.0
_KNOWN_KEYS: Final = 20_000
# Larger captures are checked in a thread: parsing one would hold the event loop up.
_LOOP_MAX_BYTES: Final = 2**20


# A position behind all entries of any log.
END_OF_LOG: Final = 2**63


@dataclass(slots=True)
class _Known:
    """What this process has stored under one key, and how far it has read what all have."""

    used_at: float = 0.0
    refused: bool = False
    bytes: int = 0
    parts: set[str] = field(default_factory=set)
    standing: Standing = field(default_factory=Standing)


@dataclass(frozen=True, slots=True)
class Begun:
    """A call that is in the log, at `position`; `sealed`: the capture was sealed by then."""

    position: int
    sealed: bool


class Captures:
    """All calls raise `StoreUnavailableError` when the store cannot be reached.

    `added` is told the bytes of every recorded call.
    """

    def __init__(
        self,
        store: Store,
        *,
        ttl_s: float,
        record_within_s: float = RECORD_WITHIN_S,
        added: Callable[[int], None] = lambda _bytes: None,
    ) -> None:
        self._store = store
        self._added = added
        self._ttl_s = ttl_s
        self._record_within_s = record_within_s
        self._known: OrderedDict[str, _Known] = OrderedDict()

    async def is_sealed(self, key: str) -> bool:
        return await self._store.get(_seal(key)) is not None

    async def sealed_within(self, key: str, timeout_s: float) -> bool:
        """Wait for a seal, by whichever replica; False when there is none in time."""
        return await self._store.wait_for_change(_seal(key), version=0, timeout_s=timeout_s) is not None

    async def begin(self, key: str, facts: dict[str, Any]) -> Begun:
        """Write down that a call begins. A seal either sees it or is seen by it; a call that is not made after
        all must be made `void`."""
        appended = await self._store.append_and_get(_log_name(key), [begun_entry(facts)], _seal(key), ttl_s=self._ttl_s)
        return Begun(appended.length - 1, appended.record is not None)

    def was_refused(self, key: str) -> bool:
        """Whether a call of the agent under this key was refused here."""
        known = self._known.get(key)
        return known is not None and known.refused

    def note_refusal(self, key: str) -> None:
        self._known_of(key).refused = True

    async def void(self, key: str, call_id: str) -> None:
        """The call that began was refused before anything was done; tried for a bounded time."""
        await self._append(key, [void_entry(call_id)])

    async def append(self, key: str, facts: dict[str, Any], request: bytes | None, response: bytes | None) -> None:
        """Record how a call ended: `facts` are fields of `ModelCall`, the bodies JSON objects as they travelled.

        Tried for a bounded time.

        Raises:
            StoreUnavailableError: it is not recorded, or nobody knows whether it is.
        """
        known = self._known_of(key)
        room = min(CALL_BODIES_MAX_BYTES, CAPTURE_BODIES_MAX_BYTES - known.bytes)
        entries = call_entries(facts, request, response, room=room, stored=known.parts)
        known.bytes += bodies_size(entries)
        await self._append(key, entries)
        self._added(sum(map(len, entries)))
        known.parts |= parts_in(entries)

    async def close(self, key: str) -> None:
        """Refuse session tokens of this key from now on. Idempotent."""
        await self._store.create(_seal(key), b"sealed", ttl_s=self._ttl_s)
        self._known.pop(key, None)

    async def settled(self, key: str, *, bodies: bool = True) -> bytes:
        """A closed capture as `read` gives it, once the agent's calls are recorded that began anywhere.

        Those that are not in a bounded time are declared lost, so that nobody waits for them again.
        """
        deadline = Deadline.after(SETTLE_WITHIN_S)
        standing, pause_s = Standing(), _FIRST_PAUSE_S
        entries = await self._store.read_log(_log_name(key))
        standing.take(0, entries)
        while (missing := standing.open_calls()) and not deadline.passed:
            await asyncio.sleep(deadline.within(pause_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            more = await self._store.read_log(_log_name(key), len(entries))
            standing.take(len(entries), more)
            entries += more
        if missing:
            lost = [lost_entry(call_id) for call_id in missing]
            await self._store.append(_log_name(key), lost, ttl_s=self._ttl_s)
            entries += lost
            _log.warning("model calls were begun and never recorded", extra={"calls": missing})
        return await _as_json(key, True, entries, bodies)

    async def read(self, key: str, *, bodies: bool = True) -> bytes:
        """A `Capture` as JSON; without `bodies` its calls have neither request nor response."""
        sealed = await self.is_sealed(key)
        return await _as_json(key, sealed, await self._store.read_log(_log_name(key)), bodies)

    async def export(self, key: str) -> bytes:
        """The recorded calls as JSON lines, each a `ModelCall`; what the `replay` upstream plays back."""
        capture = orjson.loads(await self.read(key))
        return b"".join(orjson.dumps(call) + b"\n" for call in capture["calls"] if call.get("ended_at") is not None)

    async def spent(self, key: str, before: int) -> tuple[int, int]:
        """How many calls the agent began under this key before that position of its log, and the output tokens
        of all that have ended, as far as they are known."""
        standing = self._known_of(key).standing
        start = standing.seen
        standing.take(start, await self._store.read_log(_log_name(key), start))
        return standing.begun_before(before), standing.output_tokens

    async def _append(self, key: str, entries: list[bytes]) -> None:
        deadline, pause_s = Deadline.after(self._record_within_s), _FIRST_RETRY_S
        while True:
            try:
                await self._store.append(_log_name(key), entries, ttl_s=self._ttl_s)
            except StoreUnavailableError:
                if deadline.left_s <= pause_s:
                    raise
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_RETRY_S)
            else:
                return

    def _known_of(self, key: str) -> _Known:
        known = self._known.setdefault(key, _Known())
        self._known.move_to_end(key)
        known.used_at = monotonic()
        while self._is_to_go(next(iter(self._known.values())), known.used_at):
            self._known.popitem(last=False)
        return known

    def _is_to_go(self, oldest: _Known, now: float) -> bool:
        return len(self._known) > _KNOWN_KEYS or oldest.used_at < now - _KNOWN_FOR_S


async def _as_json(key: str, sealed: bool, entries: list[bytes], bodies: bool) -> bytes:
    if sum(map(len, entries)) > _LOOP_MAX_BYTES:
        return await asyncio.to_thread(assembled, key, sealed, entries, bodies=bodies)
    return assembled(key, sealed, entries, bodies=bodies)


def _log_name(key: str) -> str:
    return f"capture:{{{key}}}"


def _seal(key: str) -> str:
    return f"capture:{{{key}}}:seal"
