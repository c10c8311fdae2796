"""The exchange by itself: what it does when parts of this process fail or are slow."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from services.model_proxy.access import DEFAULT_PROFILE, Caller
from services.model_proxy.bridge.capabilities import Capabilities
from services.model_proxy.bridged import BridgedConversation, BridgedRelay
from services.model_proxy.capture import Captures
from services.model_proxy.conversation import Answer, Relay
from services.model_proxy.exchange import Desk, Exchange, Prepared
from services.model_proxy.models import ServedModel
from services.model_proxy.record import new_record
from services.model_proxy.under_way import UnderWay
from services.model_proxy.upstreams.scripted import ScriptedUpstream, parse_script
from shared.contracts.capture import Capture
from shared.metrics import Metrics
from shared.settings import ModelSettings
from shared.store.memory import MemoryStore
from tests.model_proxy.wire import WAIT_S, events_of
from tests.serving import serving

SCRIPT = "- {match: x, text: one two three four five six seven eight nine}"
CALLER = Caller("k", "agent", None, DEFAULT_PROFILE)


class GatedStore(MemoryStore):
    """Appends wait for the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = asyncio.Event()
        self.gate = asyncio.Event()

    async def append(self, key: str, entries: Sequence[bytes], *, ttl_s: float) -> int:
        self.reached.set()
        await self.gate.wait()
        return await super().append(key, entries, ttl_s=ttl_s)


class FaultyConversation(BridgedConversation):
    """Fails as no upstream can make it fail: at once, or in the middle of a stream."""

    def whole(self, body: bytes) -> Answer:
        raise RuntimeError(f"a fault of ours, with {len(body)} bytes")

    def relay(self) -> Relay:
        return FaultyRelay(super().relay())


class FaultyRelay:
    def __init__(self, relay: Relay) -> None:
        assert isinstance(relay, BridgedRelay)
        self._relay = relay
        self._fed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._relay, name)

    def feed(self, chunk: bytes) -> bytes:
        self._fed += 1
        if self._fed == 3:
            raise RuntimeError("a fault of ours")
        return self._relay.feed(chunk)


@contextlib.asynccontextmanager
async def exchanging(
    store: MemoryStore, kind: type[BridgedConversation], stream: bool
) -> AsyncIterator[tuple[str, Captures]]:
    """An application that is one exchange after the other."""
    captures = Captures(store, ttl_s=60)
    desk = Desk(captures, Metrics(), UnderWay(captures.sealed_within))
    settings = ModelSettings(upstream="scripted", heartbeat_s=0.02)
    model = ServedModel("m", "m", ScriptedUpstream(parse_script(SCRIPT)), settings, Capabilities())

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        request = {"input": "x", "stream": stream}
        record = new_record(CALLER, "responses", "m", b"{}", stream=stream, instance="i")
        await receive()
        prepared = Prepared(model, kind(request, model, DEFAULT_PROFILE))
        await Exchange(desk, CALLER, record, lambda: prepared)(scope, receive, send)

    async with serving(app) as url:
        yield url, captures


async def _calls(captures: Captures) -> Capture:
    return Capture.model_validate_json(await captures.read("k"))


@pytest.mark.behaviour("MS-18")
@pytest.mark.parametrize("stream", [True, False])
async def test_the_end_waits_for_the_record_and_no_heartbeat_comes_between(stream: bool) -> None:
    store = GatedStore()
    async with (
        exchanging(store, BridgedConversation, stream) as (url, _),
        httpx.AsyncClient(timeout=WAIT_S, trust_env=False) as http,
    ):
        asking = asyncio.create_task(http.post(url, content=b""))
        async with asyncio.timeout(WAIT_S):
            await store.reached.wait()
        # Several heartbeats' time: nothing may come, and nothing be out of turn afterwards.
        await asyncio.sleep(0.15)
        assert not asking.done()
        store.gate.set()
        answer = await asking
    assert answer.status_code == 200
    if stream:
        events = events_of(answer.text)
        assert [one["sequence_number"] for one in events] == list(range(len(events)))
        assert events[-1]["type"] == "response.completed"


async def test_a_fault_of_ours_in_a_whole_answer_is_a_500_and_recorded() -> None:
    async with (
        exchanging(MemoryStore(), FaultyConversation, False) as (url, captures),
        httpx.AsyncClient(timeout=WAIT_S, trust_env=False) as http,
    ):
        answer = await http.post(url, content=b"")
        (call,) = (await _calls(captures)).calls
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "a fault of ours" not in answer.text
    assert (call.status, call.error_code) == (500, "internal_error")


@pytest.mark.behaviour("MS-4")
async def test_a_fault_of_ours_in_a_stream_ends_it_with_a_failed_event() -> None:
    async with (
        exchanging(MemoryStore(), FaultyConversation, True) as (url, captures),
        httpx.AsyncClient(timeout=WAIT_S, trust_env=False) as http,
    ):
        answer = await http.post(url, content=b"")
        (call,) = (await _calls(captures)).calls
    final = events_of(answer.text)[-1]
    assert (final["type"], final["response"]["error"]["code"]) == ("response.failed", "internal_error")
    assert (call.status, call.response_status, call.error_code) == (200, "failed", "internal_error")
