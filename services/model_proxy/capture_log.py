"""The entries of a capture's log: how they are written and what they amount to. Does no I/O.

An entry's first byte tells its kind. A call has an entry when it begins, and one more when it ends: its facts,
with its bodies before them, or that it is void (refused before anything was done). A seal that waited for it
in vain declares it lost. Replicas write into one log, so entries of different calls lie between each other;
those that are appended together do not. What is written twice, since nobody knew whether it had been written,
is read once.

Facts and bodies lie apart, since the facts alone are wanted at every seal. What a long request is made of is
kept by its hash, once per key and process: a conversation repeats all of itself in every turn.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

import orjson
from pydantic import ValidationError

from shared.contracts.capture import ErrorCategory, ModelCall

# A shorter request is stored as it is: taking it apart would cost more than it saves.
_APART_FROM_BYTES: Final = 4096
_LISTS: Final = ("input", "messages", "tools")
# What is known of a call before it is sent; the facts of its end say the same and more.
_BEGUN_FACTS: Final = ("call_id", "phase", "session", "instance", "dialect", "model", "stream", "started_at")

_BEGUN, _CALL, _BODIES, _PART, _VOID, _LOST = b"o", b"c", b"b", b"p", b"v", b"l"
_HASH_BYTES: Final = 16
_HASH_CHARS: Final = 2 * _HASH_BYTES


def begun_entry(facts: dict[str, Any]) -> bytes:
    return _BEGUN + orjson.dumps({name: facts[name] for name in _BEGUN_FACTS})


def void_entry(call_id: str) -> bytes:
    return _VOID + call_id.encode()


def lost_entry(call_id: str) -> bytes:
    return _LOST + call_id.encode()


def call_entries(
    facts: dict[str, Any], request: bytes | None, response: bytes | None, *, room: int, stored: set[str]
) -> list[bytes]:
    """Entries of a call that has ended; bodies that need more than `room` bytes are left out, the response last.

    `stored`: hashes of the request's parts that lie in the log already.
    """
    left_out = []
    if response is not None and len(response) > room:
        response = None
        left_out.append("response")
    entries, refs = _taken_apart(request, stored) if request is not None else ([], None)
    size = sum(map(len, entries)) + len(refs or request or b"")
    if request is not None and size + len(response or b"") > room:
        request, refs, entries = None, None, []
        left_out.append("request")
    bodies = {"request": _fragment(refs or request), "apart": refs is not None, "response": _fragment(response)}
    entries.append(_BODIES + orjson.dumps(bodies))
    entries.append(_CALL + orjson.dumps({**facts, "left_out": left_out}))
    return entries


def bodies_size(entries: Iterable[bytes]) -> int:
    """How many bytes of bodies these entries hold."""
    return sum(len(entry) for entry in entries if entry[:1] in (_PART, _BODIES))


def parts_in(entries: Iterable[bytes]) -> set[str]:
    """Hashes of the parts of requests among these entries."""
    return {_hash_of(entry) for entry in entries if entry[:1] == _PART}


@dataclass(slots=True)
class Standing:
    """How the agent's calls stand, from a log that is read piece by piece; `seen` entries of it so far."""

    seen: int = 0
    _begun: dict[str, int] = field(default_factory=dict)
    _ended: set[str] = field(default_factory=set)
    _void: set[str] = field(default_factory=set)
    _output_tokens: dict[str, int] = field(default_factory=dict)

    def take(self, start: int, entries: Sequence[bytes]) -> None:
        """Entries from position `start` on; those that were seen before are passed over."""
        for position, entry in enumerate(entries[self.seen - start :], start=self.seen):
            kind = entry[:1]
            if kind in (_BEGUN, _CALL):
                self._take_facts(position, kind, entry[1:])
            elif kind in (_VOID, _LOST):
                (self._void if kind == _VOID else self._ended).add(_id_in(entry))
        self.seen = max(self.seen, start + len(entries))

    def open_calls(self) -> list[str]:
        """Calls that have begun, and of which nothing was heard since."""
        return [call_id for call_id in self._begun if call_id not in self._ended and call_id not in self._void]

    def begun_before(self, position: int) -> int:
        """How many calls, void ones left out, began before this position of the log."""
        return sum(begun < position and call_id not in self._void for call_id, begun in self._begun.items())

    @property
    def output_tokens(self) -> int:
        """Of all calls that have ended, as far as it is known."""
        return sum(self._output_tokens.values())

    def _take_facts(self, position: int, kind: bytes, text: bytes) -> None:
        try:
            facts = orjson.loads(text)
            call_id, of_agent = facts["call_id"], facts["phase"] == "agent"
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return  # whoever reads the capture is told of it
        if not of_agent:
            return
        self._begun.setdefault(call_id, position)
        if kind == _CALL:
            self._ended.add(call_id)
            self._output_tokens[call_id] = (facts.get("usage") or {}).get("output_tokens") or 0


class _Reading:
    """A whole log, read once; what does not read is counted, never dropped silently."""

    def __init__(self, with_bodies: bool) -> None:
        self.damaged = 0
        self._with_bodies = with_bodies
        self._begun: dict[str, bytes] = {}
        self._calls: dict[str, bytes] = {}
        self._void: set[str] = set()
        self._lost: set[str] = set()
        self._parts: dict[str, bytes] = {}
        self._bodies: bytes | None = None

    def take(self, entry: bytes) -> None:
        kind, rest = entry[:1], entry[1:]
        if kind == _PART:
            self._parts[_hash_of(entry)] = rest[_HASH_CHARS:]
        elif kind == _BODIES:
            self._bodies = rest
        elif kind == _VOID:
            self._void.add(_id_in(entry))
        elif kind == _LOST:
            self._lost.add(_id_in(entry))
        elif kind == _BEGUN:
            self._keep(rest, self._begun)
        elif kind == _CALL:
            self._keep(self._whole(rest), self._calls)
        else:
            self.damaged += 1

    def calls(self) -> list[bytes]:
        """Each call as JSON: in the order in which they ended, then those that have not."""
        open_calls = [call_id for call_id in self._begun if call_id not in self._calls and call_id not in self._void]
        return [*self._calls.values(), *map(self._unrecorded, open_calls)]

    def _keep(self, call: bytes, among: dict[str, bytes]) -> None:
        try:
            among.setdefault(ModelCall.model_validate_json(call).call_id, call)
        except ValidationError:
            self.damaged += 1

    def _whole(self, facts: bytes) -> bytes:
        """The call with its bodies, which lie before it; without them where they do not read."""
        bodies, self._bodies = self._bodies, None
        if bodies is None or not self._with_bodies:
            return facts
        try:
            return _with_bodies(facts, bodies, self._parts)
        except (orjson.JSONDecodeError, KeyError, TypeError):
            self.damaged += 1
            return facts

    def _unrecorded(self, call_id: str) -> bytes:
        begun = self._begun[call_id]
        if call_id not in self._lost:
            return begun
        facts = orjson.loads(begun)
        told = f"The model proxy '{facts['instance']}' made this call and did not record how it ended."
        return orjson.dumps({**facts, "error_category": ErrorCategory.LOST, "error_excerpt": told})


def assembled(key: str, sealed: bool, entries: Iterable[bytes], *, bodies: bool) -> bytes:
    """A `Capture` as JSON; without `bodies` its calls have neither request nor response."""
    reading = _Reading(bodies)
    for entry in entries:
        reading.take(entry)
    calls = [orjson.Fragment(call) for call in reading.calls()]
    return orjson.dumps({"key": key, "sealed": sealed, "calls": calls, "damaged": reading.damaged})


def _id_in(entry: bytes) -> str:
    return entry[1:].decode("utf-8", "replace")


def _hash_of(part: bytes) -> str:
    return part[1 : 1 + _HASH_CHARS].decode("latin-1")


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
