"""A caller that leaves ends its call at the upstream, in every phase."""

import asyncio
import contextlib
import time

import pytest

from tests.model_proxy.raw_caller import raw_call
from tests.model_proxy.wire import (
    SSE_HEAD,
    WAIT_S,
    Asked,
    Handler,
    delta,
    event,
    proxied,
    proxy_of,
    raw_upstream,
    settings_of,
)

# The design asks for 0.1 s; a busy machine is given more.
SEEN_WITHIN_S = 1.0


async def _silent(asked: Asked) -> None:
    await asked.gone.wait()


async def _talking(asked: Asked) -> None:
    await asked.write(SSE_HEAD + event(delta({"content": "one"})))
    await asked.gone.wait()


@pytest.mark.behaviour("MS-19")
@pytest.mark.parametrize("dialect", ["responses", "chat_completions", "messages"])
@pytest.mark.parametrize(
    ("phase", "stream", "handler"),
    [
        ("before the first byte", True, _silent),
        ("between chunks", True, _talking),
        ("not streaming", False, _silent),
        ("in the middle of a body", False, _talking),
    ],
)
async def test_a_caller_that_leaves_cancels_the_upstream(
    dialect: str, phase: str, stream: bool, handler: Handler
) -> None:
    async with proxied(handler) as (proxy, upstream):
        async with raw_call(proxy, dialect, stream=stream) as caller:
            async with asyncio.timeout(WAIT_S):
                await upstream.arrived.wait()
            if handler is _talking and stream:
                await caller.head()
                await caller.sse_data()
            caller.leave()
            left_at = time.monotonic()
            async with asyncio.timeout(WAIT_S):
                await upstream.asked[0].gone.wait()
            seen_after_s = time.monotonic() - left_at
        (call,) = await proxy.calls(1)
    assert seen_after_s < SEEN_WITHIN_S
    assert call.error_category == "cancelled"
    assert call.status == (200 if stream and handler is _talking else None)


async def test_callers_that_leave_while_a_silence_is_filled_cancel_too() -> None:
    async def handler(asked: Asked) -> None:
        await asked.write(SSE_HEAD)
        await asked.gone.wait()

    async with proxied(handler, heartbeat_s=0.03) as (proxy, upstream):
        async with raw_call(proxy, "responses", stream=True) as caller:
            for _ in range(4):
                await caller.sse_data()
            caller.leave()
            async with asyncio.timeout(WAIT_S):
                await upstream.asked[0].gone.wait()
        (call,) = await proxy.calls(1)
    assert (call.error_category, call.response_status) == ("cancelled", "in_progress")


async def test_many_callers_that_leave_free_every_connection() -> None:
    async with proxied(_silent) as (proxy, upstream):
        for count in range(20):
            upstream.arrived.clear()
            async with raw_call(proxy, "responses", stream=bool(count % 2)) as caller:
                async with asyncio.timeout(WAIT_S):
                    await upstream.arrived.wait()
                caller.leave()
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(asked.gone.wait() for asked in upstream.asked))
        calls = await proxy.calls(20)
    assert {call.error_category for call in calls} == {"cancelled"}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stopping_proxy_tells_its_callers(stream: bool) -> None:
    async with raw_upstream(_talking if stream else _silent) as upstream, contextlib.AsyncExitStack() as stack:
        loaded = settings_of({"upstream": "chat_completions", "base_url": upstream.url})
        proxy = await stack.enter_async_context(proxy_of(loaded))
        async with raw_call(proxy, "responses", stream=stream) as caller:
            async with asyncio.timeout(WAIT_S):
                await upstream.arrived.wait()
            if stream:
                await caller.head()
            await stack.aclose()
            if stream:
                while (one := await caller.sse_data())["type"] != "response.failed":
                    pass
                assert one["response"]["error"]["code"] == "server_shutdown"
            else:
                assert "503" in (await caller.head()).split("\r\n")[0]
