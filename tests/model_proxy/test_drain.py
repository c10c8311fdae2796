"""TERM while calls are under way, to a real process: what can end within the grace does, the rest is told so."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.model_proxy.processes import STOP_S, proxy_process
from tests.model_proxy.raw_caller import RawCaller, raw_call
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
    delta,
    event,
    json_body,
    piece,
    proxy_of,
    raw_upstream,
    settings_of,
)
from tests.store.redis_server import RedisServer

TERMINATED = 143
IN_PROGRESS = {**RESPONSE, "status": "in_progress", "output": [], "usage": None}


def _configuration(upstream: RawUpstream, grace_s: float, kind: str = "chat_completions") -> dict[str, Any]:
    return {
        "models": {"policy": {"upstream": kind, "base_url": upstream.url, "model": "up"}},
        "serving": {"drain_lead_s": 0.2, "stop_grace_s": grace_s},
    }


async def _to_its_end(caller: RawCaller) -> list[bytes]:
    """The data of all events until the connection is closed."""
    async with asyncio.timeout(WAIT_S):
        lines = (await caller.reader.read()).split(b"\n")
    assert b"0\r" in lines[-3:], "the body was cut off"
    return [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]


@pytest.mark.behaviour("MS-4")
@pytest.mark.parametrize(
    ("dialect", "kind", "final"),
    [
        ("responses", "chat_completions", "response.failed"),
        ("responses", "responses", "response.failed"),
        ("messages", "chat_completions", "error"),
        ("chat_completions", "chat_completions", None),
    ],
)
async def test_a_stream_that_outlasts_the_grace_ends_in_its_dialect(
    tmp_path: Path, dialect: str, kind: str, final: str | None
) -> None:
    async def handler(asked: Asked) -> None:
        begin = delta({"content": "half"})
        if kind == "responses":
            begin = {"type": "response.created", "sequence_number": 0, "response": IN_PROGRESS}
        await asked.write(SSE_HEAD + event(begin))
        await asked.gone.wait()

    async with (
        raw_upstream(handler) as upstream,
        proxy_process(tmp_path, **_configuration(upstream, 1.0, kind)) as (proxy, process),
        raw_call(proxy, dialect, as_session(), stream=True) as caller,
    ):
        await caller.head()
        await caller.sse_data()
        process.terminate()
        last = orjson.loads((await _to_its_end(caller))[-1])
        async with asyncio.timeout(STOP_S):
            assert await process.wait() == TERMINATED
            await upstream.asked[0].gone.wait()
    assert last.get("type") == final
    error = last["response"]["error"] if final == "response.failed" else last["error"]
    assert "server_shutdown" in (error.get("code"), error.get("details", {}).get("error_code"))


async def test_a_whole_answer_that_outlasts_the_grace_is_503_and_told_when_to_come_back(tmp_path: Path) -> None:
    async def handler(asked: Asked) -> None:
        await asked.gone.wait()

    async with (
        raw_upstream(handler) as upstream,
        proxy_process(tmp_path, **_configuration(upstream, 1.0)) as (proxy, process),
    ):
        calling = asyncio.create_task(session_call(proxy))
        async with asyncio.timeout(WAIT_S):
            await upstream.arrived.wait()
        process.terminate()
        answer = await calling
        async with asyncio.timeout(STOP_S):
            assert await process.wait() == TERMINATED
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert (answer.json()["error"]["code"], answer.json()["failure"]["terminal"]) == ("server_shutdown", False)


@pytest.mark.parametrize("stream", [True, False])
async def test_what_ends_within_the_grace_ends_well(tmp_path: Path, stream: bool) -> None:
    go_on = asyncio.Event()

    async def handler(asked: Asked) -> None:
        if stream:
            await asked.write(SSE_HEAD + event(delta({"content": "half"})))
        await go_on.wait()
        if stream:
            await asked.write(event(delta({}, "stop")) + piece(DONE) + END)
        else:
            await asked.write(json_body(COMPLETION))

    async with (
        raw_upstream(handler) as upstream,
        proxy_process(tmp_path, **_configuration(upstream, 20.0)) as (proxy, process),
    ):
        calling = asyncio.create_task(session_call(proxy, fields={"stream": stream}))
        async with asyncio.timeout(WAIT_S):
            await upstream.arrived.wait()
        process.terminate()
        async with asyncio.timeout(WAIT_S):
            # Its listener is closed: the grace has begun.
            while not await _refuses(proxy.url):  # noqa: ASYNC110 - only a refusal tells
                await asyncio.sleep(0.02)
        go_on.set()
        answer = await calling
        async with asyncio.timeout(STOP_S):
            assert await process.wait() == TERMINATED
    assert answer.status_code == 200
    assert "fine" in answer.text or "response.completed" in answer.text


async def _refuses(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return True
    writer.close()
    return False


@pytest.mark.redis
async def test_what_a_stop_cut_is_recorded_for_the_next_replica(redis_server: RedisServer, tmp_path: Path) -> None:
    async def handler(asked: Asked) -> None:
        if b'"stream":true' in asked.body:
            await asked.write(SSE_HEAD + event(delta({"content": "half"})))
        await asked.gone.wait()

    async with raw_upstream(handler) as upstream:
        configuration = {**_configuration(upstream, 1.0), "store": {"url": redis_server.url}}
        model = configuration["models"]["policy"]
        async with (
            proxy_of(settings_of(model, store=configuration["store"])) as living,
            proxy_process(tmp_path, **configuration) as (stopping, process),
        ):
            calling = [asyncio.create_task(session_call(stopping, fields={"stream": n % 2 == 0})) for n in range(10)]
            await upstream.wait_until_asked(len(calling))
            process.terminate()
            answers = await asyncio.gather(*calling)
            async with asyncio.timeout(STOP_S):
                assert await process.wait() == TERMINATED
            calls = (await living.capture()).calls
    assert all("server_shutdown" in answer.text for answer in answers)
    assert len(calls) == len(calling)
    assert {(call.error_category, call.error_code) for call in calls} == {("cancelled", "server_shutdown")}
    assert sorted(call.status or 0 for call in calls) == [200] * 5 + [503] * 5
