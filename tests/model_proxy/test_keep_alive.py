"""Connections that end in the moment in which they are used again, and servers that refuse."""

import asyncio

from tests.model_proxy.wire import COMPLETION, Asked, always, json_body, proxied, proxy_of, raw_upstream, settings_of
from tests.serving import free_port


async def test_a_connection_that_its_server_closed_while_idle_costs_no_call() -> None:
    async def handler(asked: Asked) -> None:
        if asked.nth_on_connection == 1:
            await asked.write(json_body(COMPLETION))
        else:
            # It closes an idle connection just as the next request is on its way.
            asked.hang_up()

    async with proxied(handler) as (proxy, _):
        answers = [await proxy.call("responses") for _ in range(6)]
        calls = (await proxy.capture()).calls
    assert [answer.status_code for answer in answers] == [200] * 6
    assert {call.attempts for call in calls} == {1, 2}


async def test_calls_in_step_with_a_short_idle_limit_all_succeed() -> None:
    idle_s = 0.03

    async def handler(asked: Asked) -> None:
        await asked.write(json_body(COMPLETION))
        asyncio.get_running_loop().call_later(idle_s, asked.hang_up)

    async with proxied(handler) as (proxy, _):
        for _ in range(60):
            assert (await proxy.call("responses")).status_code == 200
            await asyncio.sleep(idle_s)


async def test_a_used_connection_that_was_answered_in_part_is_not_repeated() -> None:
    async def handler(asked: Asked) -> None:
        if asked.nth_on_connection == 1:
            await asked.write(json_body(COMPLETION))
        else:
            await asked.write(json_body(COMPLETION)[:-4])
            asked.hang_up()

    async with proxied(handler) as (proxy, upstream):
        assert (await proxy.call("responses")).status_code == 200
        assert (await proxy.call("responses")).status_code == 502
    assert len(upstream.asked) == 2


async def test_the_next_server_is_asked_when_one_refuses() -> None:
    async with raw_upstream(always(json_body(COMPLETION))) as upstream:
        gone = f"http://127.0.0.1:{free_port()}/v1"
        loaded = settings_of({"upstream": "chat_completions", "base_url": [gone, upstream.url]})
        async with proxy_of(loaded) as proxy:
            answers = [await proxy.call("responses", key=f"k{count}") for count in range(30)]
            attempts = [(await proxy.last_call(f"k{count}")).attempts for count in range(30)]
    assert [answer.status_code for answer in answers] == [200] * 30
    assert set(attempts) == {1, 2}


async def test_a_key_keeps_its_server() -> None:
    async with (
        raw_upstream(always(json_body(COMPLETION))) as first,
        raw_upstream(always(json_body(COMPLETION))) as second,
    ):
        loaded = settings_of({"upstream": "chat_completions", "base_url": [first.url, second.url]})
        async with proxy_of(loaded) as proxy:
            for count in range(60):
                await proxy.call("responses", key=f"k{count % 30}")
    assert len(first.asked) + len(second.asked) == 60
    assert {len(first.asked) % 2, len(second.asked) % 2} == {0}
    assert first.asked
    assert second.asked
