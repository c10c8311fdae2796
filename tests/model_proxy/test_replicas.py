"""Several model proxies on one store: a call, a seal and a bound are the same on each of them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from services.model_proxy.capture import SETTLE_WITHIN_S
from shared.contracts.capture import summed_usage
from shared.store.redis_scripts import CHANGED, LOG, slot_key
from tests.model_proxy.raw_caller import raw_call
from tests.model_proxy.sessions import as_session, session_call
from tests.model_proxy.wire import (
    COMPLETION,
    END,
    KEY,
    SSE_HEAD,
    WAIT_S,
    Asked,
    Handler,
    Proxy,
    RawUpstream,
    always,
    delta,
    event,
    json_body,
    proxy_of,
    raw_upstream,
    settings_of,
)
from tests.store.redis_server import RedisServer

pytestmark = pytest.mark.redis


@contextlib.asynccontextmanager
async def replicas(
    server: RedisServer, handler: Handler, count: int = 2, kind: str = "chat_completions"
) -> AsyncIterator[tuple[list[Proxy], RawUpstream]]:
    """Proxies that share nothing but the store and the upstream."""
    async with raw_upstream(handler) as upstream, contextlib.AsyncExitStack() as stack:
        model = {"upstream": kind, "base_url": upstream.url, "model": "up"}
        loaded = settings_of(model, store={"url": server.url})
        yield [await stack.enter_async_context(proxy_of(loaded)) for _ in range(count)], upstream


async def _until_watched(server: RedisServer) -> None:
    """Until somebody waits for the seal."""
    channel = f"{CHANGED}capture:{{{KEY}}}:seal"
    async with asyncio.timeout(WAIT_S):
        while (await asyncio.to_thread(server.ask, "PUBSUB", "NUMSUB", channel))[1] == 0:  # noqa: ASYNC110 - as Redis tells
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_seal_on_one_replica_ends_a_call_on_another(
    redis_server: RedisServer, stream: bool, watched: bool
) -> None:
    async def handler(asked: Asked) -> None:
        if stream:
            await asked.write(SSE_HEAD + event(delta({"content": "half"})))
        await asked.gone.wait()

    async with (
        replicas(redis_server, handler) as ((sealing, calling), upstream),
        raw_call(calling, "responses", as_session(), stream=stream) as caller,
    ):
        async with asyncio.timeout(WAIT_S):
            await upstream.arrived.wait()
        if watched:
            await _until_watched(redis_server)
        sealed = await sealing.seal()
        async with asyncio.timeout(WAIT_S):
            await upstream.asked[0].gone.wait()
        await caller.is_told_of_the_seal(stream)
        (call,) = sealed.calls
        assert (call.phase, call.error_code, call.error_category) == ("agent", "capture_sealed", "cancelled")
        assert call.ended_at is not None
        assert (await calling.capture()) == sealed


async def test_a_call_is_in_the_capture_before_its_upstream_is_asked(redis_server: RedisServer) -> None:
    go_on = asyncio.Event()

    async def handler(asked: Asked) -> None:
        await go_on.wait()
        await asked.write(json_body(COMPLETION))

    async with replicas(redis_server, handler) as ((reading, calling), upstream):
        asking = asyncio.create_task(session_call(calling))
        async with asyncio.timeout(WAIT_S):
            await upstream.arrived.wait()
        before = await reading.capture()
        exported = (await reading.http.get(f"/captures/{KEY}?format=jsonl")).content
        go_on.set()
        answer = await asking
        after = await reading.capture()
        ready = (await calling.http.get("/readyz")).json()
    (under_way,), (ended,) = before.calls, after.calls
    assert (under_way.model, under_way.dialect, under_way.instance) == ("policy", "responses", ready["instance"])
    assert (under_way.ended_at, under_way.status, under_way.usage, under_way.error_category) == (None,) * 4
    assert summed_usage(before) is None
    assert exported == b""
    assert (ended.call_id, ended.instance, ended.status) == (under_way.call_id, under_way.instance, 200)
    assert (answer.status_code, ended.response) == (200, answer.json())
    assert summed_usage(after) is not None


async def test_what_one_replica_records_all_of_them_tell_alike(redis_server: RedisServer) -> None:
    long_text = "x" * 5_000
    async with replicas(redis_server, always(json_body(COMPLETION)), 3) as (proxies, _):
        for n, proxy in enumerate(proxies * 2):
            turns = [{"role": "user", "content": f"{turn} {long_text}"} for turn in range(n + 1)]
            assert (await session_call(proxy, fields={"input": turns})).status_code == 200
        for query in ("", "?bodies=false", "?format=jsonl"):
            told = {(await proxy.http.get(f"/captures/{KEY}{query}")).content for proxy in proxies}
            assert len(told) == 1
        sealed = [await proxy.seal() for proxy in proxies]
        assert [len(call.request["input"]) for call in sealed[0].calls if call.request] == [1, 2, 3, 4, 5, 6]
        assert sealed[1:] == sealed[:1] * 2
        for proxy in proxies:
            refused = await session_call(proxy)
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "capture_sealed")
        assert await proxies[0].capture() == sealed[0]


async def test_whatever_reached_the_model_is_in_the_capture_that_the_seal_gave(redis_server: RedisServer) -> None:
    asked_when_sealed: list[str] = []
    enough = asyncio.Event()

    async def handler(asked: Asked) -> None:
        if len(upstream.asked) >= 30:
            enough.set()
        await asyncio.sleep(0.003 * (len(upstream.asked) % 5))
        await asked.write(json_body(COMPLETION))

    async with replicas(redis_server, handler, 3) as ((sealing, *calling), upstream):

        async def keep_calling(worker: int) -> int:
            for n in range(1000):
                answer = await session_call(calling[worker % 2], fields={"input": f"{worker}-{n}"})
                if answer.status_code == 409:
                    return n
                assert answer.status_code == 200
            raise AssertionError("the seal was never seen")

        working = [asyncio.create_task(keep_calling(worker)) for worker in range(8)]
        async with asyncio.timeout(WAIT_S):
            await enough.wait()
            sealed = await sealing.seal()
            asked_when_sealed += [_input_of(asked) for asked in upstream.asked]
            await asyncio.gather(*working)
    asked = [_input_of(one) for one in upstream.asked]
    assert asked == asked_when_sealed
    assert sorted(call.request["input"] for call in sealed.calls if call.request) == sorted(asked)
    assert all(call.ended_at is not None for call in sealed.calls)
    assert (sealed.damaged, {call.error_category for call in sealed.calls} - {None, "cancelled"}) == (0, set())


def _input_of(asked: Asked) -> str:
    text: str = asked.json["messages"][-1]["content"]
    return text


async def test_replicas_together_never_make_more_calls_than_a_token_allows(redis_server: RedisServer) -> None:
    async with replicas(redis_server, always(json_body(COMPLETION)), 3) as (proxies, upstream):
        answers = await asyncio.gather(*(session_call(proxies[n % 3], max_calls=5) for n in range(30)))
        capture = await proxies[0].seal()
    refused = [answer for answer in answers if answer.status_code != 200]
    assert len(upstream.asked) == 5
    assert len(refused) == 25
    assert {(answer.status_code, answer.json()["error"]["code"]) for answer in refused} == {
        (403, "session_limit_reached")
    }
    assert [call.status for call in capture.calls] == [200] * 5


async def test_calls_under_way_elsewhere_count_and_refused_ones_do_not(redis_server: RedisServer) -> None:
    go_on = asyncio.Event()

    async def handler(asked: Asked) -> None:
        await go_on.wait()
        await asked.write(json_body(COMPLETION))

    async with replicas(redis_server, handler) as ((one, other), upstream):
        under_way = asyncio.create_task(session_call(one, max_calls=2))
        async with asyncio.timeout(WAIT_S):
            await upstream.arrived.wait()
        for _ in range(3):
            assert (await session_call(other, max_calls=1)).status_code == 403
        second = asyncio.create_task(session_call(other, max_calls=2))
        await upstream.wait_until_asked(2)
        assert (await session_call(one, max_calls=2)).status_code == 403
        go_on.set()
        assert [answer.status_code for answer in await asyncio.gather(under_way, second)] == [200, 200]


async def test_output_tokens_of_one_replica_count_on_another(redis_server: RedisServer) -> None:
    async with replicas(redis_server, always(json_body(COMPLETION))) as ((one, other), _):
        assert (await session_call(one, max_output_tokens=4)).status_code == 200
        assert (await session_call(other, max_output_tokens=4)).status_code == 200
        for proxy in (one, other):
            refused = await session_call(proxy, max_output_tokens=4)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "session_limit_reached")


async def test_a_refused_call_leaves_nothing_that_a_seal_would_wait_for(redis_server: RedisServer) -> None:
    async with replicas(redis_server, always(json_body(COMPLETION))) as ((one, other), upstream):
        first = await one.seal()
        assert [(await session_call(proxy)).status_code for proxy in (one, other, one)] == [409] * 3
        foreign = await session_call(one, key="another", fields={"model": "judge"})
        assert foreign.status_code in (403, 404)
        began = time.monotonic()
        again, elsewhere = await other.seal(), await other.seal("another")
        took_s = time.monotonic() - began
    assert (again, again.calls, upstream.asked) == (first, (), [])
    assert all(call.error_category != "lost" for call in elsewhere.calls)
    assert took_s < SETTLE_WITHIN_S


@pytest.mark.parametrize("sealed", [True, False])
async def test_a_client_that_is_refused_again_and_again_does_not_fill_the_store(
    redis_server: RedisServer, sealed: bool
) -> None:
    async with replicas(redis_server, always(json_body(COMPLETION))) as (proxies, upstream):
        assert (await session_call(proxies[0], max_calls=1)).status_code == 200
        if sealed:
            await proxies[0].seal()
        for _ in range(2):
            for proxy in proxies:
                assert (await session_call(proxy, max_calls=1)).status_code == (409 if sealed else 403)
            log = await asyncio.to_thread(redis_server.ask, "LLEN", slot_key(LOG, f"capture:{{{KEY}}}"))
        for proxy in proxies * 10:
            assert (await session_call(proxy, max_calls=1)).status_code == (409 if sealed else 403)
        assert await asyncio.to_thread(redis_server.ask, "LLEN", slot_key(LOG, f"capture:{{{KEY}}}")) == log
        # A token with more left is served all the same.
        assert (await session_call(proxies[1], max_calls=2)).status_code == (409 if sealed else 200)
    assert len(upstream.asked) == (1 if sealed else 2)


@pytest.mark.parametrize("dialect", ["responses", "messages"])
async def test_a_stream_that_another_replica_cuts_ends_in_its_dialect(redis_server: RedisServer, dialect: str) -> None:
    async def handler(asked: Asked) -> None:
        await asked.write(SSE_HEAD + event(delta({"content": "half"})))
        await asked.gone.wait()
        await asked.write(END)

    async with (
        replicas(redis_server, handler) as ((sealing, calling), upstream),
        raw_call(calling, dialect, as_session(), stream=True) as caller,
    ):
        async with asyncio.timeout(WAIT_S):
            await upstream.arrived.wait()
        await caller.head()
        await sealing.seal()
        final: dict[str, Any] = {}
        while final.get("type") not in ("response.failed", "error"):
            final = await caller.sse_data()
    assert "capture_sealed" in orjson.dumps(final).decode()
