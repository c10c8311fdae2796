"""The HTTP client: pooled, bounded, and repeating only what may be repeated."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson
import pytest

from shared.contracts.failure import FailureKind
from shared.errors import ServiceError, TransportError
from shared.http.client import HttpClient
from shared.telemetry import current_key

SOON_S = 10.0
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nset-cookie: a=b; Path=/\r\nX-Thing: 1\r\n\r\nok"

Serve = Callable[[bytes, asyncio.StreamWriter, int], Awaitable[bool]]


class Peer:
    """Raw HTTP: `serve` is given each request's bytes and its number; False ends the connection."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self.requests: list[bytes] = []
        self.connections = 0
        self.readers: list[asyncio.StreamReader] = []
        self.connected = asyncio.Condition()
        self._handlers: set[asyncio.Task[None]] = set()

    async def end(self) -> None:
        """End all connections that are open still."""
        for handler in self._handlers:
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        try:
            await self._handle(reader, writer)
        finally:
            self._handlers.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.readers.append(reader)
        async with self.connected:
            self.connected.notify_all()
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            going = True
            while going:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]) if b"ontent-" in head else 0
                self.requests.append(head + await reader.readexactly(length))
                going = await self._serve(self.requests[-1], writer, len(self.requests))
                await writer.drain()


@contextlib.asynccontextmanager
async def peer(serve: Serve) -> AsyncIterator[tuple[Peer, str]]:
    served = Peer(serve)
    server = await asyncio.start_server(served.handle, "127.0.0.1", 0)
    try:
        yield served, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await served.end()


@pytest.fixture
async def client() -> AsyncIterator[HttpClient]:
    client = HttpClient("mesh-token")
    yield client
    await client.close()


async def answer(_request: bytes, writer: asyncio.StreamWriter, _number: int) -> bool:
    writer.write(OK)
    return True


async def test_a_call_carries_token_key_trace_and_deadline_and_reuses_its_connection(client: HttpClient) -> None:
    current_key.set("r1-a2")
    async with peer(answer) as (served, url):
        for _ in range(3):
            reply = await client.request("POST", url, service="peer", timeout_s=SOON_S, body=b"{}", cookies={"c": "1"})
        assert (reply.status, reply.body, reply.cookies) == (200, b"ok", {"a": "b"})
        assert reply.headers["x-thing"] == "1"
        assert served.connections == 1
        head = served.requests[0].decode().lower()
        assert "authorization: bearer mesh-token" in head
        assert "x-paddock-key: r1-a2" in head
        assert "x-paddock-deadline: 10.0" in head
        assert "traceparent: 00-" in head
        assert "cookie: c=1" in head


@pytest.mark.parametrize("replayable", [True, False])
async def test_a_lost_answer_is_asked_for_again_only_where_the_peer_replays_it(
    client: HttpClient, replayable: bool
) -> None:
    async def drop_first(_request: bytes, writer: asyncio.StreamWriter, number: int) -> bool:
        if number > 1:
            writer.write(OK)
        return number > 1

    async with peer(drop_first) as (served, url):
        call = client.request("POST", url, service="peer", timeout_s=SOON_S, body=b"{}", replayable=replayable)
        if replayable:
            assert (await call).body == b"ok"
            assert len(served.requests) == 2
            assert served.requests[0].split(b"\r\n\r\n")[1] == served.requests[1].split(b"\r\n\r\n")[1]
        else:
            with pytest.raises(TransportError) as caught:
                await call
            assert caught.value.kind is FailureKind.TRANSPORT_PEER_DROP
            assert caught.value.sent is True
            assert len(served.requests) == 1


async def test_a_server_that_ends_idle_connections_costs_no_call(client: HttpClient) -> None:
    async def answer_and_end_soon(_request: bytes, writer: asyncio.StreamWriter, _number: int) -> bool:
        writer.write(OK)
        asyncio.get_running_loop().call_later(0.02, writer.close)
        return True

    async with peer(answer_and_end_soon) as (served, url):
        for _ in range(50):
            reply = await client.request("POST", url, service="peer", timeout_s=SOON_S, body=b"{}", replayable=True)
            assert reply.body == b"ok"
            await asyncio.sleep(0.02)
        assert served.connections > 1


async def test_a_refused_connection_is_tried_again_and_then_told(client: HttpClient) -> None:
    with pytest.raises(TransportError) as caught:
        await client.request("POST", "http://127.0.0.1:9/", service="agent", timeout_s=SOON_S, body=b"{}")
    assert caught.value.kind is FailureKind.TRANSPORT_UNREACHABLE
    assert caught.value.sent is False
    assert "agent cannot be reached" in caught.value.message


async def test_a_server_that_comes_up_meanwhile_is_reached(client: HttpClient) -> None:
    async with peer(answer) as (_, url):
        port = int(url.rpartition(":")[2])
    call = asyncio.create_task(client.request("POST", url, service="peer", timeout_s=SOON_S, body=b"{}"))
    await asyncio.sleep(0.02)
    served = Peer(answer)
    server = await asyncio.start_server(served.handle, "127.0.0.1", port)
    assert (await call).body == b"ok"
    server.close()
    await served.end()


async def test_a_hanging_peer_is_a_timeout_and_not_repeated(client: HttpClient) -> None:
    async def hang(_request: bytes, _writer: asyncio.StreamWriter, _number: int) -> bool:
        await asyncio.sleep(SOON_S)
        return False

    async with peer(hang) as (served, url):
        with pytest.raises(TransportError) as caught:
            await client.request("POST", url, service="peer", timeout_s=0.2, body=b"{}", replayable=True)
        assert caught.value.kind is FailureKind.TRANSPORT_TIMEOUT
        assert len(served.requests) == 1


async def test_an_error_status_is_raised_with_what_the_peer_said(client: HttpClient) -> None:
    async def busy(_request: bytes, writer: asyncio.StreamWriter, _number: int) -> bool:
        writer.write(b"HTTP/1.1 503 Busy\r\nretry-after: 7\r\ncontent-length: 4\r\n\r\nbusy")
        return True

    async with peer(busy) as (_, url):
        with pytest.raises(ServiceError) as caught:
            await client.request("GET", url, service="peer", timeout_s=SOON_S)
        assert caught.value.status == 503
        assert caught.value.retry_after_s == 7
        assert caught.value.origin is not None
        assert caught.value.origin.body_excerpt == "busy"


@pytest.mark.parametrize("origin", [None, "store"])
async def test_a_refusal_is_asked_again_when_it_is_the_peers_own_and_not_one_that_it_met(
    client: HttpClient, origin: str | None
) -> None:
    failure: dict[str, Any] = {"failure_kind": "persistence_failed", "terminal": False}
    body = orjson.dumps({"failure": failure | ({"origin": {"service": origin, "status": 503}} if origin else {})})

    async def refuse_first(_request: bytes, writer: asyncio.StreamWriter, number: int) -> bool:
        refusal = b"HTTP/1.1 503 Away\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        writer.write(refusal if number == 1 else OK)
        return True

    async with peer(refuse_first) as (served, url):
        call = client.request("POST", url, service="peer", timeout_s=SOON_S, body=b"{}", replayable=True)
        if origin is None:
            assert (await call).body == b"ok"
        else:
            with pytest.raises(ServiceError) as caught:
                await call
            assert caught.value.kind is FailureKind.PERSISTENCE_FAILED
        assert len(served.requests) == (2 if origin is None else 1)


@pytest.mark.parametrize("replayable", [True, False])
async def test_what_a_balancer_could_send_to_no_server_is_sent_again(client: HttpClient, replayable: bool) -> None:
    body = b'{"failure":{"failure_kind":"transport_unreachable","terminal":false}}'

    async def no_server_at_first(_request: bytes, writer: asyncio.StreamWriter, number: int) -> bool:
        refusal = b"HTTP/1.1 503 Away\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        writer.write(refusal if number == 1 else OK)
        return True

    async with peer(no_server_at_first) as (served, url):
        call = client.request("POST", url, service="peer", timeout_s=SOON_S, body=b"{}", replayable=replayable)
        assert (await call).body == b"ok"
        assert len(served.requests) == 2


async def test_a_body_that_ends_too_early_is_a_dropped_connection(client: HttpClient) -> None:
    async def half(_request: bytes, writer: asyncio.StreamWriter, _number: int) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")
        return False

    async with peer(half) as (_, url):
        with pytest.raises(TransportError) as caught:
            await client.request("GET", url, service="peer", timeout_s=SOON_S)
        assert caught.value.kind is FailureKind.TRANSPORT_PEER_DROP


async def test_a_large_body_arrives_whole(client: HttpClient) -> None:
    body = bytes(range(256)) * 20_000
    async with peer(answer) as (served, url):
        await client.request("POST", url, service="peer", timeout_s=SOON_S, body=body)
        assert served.requests[0].endswith(body)


@pytest.mark.parametrize(
    ("answered", "stays_open"),
    [
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n4;x=y\r\ndefg\r\n0\r\n\r\n", True),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\nabcdefg", True),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nabcdefg", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\nconnection: close\r\n\r\nabcdefg", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 7\r\n\r\nabcdefg", False),
    ],
)
@pytest.mark.parametrize("piece_bytes", [1, 7, 10_000])
async def test_every_way_to_frame_an_answer_is_read(
    client: HttpClient, answered: bytes, stays_open: bool, piece_bytes: int
) -> None:
    async def in_pieces(_request: bytes, writer: asyncio.StreamWriter, _number: int) -> bool:
        for start in range(0, len(answered), piece_bytes):
            writer.write(answered[start : start + piece_bytes])
            await writer.drain()
            await asyncio.sleep(0)
        return stays_open

    async with peer(in_pieces) as (served, url):
        for _ in range(2):
            assert (await client.request("GET", url, service="peer", timeout_s=SOON_S)).body == b"abcdefg"
        assert served.connections == (1 if stays_open else 2)


@pytest.mark.parametrize("nonsense", [b"SSH-2.0-x\r\n", b"HTTP/1.1 abc\r\n\r\n", b"\x00\x01\x02"])
async def test_a_peer_that_speaks_no_http_is_a_dropped_connection(client: HttpClient, nonsense: bytes) -> None:
    async def babble(_request: bytes, writer: asyncio.StreamWriter, _number: int) -> bool:
        writer.write(nonsense)
        return False

    async with peer(babble) as (_, url):
        with pytest.raises(TransportError) as caught:
            await client.request("GET", url, service="peer", timeout_s=SOON_S)
        assert caught.value.kind is FailureKind.TRANSPORT_PEER_DROP


async def test_a_cancelled_call_ends_its_connection_and_spoils_no_other(client: HttpClient) -> None:
    ended, asked = asyncio.Event(), asyncio.Event()

    async def hang_first(_request: bytes, writer: asyncio.StreamWriter, number: int) -> bool:
        if number > 1:
            writer.write(OK)
            return True
        asked.set()
        with contextlib.suppress(ConnectionError):
            await served.readers[0].read()
        ended.set()
        return False

    async with peer(hang_first) as (served, url):
        call = asyncio.create_task(client.request("POST", url, service="peer", timeout_s=SOON_S, body=b"{}"))
        await asyncio.wait_for(asked.wait(), SOON_S)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await asyncio.wait_for(ended.wait(), SOON_S)
        assert (await client.request("POST", url, service="peer", timeout_s=SOON_S, body=b"{}")).body == b"ok"
        assert served.connections == 2


async def test_a_header_cannot_smuggle_another_request(client: HttpClient) -> None:
    async with peer(answer) as (served, url):
        with pytest.raises(ValueError, match="line end"):
            await client.request("GET", url, service="peer", timeout_s=SOON_S, headers={"X": "1\r\nY: 2"})
        assert served.requests == []


async def test_calls_at_once_use_a_connection_each(client: HttpClient) -> None:
    gate = asyncio.Event()

    async def wait(_request: bytes, writer: asyncio.StreamWriter, _number: int) -> bool:
        await gate.wait()
        writer.write(OK)
        return True

    async with peer(wait) as (served, url):
        calls = [asyncio.create_task(client.request("GET", url, service="peer", timeout_s=SOON_S)) for _ in range(20)]
        async with asyncio.timeout(SOON_S), served.connected:
            await served.connected.wait_for(lambda: served.connections == 20)
        gate.set()
        assert [reply.body for reply in await asyncio.gather(*calls)] == [b"ok"] * 20
