"""A proxy that dies or freezes in the middle of a call: the call is told as lost, never left out of the sums."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest

from services.agent.observations import USAGE_GAP, observe
from services.agent.record import Answer, RunEnd
from services.model_proxy.capture import SETTLE_WITHIN_S
from shared.contracts.capture import ErrorCategory, summed_usage
from tests.model_proxy.processes import proxy_process
from tests.model_proxy.sessions import session_call
from tests.model_proxy.wire import (
    COMPLETION,
    SSE_HEAD,
    WAIT_S,
    Asked,
    Proxy,
    RawUpstream,
    delta,
    event,
    json_body,
    proxy_of,
    raw_upstream,
    settings_of,
)
from tests.store.redis_server import RedisServer

pytestmark = pytest.mark.redis


async def _first_whole_then_half(asked: Asked) -> None:
    """The first call is answered; the others' answers stop in the middle."""
    if b"whole" in asked.body:
        await asked.write(json_body(COMPLETION))
        return
    await asked.write(SSE_HEAD + event(delta({"content": "half"})))
    await asked.gone.wait()


@dataclass(frozen=True, slots=True)
class Two:
    """Two replicas: one that lives on, and one, a process of its own, that does not."""

    living: Proxy
    other: Proxy
    process: asyncio.subprocess.Process
    upstream: RawUpstream


@contextlib.asynccontextmanager
async def two_proxies(server: RedisServer, folder: Path, **serving: float) -> AsyncIterator[Two]:
    async with raw_upstream(_first_whole_then_half) as upstream:
        model = {"upstream": "chat_completions", "base_url": upstream.url, "model": "up"}
        store = {"url": server.url}
        async with (
            proxy_of(settings_of(model, store=store)) as living,
            proxy_process(folder, store=store, models={"policy": model}, serving=serving) as (other, process),
        ):
            yield Two(living, other, process, upstream)


@pytest.mark.behaviour("ES-52")
async def test_a_call_of_a_killed_proxy_is_lost_and_makes_the_usage_unknown(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    async with two_proxies(redis_server, tmp_path) as two:
        instance = (await two.other.http.get("/readyz")).json()["instance"]
        assert (await session_call(two.other, fields={"input": "whole"})).status_code == 200
        calling = asyncio.create_task(session_call(two.other, fields={"stream": True}))
        await two.upstream.wait_until_asked(2)
        two.process.kill()
        await two.process.wait()
        (failed,) = await asyncio.gather(calling, return_exceptions=True)
        assert isinstance(failed, Exception)
        began = time.monotonic()
        sealed = await two.living.seal()
        first_s, began = time.monotonic() - began, time.monotonic()
        again = await two.living.seal()
        again_s = time.monotonic() - began
        read = await two.living.capture()
    whole, lost = sealed.calls
    assert (whole.status, whole.usage is not None) == (200, True)
    assert (lost.error_category, lost.status, lost.ended_at, lost.usage) == (ErrorCategory.LOST, None, None, None)
    assert (lost.phase, lost.model, lost.stream, lost.instance) == ("agent", "policy", True, instance)
    assert instance in (lost.error_excerpt or "")
    assert summed_usage(sealed) is None
    assert again == sealed == read
    # Only the first seal waits for it.
    assert first_s < SETTLE_WITHIN_S + WAIT_S / 2
    assert again_s < SETTLE_WITHIN_S
    observed = orjson.loads(observe(sealed, RunEnd(Answer(200, b"{}"), [], {})))
    assert (observed["usage"], observed["gaps"]) == (None, [USAGE_GAP])
    assert [call["error_category"] for call in observed["model_calls"]] == [None, "lost"]


async def test_a_judges_call_of_a_killed_proxy_leaves_the_phases_usage_unknown(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    async with two_proxies(redis_server, tmp_path) as two:
        assert (await two.living.call("responses", input="whole")).status_code == 200
        calling = asyncio.create_task(two.other.call("responses", stream=True))
        await two.upstream.wait_until_asked(2)
        two.process.kill()
        await asyncio.gather(calling, return_exceptions=True)
        began = time.monotonic()
        sealed = await two.living.seal()
        took_s = time.monotonic() - began
    assert [(call.phase, call.ended_at is None) for call in sealed.calls] == [("verify", False), ("verify", True)]
    assert summed_usage(sealed, "verify") is None
    # A judge's call may go on after the seal, so nobody waits for it.
    assert took_s < SETTLE_WITHIN_S


async def test_a_frozen_proxys_call_is_lost_at_the_seal_and_told_once_it_wakes_up(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    async with two_proxies(redis_server, tmp_path) as two:
        calling = asyncio.create_task(session_call(two.other, fields={"stream": True}))
        await two.upstream.wait_until_asked(1)
        two.process.send_signal(signal.SIGSTOP)
        sealed = await two.living.seal()
        two.process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(WAIT_S):
            await two.upstream.asked[0].gone.wait()
            answer = await calling
        (ended,) = await two.living.calls(1)
    (lost,) = sealed.calls
    assert (lost.error_category, lost.usage) == (ErrorCategory.LOST, None)
    assert (ended.call_id, ended.error_category, ended.error_code) == (lost.call_id, "cancelled", "capture_sealed")
    assert "capture_sealed" in answer.text
