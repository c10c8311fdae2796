"""What the Redis store runs inside Redis: names of keys and channels, and the scripts. Does no I/O.

Each script is atomic and takes its time from the server's clock, so replicas need not agree on theirs. It
touches keys of one hash slot only: `slot_key` keeps a name's own tag `{…}` and gives any other name one, so all
keys of one name lie together. A write under a lease therefore needs a record and a lease with one tag, such as
`episode:{key}` for both; with two tags it works on a single server, and a cluster refuses it.

A record is one string, `+VERSION VALUE`. A deleted one stays as `-VERSION ` for a while, so that the version of a
record that is made again is newer even when the clock was set back. Versions and fences are
max(previous + 1, microseconds of the clock). Lua counts in doubles, exact for microseconds until the year 2255.

A lease name has four keys: a hash (`newest`: the fence given last; `:OWNER`: "FENCE TOKEN" of its claim), and sorted
sets of the claims (owner by expiry), of the line (token by arrival) and of those in line who are alive (token by the
time until which they are). Every key has a TTL.
"""

import hashlib
import math
from functools import cache
from typing import Final

from shared.errors import FencedError, VersionConflictError
from shared.ports.store import Lease, Record

RECORD: Final = "paddock:record"
LOG: Final = "paddock:log"
SET: Final = "paddock:set"
LEASE_PARTS: Final = ("paddock:lease", "paddock:claims")
LINE_PARTS: Final = (*LEASE_PARTS, "paddock:line", "paddock:alive")
CHANGED: Final = "paddock:changed:"
TURN: Final = "paddock:turn:"

DELETED_KEPT_S: Final = 600
FENCE_KEPT_S: Final = 3600
"""How long the fence given last is remembered after its claim; later ones are newer by the clock alone."""

HEADER_BYTES: Final = 20
"""Longest header of a record: a sign, 16 digits or fewer, a space."""


def slot_key(kind: str, name: str) -> str:
    """The key that holds `kind` of `name`; a name without a hash tag becomes one as a whole."""
    start = name.find("{")
    tagged = start >= 0 and name.find("}", start) > start + 1
    # `=` keeps the tag from being empty, and a wrapped name from being equal to a name that carries its tag.
    return f"{kind}:{name}" if tagged else f"{kind}{{={name}}}"


def decoded(stored: bytes | None) -> Record | None:
    """The record that is stored; also of its header alone, for the version."""
    if not stored or stored[:1] != b"+":
        return None
    version, _, value = stored[1:].partition(b" ")
    return Record(value, int(version))


def keys_under(key: str, lease: Lease | None) -> tuple[list[str], list[str | int]]:
    """The keys of a write, and what shows the claim under which it is made."""
    if lease is None:
        return [slot_key(RECORD, key)], []
    keys = [slot_key(RECORD, key), *(slot_key(part, lease.name) for part in LEASE_PARTS)]
    return keys, [lease.owner, lease.fence]


@cache
def digest(script: str) -> str:
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()


def ms(seconds: float) -> int:
    return max(1, math.ceil(seconds * 1000))


def accepted(answer: int, key: str, lease: Lease | None) -> int:
    """What a script answered, unless it refused.

    Raises:
        VersionConflictError, FencedError: it refused.
    """
    if answer == -1:
        raise VersionConflictError(f"{key} has changed since it was read.")
    if answer == -2:
        name = lease.name if lease is not None else key
        raise FencedError(f"The claim on {name} was lost to a newer owner or has expired.")
    return answer


_CLOCK = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local function text(number) return string.format('%.0f', number) end
local function newer(previous) return math.max((tonumber(previous) or 0) + 1, now) end
local function keep(key, ms) if redis.call('PTTL', key) < ms then redis.call('PEXPIRE', key, text(ms)) end end
"""

_RECORDS = f"""
local function version_of(key)
  local sign, version = string.match(redis.call('GETRANGE', key, 0, {HEADER_BYTES - 1}), '^([+-])(%d+) ')
  return tonumber(version) or 0, sign == '+'
end
local function put(key, previous, value, ttl_ms, channel)
  local version = newer(previous)
  redis.call('SET', key, '+' .. text(version) .. ' ' .. value, 'PX', ttl_ms)
  redis.call('PUBLISH', channel, '')
  return version
end
"""

_CLAIMS = """
local function holds(lease, claims, owner, fence)
  local claim = redis.call('HGET', lease, ':' .. owner)
  local expiry = redis.call('ZSCORE', claims, owner)
  return claim and string.match(claim, '^%d+') == fence and expiry and tonumber(expiry) > now
end
local function wake(line, alive)
  for _, token in ipairs(redis.call('ZRANGEBYSCORE', alive, '-inf', text(now))) do
    redis.call('ZREM', alive, token)
    redis.call('ZREM', line, token)
  end
  local first = redis.call('ZRANGE', line, 0, 0)[1]
  if first then redis.call('PUBLISH', '@TURN@' .. first, '') end
  return first
end
""".replace("@TURN@", TURN)

CREATE = f"""{_CLOCK}{_RECORDS}
local previous, live = version_of(KEYS[1])
if live then return 0 end
return put(KEYS[1], previous, ARGV[1], ARGV[2], ARGV[3])
"""
"""record; value, ttl_ms, channel → version; 0 when it exists."""

REPLACE = f"""{_CLOCK}{_RECORDS}{_CLAIMS}
local version, live = version_of(KEYS[1])
if not live or text(version) ~= ARGV[4] then return -1 end
if KEYS[2] and not holds(KEYS[2], KEYS[3], ARGV[5], ARGV[6]) then return -2 end
return put(KEYS[1], version, ARGV[1], ARGV[2], ARGV[3])
"""
"""record[, lease, claims]; value, ttl_ms, channel, version[, owner, fence] → version; -1 conflict, -2 fenced."""

DELETE = f"""{_CLOCK}{_RECORDS}{_CLAIMS}
local version, live = version_of(KEYS[1])
if not live then return 0 end
if ARGV[2] ~= '' and text(version) ~= ARGV[2] then return -1 end
if KEYS[2] and not holds(KEYS[2], KEYS[3], ARGV[3], ARGV[4]) then return -2 end
redis.call('SET', KEYS[1], '-' .. text(newer(version)) .. ' ', 'PX', {DELETED_KEPT_S * 1000})
redis.call('PUBLISH', ARGV[1], '')
return 1
"""
"""record[, lease, claims]; channel, version or ''[, owner, fence] → 1; 0 when there was none, -1, -2 as above."""

ACQUIRE = f"""{_CLOCK}{_CLAIMS}
local lease, claims, line, alive = unpack(KEYS)
local owner, ttl_ms, places, token = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local waits_ms = tonumber(ARGV[5])
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', claims, '-inf', text(now))) do
  redis.call('ZREM', claims, gone)
  redis.call('HDEL', lease, ':' .. gone)
end
if redis.call('ZSCORE', alive, token) then redis.call('ZADD', alive, text(now + waits_ms * 1000), token) end
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', alive, '-inf', text(now))) do
  redis.call('ZREM', alive, gone)
  redis.call('ZREM', line, gone)
end
local first = redis.call('ZRANGE', line, 0, 0)[1]
local free = redis.call('ZCARD', claims) < places and (not first or first == token)
if free or redis.call('ZSCORE', claims, owner) then
  local fence = newer(redis.call('HGET', lease, 'newest'))
  redis.call('HSET', lease, 'newest', text(fence), ':' .. owner, text(fence) .. ' ' .. token)
  redis.call('ZADD', claims, text(now + ttl_ms * 1000), owner)
  redis.call('ZREM', line, token)
  redis.call('ZREM', alive, token)
  keep(lease, math.max(ttl_ms, {FENCE_KEPT_S * 1000}))
  keep(claims, ttl_ms)
  if redis.call('ZCARD', claims) < places then wake(line, alive) end
  return {{fence, 0}}
end
if waits_ms == 0 then return {{0, 0}} end
if not redis.call('ZSCORE', line, token) then
  local last = redis.call('ZRANGE', line, -1, -1, 'WITHSCORES')
  redis.call('ZADD', line, text(newer(last[2])), token)
  redis.call('ZADD', alive, text(now + waits_ms * 1000), token)
  first = first or token
end
keep(line, 2 * waits_ms)
keep(alive, 2 * waits_ms)
if first ~= token then return {{0, waits_ms}} end
local soonest = redis.call('ZRANGE', claims, 0, 0, 'WITHSCORES')
return {{0, math.ceil(math.max(0, (tonumber(soonest[2]) or now) - now) / 1000)}}
"""
"""lease, claims, line, alive; owner, ttl_ms, places, token, waits_ms (how long it counts as alive; 0: does not wait)
→ fence, or 0 and after how many ms a place may be free for it without a message."""

LEAVE = f"""{_CLOCK}{_CLAIMS}
local lease, claims, line, alive = unpack(KEYS)
redis.call('ZREM', line, ARGV[2])
redis.call('ZREM', alive, ARGV[2])
local claim = redis.call('HGET', lease, ':' .. ARGV[1])
if claim and string.match(claim, ' (.*)$') == ARGV[2] then
  redis.call('ZREM', claims, ARGV[1])
  redis.call('HDEL', lease, ':' .. ARGV[1])
end
wake(line, alive)
return 0
"""
"""lease, claims, line, alive; owner, token: out of the line, and back with a claim that was given meanwhile."""

RENEW = f"""{_CLOCK}{_CLAIMS}
if not holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2]) then return -2 end
redis.call('ZADD', KEYS[2], text(now + ARGV[3] * 1000), ARGV[1])
keep(KEYS[1], math.max(tonumber(ARGV[3]), {FENCE_KEPT_S * 1000}))
keep(KEYS[2], tonumber(ARGV[3]))
return 1
"""
"""lease, claims; owner, fence, ttl_ms → 1; -2 fenced."""

RELEASE = f"""{_CLOCK}{_CLAIMS}
if not holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2]) then return 0 end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[1], ':' .. ARGV[1])
wake(KEYS[3], KEYS[4])
return 1
"""
"""lease, claims, line, alive; owner, fence."""

_ADD = """
for n = 2, #ARGV do redis.call('RPUSH', KEYS[1], ARGV[n]) end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
"""

APPEND = f"""{_ADD}
return redis.call('LLEN', KEYS[1])
"""
"""log; ttl_ms, entries… → length."""

APPEND_AND_GET = f"""{_ADD}
return {{redis.call('LLEN', KEYS[1]), redis.call('GET', KEYS[2])}}
"""
"""log, record; ttl_ms, entries… → length, and the record as it is stored."""

ADD_MEMBER = f"""{_CLOCK}
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', text(now))
redis.call('ZADD', KEYS[1], text(now + ARGV[2] * 1000), ARGV[1])
keep(KEYS[1], tonumber(ARGV[2]))
return 1
"""
"""set; member, ttl_ms."""

MEMBERS = f"""{_CLOCK}
return redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. text(now), '+inf')
"""
"""set → members that are alive."""
