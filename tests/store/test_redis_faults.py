"""The Redis store when Redis is away, ill, or wrongly named; a test here has a server of its own."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.doctor import examine
from shared.errors import ConfigurationError, StoreUnavailableError
from shared.ports.store import Store
from shared.settings import LoadedSettings, Settings
from shared.store.open import open_store
from shared.store.redis import RedisStore
from shared.store.redis_connection import ANSWER_TIMEOUT_S, CONNECT_TIMEOUT_S
from tests.serving import free_port
from tests.store.contract import LONG_S, SOON_S
from tests.store.redis_server import RedisServer

PASSWORD = "p#ss/w[rd:1"
ENCODED = "p%23ss%2Fw%5Brd%3A1"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


@pytest.fixture
async def store(server: RedisServer) -> AsyncIterator[RedisStore]:
    store = RedisStore(server.url)
    yield store
    await store.close()


def _open(url: str) -> Store:
    return open_store(LoadedSettings(Settings.model_validate({"store": {"url": url}}), {"store.url": "mesh.yaml"}))


@pytest.mark.redis
async def test_redis_goes_away_and_comes_back_with_all_that_it_held(server: RedisServer, store: RedisStore) -> None:
    record = await store.create("k", b"1", ttl_s=LONG_S)
    lease = await store.acquire("name", "me", ttl_s=LONG_S)
    await store.append("log", [b"a"], ttl_s=LONG_S)
    await store.add_member("set", "m", ttl_s=LONG_S)
    assert record is not None
    assert lease is not None
    waiting = asyncio.create_task(store.wait_for_change("k", version=record.version, timeout_s=LONG_S))
    queueing = asyncio.create_task(store.acquire("name", "you", ttl_s=LONG_S, wait_s=LONG_S))
    await asyncio.sleep(0.1)
    await asyncio.gather(*(store.get("k") for _ in range(500)))
    await asyncio.to_thread(server.stop)
    for refused in (
        store.ping(),
        store.get("k"),
        store.create("other", b"", ttl_s=LONG_S),
        store.replace("k", b"2", version=record.version, ttl_s=LONG_S, lease=lease),
        store.renew(lease, ttl_s=LONG_S),
        store.release(lease),
        store.read_log("log"),
        store.members("set"),
        store.acquire("free", "me", ttl_s=LONG_S, wait_s=SOON_S),
        waiting,
        queueing,
    ):
        with pytest.raises(StoreUnavailableError) as told:
            await asyncio.wait_for(refused, SOON_S)
        assert told.value.retry_after_s
        assert str(server.port) in told.value.message
    await asyncio.to_thread(server.start)
    waiting = asyncio.create_task(store.wait_for_change("k", version=record.version, timeout_s=SOON_S))
    assert await store.get("k") == record
    assert await store.read_log("log") == [b"a"]
    assert await store.members("set") == {"m"}
    changed = await store.replace("k", b"2", version=record.version, ttl_s=LONG_S, lease=lease)
    assert await waiting == changed
    assert changed.version > record.version
    assert await store.acquire("name", "third", ttl_s=LONG_S) is None
    await store.release(lease)
    assert await store.acquire("name", "third", ttl_s=LONG_S, wait_s=SOON_S) is not None


@pytest.mark.redis
async def test_a_frozen_redis_is_unavailable_after_a_bounded_time(server: RedisServer, store: RedisStore) -> None:
    await store.create("k", b"1", ttl_s=LONG_S)
    server.signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(2 * ANSWER_TIMEOUT_S + CONNECT_TIMEOUT_S):
            with pytest.raises(StoreUnavailableError):
                await store.get("k")
    finally:
        server.signal(signal.SIGCONT)
    found = await store.get("k")
    assert found is not None
    assert found.value == b"1"


@pytest.mark.redis
@pytest.mark.parametrize(
    ("ill", "well"),
    [
        (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
        (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
    ],
    ids=["out of memory", "read only"],
)
async def test_a_redis_that_takes_no_writes_is_unavailable(
    server: RedisServer, store: RedisStore, ill: tuple[str, ...], well: tuple[str, ...]
) -> None:
    record = await store.create("k", b"1", ttl_s=LONG_S)
    lease = await store.acquire("name", "me", ttl_s=LONG_S)
    assert record is not None
    assert lease is not None
    server.ask(*ill)
    for refused in (
        store.replace("k", b"2", version=record.version, ttl_s=LONG_S, lease=lease),
        store.acquire("other", "me", ttl_s=LONG_S),
        store.append("log", [b"a"], ttl_s=LONG_S),
    ):
        with pytest.raises(StoreUnavailableError):
            await refused
    server.ask(*well)
    assert await store.get("k") == record
    await store.replace("k", b"2", version=record.version, ttl_s=LONG_S, lease=lease)


async def test_a_redis_that_still_loads_its_data_is_unavailable() -> None:
    left = asyncio.Event()

    async def load(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65_536):
            writer.write(b"-LOADING Redis is loading the dataset in memory\r\n")
        writer.close()
        left.set()

    server = await asyncio.start_server(load, "127.0.0.1", 0)
    store = RedisStore(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    with pytest.raises(StoreUnavailableError, match="loading"):
        await store.get("k")
    await store.close()
    async with asyncio.timeout(SOON_S):
        await left.wait()
    server.close()
    await server.wait_closed()


@pytest.mark.redis
async def test_a_password_is_used_and_never_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with RedisServer(tmp_path, password=PASSWORD) as server:
        right = _open(f"redis://:{ENCODED}@127.0.0.1:{server.port}/0")
        await right.ping()
        await right.close()
        by_socket = _open(f"unix://:{ENCODED}@{server.socket}")
        await by_socket.ping()
        await by_socket.close()
        for secret in ("", f":{ENCODED}x@"):
            wrong = _open(f"redis://{secret}127.0.0.1:{server.port}/0")
            with pytest.raises(StoreUnavailableError) as told:
                await wrong.ping()
            await wrong.close()
            assert not {PASSWORD, ENCODED} & set(told.value.message.split())
            assert PASSWORD not in told.value.message
            assert ENCODED not in told.value.message
    assert PASSWORD not in caplog.text
    assert ENCODED not in caplog.text


async def test_nobody_at_the_address_is_told_with_the_address_and_no_password() -> None:
    store = _open(f"redis://:{ENCODED}@127.0.0.1:{free_port()}/0")
    with pytest.raises(StoreUnavailableError, match=r"127\.0\.0\.1:\d+ cannot be used") as told:
        await store.ping()
    await store.close()
    assert ENCODED not in told.value.message
    assert PASSWORD not in told.value.message


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{PASSWORD}@127.0.0.1:6379/0",
        "redis://:secret@127.0.0.1:secret/0",
        "redis://:secret@127.0.0.1:6379/nought",
        "redis://:secret@127.0.0.1:6379/0?socket_timeout=secret",
        "redis://:a@secret@127.0.0.1:6379/0",
        "redis://127.0.0.1:0",
        "redis://",
        "unix://",
        "unix://secret@",
        "unix:///run/redis.sock?password=secret",
    ],
)
def test_a_wrong_address_is_a_configuration_error_without_the_password(url: str) -> None:
    with pytest.raises(ConfigurationError) as told:
        _open(url)
    assert "store.url" in str(told.value)
    assert "secret" not in str(told.value)
    assert "ss/w" not in str(told.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost",
        "redis://127.0.0.1:6379/",
        "rediss://user:p%40ss@redis.example:6380/3",
        "unix:///run/redis.sock",
        "unix://:secret@/run/redis.sock?db=2",
    ],
)
async def test_addresses_of_all_kinds_are_taken(url: str) -> None:
    await _open(url).close()


@pytest.mark.redis
def test_the_doctor_asks_the_store(server: RedisServer) -> None:
    def told(url: str) -> list[str]:
        lines: list[str] = []
        settings = Settings.model_validate({"store": {"url": url}})
        examine(lambda: LoadedSettings(settings, {}), lines.append)
        return [line for line in lines if "store" in line]

    (well,) = told(f"redis://:{ENCODED}@127.0.0.1:{free_port()}/0")
    assert well.startswith("WRONG")
    assert "cannot be used" in well
    assert ENCODED not in well
    (well,) = told(server.url)
    assert well.startswith("ok")
    assert f"redis://127.0.0.1:{server.port}/0 answers" in well
