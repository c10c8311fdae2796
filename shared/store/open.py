"""Open the configured store. The Redis client is imported on first need only."""

import re
from typing import Final
from urllib.parse import SplitResult, urlsplit

from shared.errors import ConfigurationError, ConfigurationProblem
from shared.ports.store import Store
from shared.settings import LoadedSettings
from shared.store.memory import MemoryStore

_REDIS: Final = frozenset({"redis", "rediss", "unix"})
_UNREADABLE: Final = (
    "the address cannot be read. One looks like redis://127.0.0.1:6379/0; signs such as `/`, `#`, `@` or `[` in a"
    " password are percent-encoded, as in redis://:p%23ss@127.0.0.1:6379/0."
)


def open_store(loaded: LoadedSettings) -> Store:
    """The store of `store.url`. It connects on first use.

    Raises:
        ConfigurationError: there is no such kind of store, or the URL is none.
    """
    if problems := store_problems(loaded):
        raise ConfigurationError(problems)
    url = loaded.settings.store.url
    if urlsplit(url).scheme in _REDIS:
        from shared.store.redis import RedisStore

        return RedisStore(url)
    return MemoryStore()


def store_problems(loaded: LoadedSettings) -> list[ConfigurationProblem]:
    """What is wrong with `store.url`; empty when nothing is. The URL is not repeated: it may hold a password."""
    problem = _problem(loaded.settings.store.url)
    return [ConfigurationProblem(loaded.source_of("store.url"), "store.url", problem)] if problem else []


def _problem(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        valid_port = parts.port != 0
    except ValueError:  # brackets or a port that are none
        return _UNREADABLE
    if parts.scheme == "memory":
        return None
    if parts.scheme not in _REDIS:
        return f"there is no store of kind '{parts.scheme}'. Known: memory, redis, rediss, unix."
    if url.count("@") > 1 or parts.fragment or not valid_port:
        return _UNREADABLE
    return _socket_problem(parts) if parts.scheme == "unix" else _server_problem(parts)


def _socket_problem(parts: SplitResult) -> str | None:
    if len(parts.path) < 2 or parts.hostname or not re.fullmatch(r"(db=\d+)?", parts.query, re.ASCII):
        return "a Unix socket looks like unix:///run/redis/redis.sock, with ?db=1 for another database."
    return None


def _server_problem(parts: SplitResult) -> str | None:
    if not parts.hostname or parts.query:
        return f"{_UNREADABLE} It has no options behind a `?`."
    if not re.fullmatch(r"/?\d*", parts.path, re.ASCII):
        return "the database behind the last `/` is a number, as in redis://127.0.0.1:6379/0."
    return None
