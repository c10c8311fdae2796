"""The record of model calls by key: appended here, read by whoever holds the mesh token.

A capture opens with its first call. Sealing it refuses session tokens from then on; the mesh's own calls
(a judge's) are recorded on. Bodies are kept within two bounds and left out beyond them, the response
last; every other fact of a call is always kept. The bound per key counts what this process recorded, so
with several replicas a capture may hold up to that much from each.

How it lies in the store: one log per key, whose entries begin with what they are. Facts and bodies lie
apart, since the facts alone are wanted at every seal. What a long request is made of is kept by its hash,
once per key: a conversation repeats all of itself in every turn.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

import orjson
from pydantic import ValidationError

from shared.contracts.capture import ModelCall
from shared.ports.store import Store

CALL_BODIES_MAX_BYTES: Final = 2**20
CAPTURE_BODIES_MAX_BYTES: Final = 16 * 2**20
# Counters of keys that were used longest ago are forgotten first.
_COUNTED_KEYS: Final = 20_000
# Larger captures are checked in a thread: parsing one would hold the event loop up.
_LOOP_MAX_BYTES: Final = 2**20
# A shorter request is stored as it is: taking it apart would cost more than it saves.
_APART_FROM_BYTES: Final = 4096
_LISTS: Final = ("input", "messages", "tools")

_CALL, _BODIES, _PART = b"c", b"b", b"p"
_HASH_BYTES: Final = 16
_HASH_CHARS: Final = 2 * _HASH_BYTES


@dataclass(slots=True)
class _Kept:
    """What this process has stored under one key."""

    bytes: int = 0
    parts: set[str] = field(default_factory=set)


class Captures:
    def __init__(self, store: Store, *, ttl_s: float) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    async def is_sealed(self, key: str) -> bool:
        return await self._store.get(_seal(key)) is not None

    async def append(self, key: str, facts: dict[str, Any], request: bytes | None, response: bytes | None) -> None:
        """Record one call: `facts` are fields of `ModelCall`, the bodies JSON objects as they travelled.

        Raises:
            StoreUnavailableError: it is not recorded.
        """
        kept = self._kept_of(key)
        room = min(CALL_BODIES_MAX_BYTES, CAPTURE_BODIES_MAX_BYTES - kept.bytes)
        left_out = []
        if response is not None and len(response) > room:
            response = None
            left_out.append("response")
        entries, refs = _taken_apart(request, kept.parts) if request is not None else ([], None)
        size = sum(map(len, entries)) + len(refs or request or b"")
        if request is not None and size + len(response or b"") > room:
            request, refs, entries, size = None, None, [], 0
            left_out.append("request")
        kept.bytes += size + len(response or b"")
        kept.parts |= {entry[1 : 1 + _HASH_CHARS].decode() for entry in entries}
        bodies = {"request": _fragment(refs or request), "apart": refs is not None, "response": _fragment(response)}
        entries.append(_BODIES + orjson.dumps(bodies))
        entries.append(_CALL + orjson.dumps({**facts, "left_out": left_out}))
        await self._store.append(_log(key), entries, ttl_s=self._ttl_s)

    async def close(self, key: str) -> None:
        """Refuse session tokens of this key from now on. Idempotent."""
        await self._store.create(_seal(key), b"sealed", ttl_s=self._ttl_s)
        self._kept.pop(key, None)

    async def read(self, key: str, *, bodies: bool = True) -> bytes:
        """A `Capture` as JSON; without `bodies` its calls have neither request nor response."""
        sealed = await self.is_sealed(key)
        entries = await self._store.read_log(_log(key))
        if sum(map(len, entries)) > _LOOP_MAX_BYTES:
            return await asyncio.to_thread(_assembled, key, sealed, entries, bodies)
        return _assembled(key, sealed, entries, bodies)

    async def export(self, key: str) -> bytes:
        """The calls as JSON lines, each a `ModelCall`; what the `replay` upstream plays back."""
        capture = orjson.loads(await self.read(key))
        return b"".join(orjson.dumps(call) + b"\n" for call in capture["calls"])

    async def spent(self, key: str) -> tuple[int, int]:
        """How many calls the agent made under this key, and their output tokens as far as they are known."""
        calls = [orjson.loads(entry[1:]) for entry in await self._store.read_log(_log(key)) if entry[:1] == _CALL]
        usages = [call.get("usage") or {} for call in calls if call.get("phase") == "agent"]
        return len(usages), sum(usage.get("output_tokens") or 0 for usage in usages)

    def _kept_of(self, key: str) -> _Kept:
        kept = self._kept.setdefault(key, _Kept())
        self._kept.move_to_end(key)
        if len(self._kept) > _COUNTED_KEYS:
            self._kept.popitem(last=False)
        return kept


def _log(key: str) -> str:
    return f"capture:{{{key}}}"


def _seal(key: str) -> str:
    return f"capture:{{{key}}}:seal"


def _fragment(body: bytes | None) -> orjson.Fragment | None:
    return None if body is None else orjson.Fragment(body)


def _taken_apart(request: bytes, stored: set[str]) -> tuple[list[bytes], bytes | None]:
    """Entries for the parts that are not stored yet, and the request with hashes in their place.

    No entries and None where the request is stored as it is.
    """
    if len(request) < _APART_FROM_BYTES:
        return [], None
    parsed = orjson.loads(request)
    new: dict[str, bytes] = {}
    for name in _LISTS:
        if not isinstance(parsed.get(name), list):
            continue
        hashes = []
        for part in map(orjson.dumps, parsed[name]):
            name_of_part = blake2b(part, digest_size=_HASH_BYTES).hexdigest()
            hashes.append(name_of_part)
            if name_of_part not in stored:
                new[name_of_part] = part
        parsed[name] = hashes
    return [_PART + name.encode() + part for name, part in new.items()], orjson.dumps(parsed)


def _assembled(key: str, sealed: bool, entries: Iterable[bytes], with_bodies: bool) -> bytes:
    """Calls in the order in which they ended; what does not read is counted, never dropped silently."""
    calls: list[orjson.Fragment] = []
    parts: dict[str, bytes] = {}
    bodies: bytes | None = None
    damaged = 0
    for entry in entries:
        tag = entry[:1]
        if tag == _PART:
            parts[entry[1 : 1 + _HASH_CHARS].decode("latin-1")] = entry[1 + _HASH_CHARS :]
        elif tag == _BODIES:
            bodies = entry[1:]
        else:
            call = _call(entry, bodies if with_bodies else None, parts)
            bodies = None
            damaged += call is None
            calls += [] if call is None else [orjson.Fragment(call)]
    return orjson.dumps({"key": key, "sealed": sealed, "calls": calls, "damaged": damaged})


def _call(entry: bytes, bodies: bytes | None, parts: dict[str, bytes]) -> bytes | None:
    """One call as JSON; None when it does not read."""
    if entry[:1] != _CALL:
        return None
    try:
        call = entry[1:] if bodies is None else _with_bodies(entry[1:], bodies, parts)
        ModelCall.model_validate_json(call)
    except (ValidationError, orjson.JSONDecodeError, KeyError, TypeError):
        return None
    return call


def _with_bodies(facts: bytes, bodies: bytes, parts: dict[str, bytes]) -> bytes:
    told = orjson.loads(bodies)
    request = told["request"]
    if told["apart"]:
        request = {
            name: [orjson.Fragment(parts[part]) for part in value]
            if name in _LISTS and isinstance(value, list)
            else value
            for name, value in request.items()
        }
    return orjson.dumps({**orjson.loads(facts), "request": request, "response": told["response"]})
