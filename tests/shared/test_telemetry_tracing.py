"""Trace context: what is read, what is passed on, what is recorded, and that episodes do not share it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import pytest
from fastapi import Request, Response

from shared.errors import AgentRunError
from shared.http.client import HttpClient
from shared.http.service import Mesh, create_service, json_reply
from shared.settings import LoadedSettings, Settings
from shared.tokens import SessionClaims, Signer, trace_in
from shared.tracing import (
    STATE_MAX_CHARS,
    Kind,
    StageSpans,
    Trace,
    Value,
    current_trace,
    new_trace,
    read_trace,
    record_with,
    span,
    trace_from,
    trace_headers,
    trace_text,
)
from tests.serving import serving

ID = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
PARENT = f"00-{ID}-{SPAN}-01"

MALFORMED = [
    "",
    "nonsense",
    f"00-{ID}-{SPAN}",
    f"00-{ID}-{SPAN}-01-more",
    f"00-{ID}-{SPAN}-1",
    f"00-{ID.upper()}-{SPAN}-01",
    f"00-{'0' * 32}-{SPAN}-01",
    f"00-{ID}-{'0' * 16}-01",
    f"ff-{ID}-{SPAN}-01",
    f"0-{ID}-{SPAN}-01",
    f"00-{ID[:-1]}-{SPAN}-01",
    f"00-{ID}-{SPAN}x-01",
    f" {PARENT}",
    f"{PARENT}\n",
]


@pytest.mark.parametrize("flags", ["00", "01", "02", "03"])
def test_a_proper_parent_is_passed_on_as_it_came_its_flags_too(flags: str) -> None:
    trace = read_trace(f"00-{ID}-{SPAN}-{flags}", "vendor=x,other=y")
    assert trace is not None
    assert (trace.trace_id, trace.span_id, trace.flags) == (ID, SPAN, int(flags, 16))
    assert trace.headers() == {"traceparent": f"00-{ID}-{SPAN}-{flags}", "tracestate": "vendor=x,other=y"}


@pytest.mark.parametrize("parent", MALFORMED)
def test_a_malformed_parent_is_none(parent: str) -> None:
    assert read_trace(parent, "vendor=x") is None


@pytest.mark.parametrize("rest", ["", "-what-may-come"])
def test_of_a_later_version_the_known_parts_go_on_in_ours(rest: str) -> None:
    trace = read_trace(f"cc-{ID}-{SPAN}-09{rest}")
    assert trace == Trace(f"00-{ID}-{SPAN}-01")


@pytest.mark.parametrize("state", ["", "a=\x00", "a=é", "a=b\r\nx: y", "a=" + "b" * STATE_MAX_CHARS])
def test_a_state_that_no_header_may_hold_is_dropped_alone(state: str) -> None:
    assert read_trace(PARENT, state) == Trace(PARENT)


def test_a_fresh_trace_is_proper_and_asks_nobody_to_record_it() -> None:
    fresh = new_trace()
    assert read_trace(fresh.parent) == fresh
    assert fresh.flags == 0
    assert new_trace().trace_id != fresh.trace_id


def test_a_context_is_the_same_after_a_record_or_a_token() -> None:
    for trace in (Trace(PARENT), Trace(PARENT, "a=b c,d=e")):
        current_trace.set(trace)
        assert trace_from(trace_text()) == trace
        claims = SessionClaims(key="r", model="m", expires_at=9e9, trace=trace_text())
        assert trace_in(Signer("mesh", "session-token").session_token(claims)) == trace
    current_trace.set(None)
    assert trace_text() == ""
    assert trace_from("") is None


@pytest.mark.parametrize(
    "token", ["", "pdk1", "pdk1.x.y", "pdk1.é.y", "pdk1.W10.x", "pdk1.bnVsbA.x", "pdk1.eyJ0cmFjZSI6MX0.x"]
)
def test_a_token_without_a_trace_gives_none(token: str) -> None:
    assert trace_in(token) is None


@dataclass
class Kept:
    """One recorded span; also the recorder's own form of it."""

    name: str
    kind: Kind
    parent: Trace | None
    trace: Trace
    attributes: dict[str, Value] = field(default_factory=dict)
    error: str | None = None
    ended: int = 0

    def rename(self, name: str) -> None:
        self.name = name

    def set(self, name: str, value: Value) -> None:
        self.attributes[name] = value

    def end(self, error: str | None) -> None:
        self.error = error
        self.ended += 1


class Keeping:
    """A recorder that keeps everything here."""

    def __init__(self) -> None:
        self.spans: list[Kept] = []

    def begin(self, name: str, kind: Kind, parent: Trace | None) -> Kept:
        trace_id = new_trace().trace_id if parent is None else parent.trace_id
        state = None if parent is None else parent.state
        kept = Kept(name, kind, parent, Trace(f"00-{trace_id}-{len(self.spans) + 1:016x}-01", state))
        self.spans.append(kept)
        return kept

    def named(self, name: str) -> Kept:
        (found,) = [kept for kept in self.spans if kept.name == name]
        return found


@pytest.fixture
def kept() -> Iterator[Keeping]:
    keeping = Keeping()
    record_with(keeping)
    try:
        yield keeping
    finally:
        record_with(None)


def test_without_a_recorder_a_step_changes_nothing() -> None:
    current_trace.set(Trace(PARENT))
    with span("a step") as step:
        step.set("a", 1)
        step.fail("bad")
        step.rename("other")
        assert not step.recorded
        assert trace_headers() == {"traceparent": PARENT}
    assert current_trace.get() == Trace(PARENT)


def test_steps_lie_within_each_other_and_what_was_current_is_so_again(kept: Keeping) -> None:
    current_trace.set(Trace(PARENT, "a=b"))
    with span("outer") as outer:
        outer.set("a", 1)
        with span("inner", "client"):
            assert trace_headers() == kept.named("inner").trace.headers()
        with pytest.raises(AgentRunError), span("broken"):
            raise AgentRunError("with a text that no span needs")
        outer.fail("badly")
    assert current_trace.get() == Trace(PARENT, "a=b")
    outer_kept, inner = kept.named("outer"), kept.named("inner")
    assert (outer_kept.parent, outer_kept.attributes, outer_kept.error) == (Trace(PARENT, "a=b"), {"a": 1}, "badly")
    assert (inner.parent, inner.kind, inner.error) == (outer_kept.trace, "client", None)
    assert kept.named("broken").error == "agent_run_error"
    assert [one.ended for one in kept.spans] == [1, 1, 1]
    assert {one.trace.trace_id for one in kept.spans} == {ID}
    assert {one.trace.state for one in kept.spans} == {"a=b"}


def _break_in_the_second_stage() -> None:
    with StageSpans() as stages:
        stages.enter("seed")
        with span("a call"):
            pass
        stages.enter("agent")
        raise AgentRunError("it broke")


def test_stages_follow_one_another_side_by_side(kept: Keeping) -> None:
    current_trace.set(Trace(PARENT))
    with pytest.raises(AgentRunError):
        _break_in_the_second_stage()
    assert current_trace.get() == Trace(PARENT)
    assert kept.named("seed").parent == kept.named("agent").parent == Trace(PARENT)
    assert kept.named("a call").parent == kept.named("seed").trace
    assert [kept.named(name).error for name in ("seed", "agent")] == [None, "agent_run_error"]
    assert [one.ended for one in kept.spans] == [1, 1, 1]


async def test_steps_of_episodes_in_one_process_do_not_get_into_each_other(kept: Keeping) -> None:
    met = asyncio.Barrier(20)

    async def episode(n: int) -> None:
        current_trace.set(Trace(f"00-{n + 1:032x}-{1:016x}-01"))
        with span(f"outer {n}"):
            await met.wait()
            with span(f"inner {n}"):
                await met.wait()
                assert trace_headers()["traceparent"][3:35] == f"{n + 1:032x}"
            await met.wait()

    await asyncio.gather(*(episode(n) for n in range(20)))
    assert len(kept.spans) == 40
    for n in range(20):
        assert kept.named(f"outer {n}").trace.trace_id == f"{n + 1:032x}"
        assert kept.named(f"inner {n}").parent == kept.named(f"outer {n}").trace


@asynccontextmanager
async def _nothing(_mesh: Mesh) -> AsyncIterator[None]:
    yield


@asynccontextmanager
async def chain() -> AsyncIterator[tuple[str, list[dict[str, str]]]]:
    """Two services: `/in` of the first calls `/out` of the second, which notes the headers that come."""
    heard: list[dict[str, str]] = []
    loaded = LoadedSettings(Settings(), {})
    second = create_service("resources", loaded, lifespan=_nothing)
    first = create_service("agent", loaded, lifespan=_nothing)

    async def out(request: Request) -> Response:
        heard.append(dict(request.headers))
        return json_reply(b"{}")

    second.add_bare_route("POST", "/out", out)
    async with serving(second) as second_url:
        client = HttpClient()

        async def into(request: Request) -> Response:
            for _ in range(2):
                await client.request("POST", f"{second_url}/out", service="resources", timeout_s=10.0)
            return json_reply(b"{}")

        first.add_bare_route("POST", "/in/{key}", into)
        async with serving(first) as first_url:
            yield f"{first_url}/in", heard
        await client.close()


async def _ask(url: str, *headers: tuple[str, str]) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.post(f"{url}/r1", headers=list(headers))).status_code == 200


async def test_a_callers_context_goes_through_a_service_unchanged() -> None:
    async with chain() as (url, heard):
        await _ask(url, ("traceparent", PARENT), ("tracestate", "a=b"), ("tracestate", "c=d"))
    assert [(told["traceparent"], told["tracestate"]) for told in heard] == [(PARENT, "a=b,c=d")] * 2


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("traceparent", "nonsense"), ("tracestate", "a=b")],
        [("traceparent", PARENT), ("traceparent", PARENT)],
        [("tracestate", "a=b")],
    ],
)
async def test_a_missing_malformed_or_doubled_context_is_replaced_by_one_for_all_that_follows(
    headers: list[tuple[str, str]],
) -> None:
    async with chain() as (url, heard):
        await _ask(url, *headers)
        await _ask(url, *headers)
    parents = [told["traceparent"] for told in heard]
    assert parents[0] == parents[1] != parents[2] == parents[3]
    assert read_trace(parents[0]) is not None
    assert ID not in "".join(parents)
    assert not [told for told in heard if "tracestate" in told]


async def test_every_hop_in_and_out_is_a_span_below_the_last(kept: Keeping) -> None:
    async with chain() as (url, heard):
        await _ask(url, ("traceparent", PARENT), ("tracestate", "a=b"), ("X-Paddock-Key", "r1"))
    incoming, calls = kept.named("POST /in/{key}"), [one for one in kept.spans if one.name == "POST resources"]
    answers = [one for one in kept.spans if one.name == "POST /out"]
    assert (incoming.kind, incoming.parent) == ("server", Trace(PARENT, "a=b"))
    assert incoming.attributes["http.response.status_code"] == 200
    assert incoming.attributes["paddock.key"] == "r1"
    assert [(one.kind, one.parent) for one in calls] == [("client", incoming.trace)] * 2
    assert [(one.kind, one.parent) for one in answers] == [("server", one.trace) for one in calls]
    assert [told["traceparent"] for told in heard] == [one.trace.parent for one in calls]
    assert {told["tracestate"] for told in heard} == {"a=b"}
    assert [one.ended for one in kept.spans] == [1] * 5


async def test_many_requests_at_once_keep_their_own_contexts() -> None:
    async with chain() as (url, heard):
        await asyncio.gather(*(_ask(url, ("traceparent", f"00-{n + 1:032x}-{n + 1:016x}-00")) for n in range(40)))
    parents = [told["traceparent"] for told in heard]
    assert sorted(parents) == sorted(f"00-{n + 1:032x}-{n + 1:016x}-00" for n in range(40) for _ in range(2))
