"""A Redis server of a test's own: some tests here stop it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.redis_server import RedisServer


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "redis"
    folder.mkdir()
    with RedisServer(folder) as server:
        yield server
        assert server.keys_without_ttl() == []
