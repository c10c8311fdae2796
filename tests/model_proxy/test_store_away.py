"""While the store is away nothing new goes to a model, and no answer goes out that is not recorded."""

import asyncio
import signal
from itertools import pairwise
from typing import Any

import orjson
import pytest

from shared.contracts.capture import ErrorCategory, summed_usage
from shared.settings import LoadedSettings
from tests.model_proxy.raw_caller import raw_call
from tests.model_proxy.sessions import as_session, session_call
from tests.model_proxy.wire import (
    COMPLETION,
    DONE,
    END,
    RESPONSE,
    SSE_HEAD,
    WAIT_S,
    Asked,
    RawUpstream,
    always,
    delta,
    event,
    json_body,
    piece,
    proxy_of,
    raw_upstream,
    settings_of,
)
from tests.store.redis_server import RedisServer

pytestmark = pytest.mark.redis

BEGUN = {**RESPONSE, "status": "in_progress", "output": [], "usage": None}


class Gated:
    """A model server that gives half of its answer, and the rest when it is told to."""

    def __init__(self, dialect: str = "chat_completions", *, stream: bool = True) -> None:
        self.go_on = asyncio.Event()
        self._dialect = dialect
        self._stream = stream

    async def __call__(self, asked: Asked) -> None:
        if not self._stream:
            await self.go_on.wait()
            await asked.write(json_body(COMPLETION))
        elif self._dialect == "responses":
            created = {"type": "response.created", "sequence_number": 0, "response": BEGUN}
            await asked.write(SSE_HEAD + event(created))
            await self.go_on.wait()
            completed = {"type": "response.completed", "sequence_number": 1, "response": RESPONSE}
            await asked.write(event(completed) + END)
        else:
            await asked.write(SSE_HEAD + event(delta({"content": "half"})))
            await self.go_on.wait()
            usage = {**delta({}), "choices": [], "usage": COMPLETION["usage"]}
            await asked.write(event(delta({}, "stop")) + event(usage) + piece(DONE) + END)


def _loaded(server: RedisServer, upstream: RawUpstream, kind: str = "chat_completions") -> LoadedSettings:
    model = {"upstream": kind, "base_url": upstream.url, "model": "up"}
    return settings_of(model, store={"url": server.url})


async def test_new_calls_are_refused_for_a_while_and_leave_no_trace(redis_server: RedisServer) -> None:
    async with (
        raw_upstream(always(json_body(COMPLETION))) as upstream,
        proxy_of(_loaded(redis_server, upstream)) as proxy,
    ):
        assert (await session_call(proxy)).status_code == 200
        await asyncio.to_thread(redis_server.stop)
        for dialect in ("responses", "chat_completions", "messages"):
            refused = await session_call(proxy, dialect)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
            assert "capture_unavailable" in refused.text
            assert str(redis_server.port) not in refused.text
        assert len(upstream.asked) == 1
        await asyncio.to_thread(redis_server.start)
        assert (await session_call(proxy)).status_code == 200
        sealed = await proxy.seal()
    assert [call.status for call in sealed.calls] == [200, 200]
    assert summed_usage(sealed) is not None


async def test_a_call_that_the_store_took_but_did_not_confirm_is_void(redis_server: RedisServer) -> None:
    """The begin is written, and its caller told 503: nothing was asked, so nothing is lost."""
    async with (
        raw_upstream(always(json_body(COMPLETION))) as upstream,
        proxy_of(_loaded(redis_server, upstream)) as proxy,
    ):
        assert (await session_call(proxy)).status_code == 200
        redis_server.signal(signal.SIGSTOP)
        # What was sent is taken when the server wakes up, although nobody waits for its answer any more.
        refused = await session_call(proxy)
        redis_server.signal(signal.SIGCONT)
        sealed = await proxy.seal()
    assert refused.status_code == 503
    assert len(upstream.asked) == 1
    assert [(call.status, call.error_category) for call in sealed.calls] == [(200, None)]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_waits_for_its_record_until_the_store_is_back(redis_server: RedisServer, stream: bool) -> None:
    gated = Gated(stream=stream)
    async with (
        raw_upstream(gated) as upstream,
        proxy_of(_loaded(redis_server, upstream)) as proxy,
    ):
        calling = asyncio.create_task(session_call(proxy, fields={"stream": stream}))
        await upstream.wait_until_asked(1)
        await asyncio.to_thread(redis_server.stop)
        gated.go_on.set()
        done, _ = await asyncio.wait([calling], timeout=1.0)
        assert not done
        await asyncio.to_thread(redis_server.start)
        answer = await calling
        (call,) = (await proxy.capture()).calls
    assert answer.status_code == 200
    assert ("response.completed" in answer.text) == stream
    assert (call.status, call.error_category, call.usage is not None) == (200, None, True)


@pytest.mark.behaviour("MS-18")
async def test_a_frozen_store_holds_the_final_event_back_and_nothing_else(redis_server: RedisServer) -> None:
    gated = Gated()
    async with (
        raw_upstream(gated) as upstream,
        proxy_of(_loaded(redis_server, upstream)) as proxy,
        raw_call(proxy, "responses", as_session(), stream=True) as caller,
    ):
        await caller.head()
        redis_server.signal(signal.SIGSTOP)
        try:
            gated.go_on.set()
            seen = []
            while (one := await caller.sse_data())["type"] != "response.output_item.done":
                seen.append(one)
            ending = asyncio.create_task(caller.sse_data())
            done, _ = await asyncio.wait([ending], timeout=0.5)
            assert not done
        finally:
            redis_server.signal(signal.SIGCONT)
        final = await ending
        (call,) = (await proxy.capture()).calls
    assert final["type"] == "response.completed"
    assert [a["sequence_number"] - b["sequence_number"] for b, a in pairwise([*seen, one, final])] == [1] * len(
        [*seen, one]
    )
    assert (call.status, call.response) == (200, final["response"])


@pytest.mark.parametrize(
    ("dialect", "kind"),
    [
        ("responses", "chat_completions"),
        ("responses", "responses"),
        ("chat_completions", "chat_completions"),
        ("messages", "chat_completions"),
        ("messages", "responses"),
    ],
)
async def test_a_stream_whose_record_cannot_be_written_does_not_look_completed(
    redis_server: RedisServer, dialect: str, kind: str
) -> None:
    gated = Gated(kind)
    async with (
        raw_upstream(gated) as upstream,
        proxy_of(_loaded(redis_server, upstream, kind), record_within_s=0.3) as proxy,
    ):
        calling = asyncio.create_task(session_call(proxy, dialect, fields={"stream": True}))
        await upstream.wait_until_asked(1)
        await asyncio.to_thread(redis_server.stop)
        gated.go_on.set()
        async with asyncio.timeout(WAIT_S):
            answer = await calling
        await asyncio.to_thread(redis_server.start)
        sealed = await proxy.seal()
    assert answer.status_code == 200
    assert "response.completed" not in answer.text
    assert "message_stop" not in answer.text
    assert "[DONE]" not in answer.text
    events = [orjson.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: ")]
    assert "capture_unavailable" in orjson.dumps(events[-1]).decode()
    numbers = [one["sequence_number"] for one in events if "sequence_number" in one]
    assert numbers == list(range(len(numbers)))
    (lost,) = sealed.calls
    assert (lost.error_category, lost.status) == (ErrorCategory.LOST, None)
    assert summed_usage(sealed) is None


async def test_a_whole_answer_whose_record_cannot_be_written_is_503(redis_server: RedisServer) -> None:
    gated = Gated(stream=False)
    async with (
        raw_upstream(gated) as upstream,
        proxy_of(_loaded(redis_server, upstream), record_within_s=0.3) as proxy,
    ):
        calling = asyncio.create_task(session_call(proxy))
        await upstream.wait_until_asked(1)
        await asyncio.to_thread(redis_server.stop)
        gated.go_on.set()
        answer = await calling
        await asyncio.to_thread(redis_server.start)
        (under_way,) = (await proxy.capture()).calls
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert answer.json()["error"]["code"] == "capture_unavailable"
    assert under_way.ended_at is None


async def test_an_error_of_the_upstream_goes_out_also_without_a_record(redis_server: RedisServer) -> None:
    asked = asyncio.Event()
    go_on = asyncio.Event()
    body: dict[str, Any] = {"error": {"message": "busy", "code": "rate_limit_exceeded"}}

    async def handler(one: Asked) -> None:
        asked.set()
        await go_on.wait()
        await one.write(json_body(body, 429))

    async with (
        raw_upstream(handler) as upstream,
        proxy_of(_loaded(redis_server, upstream), record_within_s=0.3) as proxy,
    ):
        calling = asyncio.create_task(session_call(proxy))
        await asked.wait()
        await asyncio.to_thread(redis_server.stop)
        go_on.set()
        answer = await calling
        await asyncio.to_thread(redis_server.start)
    assert (answer.status_code, answer.json()) == (429, body)


async def test_a_seal_is_noticed_after_the_store_was_away(redis_server: RedisServer) -> None:
    gated = Gated()
    async with (
        raw_upstream(gated) as upstream,
        proxy_of(_loaded(redis_server, upstream)) as calling,
        proxy_of(_loaded(redis_server, upstream)) as sealing,
        raw_call(calling, "responses", as_session(), stream=True) as caller,
    ):
        await caller.head()
        await asyncio.to_thread(redis_server.stop)
        assert (await sealing.http.post("/captures/episode-1/seal")).status_code == 503
        # Long enough for the watch to begin, and to fail.
        await asyncio.sleep(1.0)
        await asyncio.to_thread(redis_server.start)
        sealed = await sealing.seal()
        await caller.is_told_of_the_seal(True)
    assert [call.error_code for call in sealed.calls] == ["capture_sealed"]
