"""A Redis server for the tests of a module; each test finds it empty and leaves it running."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.redis_server import RedisServer


@pytest.fixture(scope="module")
def running_redis() -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as server:
        yield server


@pytest.fixture
def redis_server(running_redis: RedisServer) -> Iterator[RedisServer]:
    """Empty; every key that the test leaves must have a TTL."""
    running_redis.ask("FLUSHALL")
    yield running_redis
    assert running_redis.keys_without_ttl() == []
