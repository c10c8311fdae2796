"""The lean HTTP/1.1 client, against a server that writes exact bytes."""

import asyncio
import contextlib
import gzip
import zlib
from collections.abc import AsyncIterator

import pytest

from shared.http.http1 import Http1Client, Target
from shared.http.http1_reply import Http1Error, Http1Reply, Http1TimeoutError
from tests.model_proxy.wire import END, WAIT_S, Asked, Handler, RawUpstream, always, piece, raw_upstream, reply
from tests.serving import free_port

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@contextlib.asynccontextmanager
async def served(handler: Handler, *, keep_alive_s: float = 15.0) -> AsyncIterator[tuple[Http1Client, RawUpstream]]:
    client = Http1Client(connect_timeout_s=WAIT_S, keep_alive_s=keep_alive_s)
    async with raw_upstream(handler) as server:
        try:
            yield client, server
        finally:
            client.close()


async def send(
    client: Http1Client,
    url: str,
    body: bytes = b"{}",
    *,
    silence_s: float = WAIT_S,
    total_s: float = WAIT_S,
    fresh: bool = False,
) -> Http1Reply:
    target = Target.of("POST", url, {"x-one": "1"})
    return await client.send(target, body, silence_s=silence_s, total_s=total_s, fresh=fresh)


async def fetch(client: Http1Client, url: str, body: bytes = b"{}") -> bytes:
    answer = await send(client, url, body)
    return await answer.read()


async def test_a_request_and_its_answer_arrive_as_they_were_sent() -> None:
    async with served(always(reply(207, b"\x00\xff", ("X-Two", "zwei"), ("x-two", "2")))) as (client, server):
        answer = await send(client, f"{server.url}/p?q=1", b"\x01" * 200_000)
        assert (answer.status, answer.headers["x-two"], await answer.read()) == (207, "2", b"\x00\xff")
    asked = server.asked[0]
    assert (asked.method, asked.path, asked.body) == ("POST", "/v1/p?q=1", b"\x01" * 200_000)
    assert (asked.headers["x-one"], asked.headers["host"]) == ("1", server.url.split("/")[2])


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("with a length", reply(200, b"onetwo")),
        ("in chunks", CHUNKED + piece(b"one") + piece(b"two") + END),
        ("after an interim answer", b"HTTP/1.1 103 Early Hints\r\nX-Early: 1\r\n\r\n" + reply(200, b"onetwo")),
        ("deflated unasked", reply(200, gzip.compress(b"onetwo"), ("Content-Encoding", "gzip"))),
        ("deflated otherwise", reply(200, zlib.compress(b"onetwo"), ("Content-Encoding", "deflate"))),
    ],
)
async def test_bodies_of_every_form_are_read_and_the_connection_is_kept(name: str, answer: bytes) -> None:
    async with served(always(answer)) as (client, server):
        for _ in range(3):
            got = await send(client, server.url)
            assert "x-early" not in got.headers
            assert await got.read() == b"onetwo"
    assert [asked.connection for asked in server.asked] == [1, 1, 1]


async def test_a_body_without_a_length_ends_with_its_connection() -> None:
    async with served(always(b"HTTP/1.1 200 OK\r\n\r\none", b"two", then_close=True)) as (client, server):
        assert [await fetch(client, server.url) for _ in range(2)] == [b"onetwo"] * 2
    assert [asked.connection for asked in server.asked] == [1, 2]


async def test_a_server_that_says_close_is_not_used_again() -> None:
    async with served(always(reply(200, b"x", ("Connection", "close")))) as (client, server):
        assert [await fetch(client, server.url) for _ in range(2)] == [b"x"] * 2
    assert [asked.connection for asked in server.asked] == [1, 2]


async def test_many_requests_at_once_have_a_connection_each() -> None:
    all_there = asyncio.Event()

    async def handler(asked: Asked) -> None:
        if asked.connection == 5:
            all_there.set()
        await all_there.wait()
        await asked.write(reply(200, asked.body))

    async with served(handler) as (client, server):
        bodies = [b"%d" % number for number in range(5)]
        assert await asyncio.gather(*(fetch(client, server.url, body) for body in bodies)) == bodies
        assert await fetch(client, server.url, b"later") == b"later"
    assert {asked.connection for asked in server.asked} == {1, 2, 3, 4, 5}
    assert len(server.asked) == 6


async def test_pieces_come_as_they_arrive() -> None:
    go_on = asyncio.Event()

    async def handler(asked: Asked) -> None:
        await asked.write(CHUNKED + piece(b"one"))
        await go_on.wait()
        await asked.write(piece(b"two") + END)

    async with served(handler) as (client, server):
        answer = await send(client, server.url)
        assert await answer.next_piece() == b"one"
        go_on.set()
        assert [await answer.next_piece(), await answer.next_piece(), await answer.next_piece()] == [b"two", b"", b""]


async def test_idle_connections_are_closed_after_their_time() -> None:
    async with served(always(reply(200, b"x")), keep_alive_s=0.05) as (client, server):
        await fetch(client, server.url)
        async with asyncio.timeout(WAIT_S):
            await server.asked[0].gone.wait()
        await fetch(client, server.url)
    assert [asked.connection for asked in server.asked] == [1, 2]


async def test_bytes_that_nobody_asked_for_end_the_connection() -> None:
    async def handler(asked: Asked) -> None:
        await asked.write(reply(200, b"x"))
        if asked.connection == 1:
            await asked.write(reply(408, b"you are slow"))

    async with served(handler) as (client, server):
        assert await fetch(client, server.url) == b"x"
        async with asyncio.timeout(WAIT_S):
            await server.asked[0].gone.wait()
        assert await fetch(client, server.url) == b"x"
    assert [asked.connection for asked in server.asked] == [1, 2]


async def test_a_connection_that_ends_as_it_is_used_again_is_told_from_one_that_drops_a_first_request() -> None:
    async def handler(asked: Asked) -> None:
        if asked.nth_on_connection == 1 and asked.body != b"drop":
            await asked.write(reply(200, b"x"))
        else:
            asked.hang_up()

    async with served(handler) as (client, server):
        await fetch(client, server.url)
        with pytest.raises(Http1Error) as again:
            await send(client, server.url)
        with pytest.raises(Http1Error) as first:
            await send(client, server.url, b"drop")
        await fetch(client, server.url)
        assert (await (await send(client, server.url, fresh=True)).read()) == b"x"
    assert (again.value.connected, again.value.stale) == (True, True)
    assert (first.value.connected, first.value.stale) == (True, False)


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_server_that_is_not_there_was_sent_nothing(scheme: str) -> None:
    client = Http1Client(connect_timeout_s=WAIT_S, keep_alive_s=1)
    with pytest.raises(Http1Error) as refused:
        await send(client, f"{scheme}://127.0.0.1:{free_port()}/v1")
    assert not refused.value.connected


async def test_a_server_without_tls_was_sent_nothing() -> None:
    async with served(always(reply(400, b""))) as (client, server):
        with pytest.raises(Http1Error) as refused:
            await send(client, server.url.replace("http:", "https:"))
    assert not refused.value.connected
    assert server.asked == []


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("no http", b"SSH-2.0-OpenSSH_9.6\r\n\r\n"),
        ("headers too large", reply(200, b"", ("X-Long", "x" * 70_000))),
        ("an encoding that was not asked for", reply(200, b"x", ("Content-Encoding", "br"))),
        ("a broken deflated body", reply(200, b"no gzip", ("Content-Encoding", "gzip"))),
        ("a broken chunk", CHUNKED + b"zz\r\n"),
        ("an upgrade", b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"),
        ("a short body", reply(200, b"whole")[:-1]),
    ],
)
async def test_what_is_no_proper_answer_is_an_error(name: str, answer: bytes) -> None:
    async with served(always(answer, then_close=True)) as (client, server):
        with pytest.raises(Http1Error) as broken:
            await fetch(client, server.url)
    assert broken.value.connected


@pytest.mark.parametrize("parts", [b"", CHUNKED, CHUNKED + piece(b"x")])
async def test_silence_ends_a_request_in_every_phase(parts: bytes) -> None:
    async def handler(asked: Asked) -> None:
        await asked.write(parts)
        await asked.gone.wait()

    async with served(handler) as (client, server):
        with pytest.raises(Http1TimeoutError):
            await (await send(client, server.url, silence_s=0.1)).read()
        async with asyncio.timeout(WAIT_S):
            await server.asked[0].gone.wait()


async def test_an_answer_that_never_ends_is_bounded_in_all() -> None:
    async def handler(asked: Asked) -> None:
        await asked.write(CHUNKED)
        while not asked.gone.is_set():
            await asked.write(piece(b"x"))
            await asyncio.sleep(0.01)

    async with served(handler) as (client, server):
        with pytest.raises(Http1TimeoutError):
            await (await send(client, server.url, silence_s=0.2, total_s=0.3)).read()


async def test_a_reader_that_takes_its_time_slows_the_server_down_and_is_not_silence() -> None:
    megabytes, sent = 64, 0
    first = asyncio.Event()

    async def handler(asked: Asked) -> None:
        nonlocal sent
        await asked.write(CHUNKED)
        for _ in range(megabytes):
            await asked.write(piece(b"x" * 2**20))
            sent += 1
            first.set()
        await asked.write(END)

    async with served(handler) as (client, server):
        answer = await send(client, server.url, silence_s=0.2)
        await first.wait()
        await asyncio.sleep(0.5)
        assert sent < megabytes
        assert len(await answer.read()) == megabytes * 2**20


@pytest.mark.parametrize("parts", [b"", CHUNKED + piece(b"x")])
async def test_a_cancelled_request_closes_its_connection(parts: bytes) -> None:
    async def handler(asked: Asked) -> None:
        await asked.write(parts)
        await asked.gone.wait()

    async with served(handler) as (client, server):

        async def whole() -> None:
            answer = await send(client, server.url)
            try:
                await answer.read()
            finally:
                answer.close()

        task = asyncio.create_task(whole())
        async with asyncio.timeout(WAIT_S):
            await server.arrived.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await server.asked[0].gone.wait()


def test_a_header_cannot_smuggle_a_line() -> None:
    for url, value in (("http://h/v1", "a\r\nb: c"), ("http://h/v1 x", "a"), ("http://h/v1", "a\nb")):
        with pytest.raises(ValueError, match="line end or a blank"):
            Target.of("POST", url, {"x": value})
