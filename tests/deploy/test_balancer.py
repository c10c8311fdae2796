"""The balancer's rules, by a real HAProxy before servers whose every byte the test decides."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack
from statistics import median

import httpx
import pytest

from shared.contracts.failure import FailureKind
from shared.errors import ServiceError, TransportError
from shared.http.client import HttpClient
from shared.http.problems import read
from tests import balancer
from tests.balancer import Balancer
from tests.model_proxy.wire import END, SSE_HEAD, Asked, Handler, RawUpstream, event, raw_upstream, reply
from tests.serving import free_port

pytestmark = pytest.mark.balancer

BOUND_S = 20.0
LEAD_S = 2.0
FINE = reply(200, b"fine")
EVENTS = 20
ADDED_MAX_S = 0.05


class Replica:
    """A server that says at `/readyz` whether it is ready, and answers all else by `handler`."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.ready = True
        self.told_at = 0.0
        self._stack = AsyncExitStack()
        self._server: RawUpstream | None = None

    async def start(self) -> None:
        self._server = await self._stack.enter_async_context(raw_upstream(self._handle))

    async def stop(self) -> None:
        await self._stack.aclose()

    @property
    def url(self) -> str:
        assert self._server is not None
        return self._server.url.removesuffix("/v1")

    @property
    def asked(self) -> list[Asked]:
        assert self._server is not None
        return [asked for asked in self._server.asked if asked.path != "/readyz"]

    async def _handle(self, asked: Asked) -> None:
        if asked.path != "/readyz":
            await self.handler(asked)
        elif self.ready:
            await asked.write(FINE)
        else:
            self.told_at = self.told_at or time.monotonic()
            await asked.write(reply(503, b"draining"))


class Rig:
    """Replicas, a client, and balancers of this test."""

    def __init__(self, stack: AsyncExitStack, client: httpx.AsyncClient) -> None:
        self._stack = stack
        self.client = client

    async def replica(self, handler: Handler) -> Replica:
        started = Replica(handler)
        await started.start()
        self._stack.push_async_callback(started.stop)
        return started

    def balancer(self, service: str, *urls: str) -> Balancer:
        return self._stack.enter_context(balancer.start({service: urls}))


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=BOUND_S))
        yield Rig(stack, client)


async def fine(asked: Asked) -> None:
    await asked.write(FINE)


async def drops(asked: Asked) -> None:
    asked.hang_up()


async def resets(asked: Asked) -> None:
    asked.reset()


async def dies_in_its_head(asked: Asked) -> None:
    await asked.write(FINE[:20])
    asked.hang_up()


async def dies_in_its_body(asked: Asked) -> None:
    await asked.write(FINE[:-1])
    asked.hang_up()


async def post(rig: Rig, url: str, body: str) -> int | None:
    """The status; None when the connection ended without an answer, or within it."""
    try:
        return (await rig.client.post(url, content=body)).status_code
    except httpx.TransportError:
        return None


@pytest.mark.parametrize("breaks", [drops, resets, dies_in_its_head, dies_in_its_body])
async def test_what_a_replica_has_received_is_never_sent_to_another_and_its_end_is_passed_on(
    rig: Rig, breaks: Handler
) -> None:
    replicas = [await rig.replica(breaks) for _ in range(2)]
    front = rig.balancer("agent", *(replica.url for replica in replicas))
    # The mesh's own client: it sends a request in one piece, which is what a balancer could keep and send again.
    client = HttpClient()
    for number in range(6):
        with pytest.raises(TransportError) as caught:
            await client.request(
                "POST", f"{front.url('agent')}/run", service="agent", timeout_s=BOUND_S, body=str(number).encode()
            )
        assert caught.value.kind is FailureKind.TRANSPORT_PEER_DROP
    await client.close()
    received = [asked.body for replica in replicas for asked in replica.asked]
    assert sorted(received) == [str(number).encode() for number in range(6)]
    assert all(replica.asked for replica in replicas)


async def test_a_request_that_a_replica_refused_to_take_goes_to_another_at_once(rig: Rig) -> None:
    gone, alive = [await rig.replica(fine) for _ in range(2)]
    front = rig.balancer("agent", gone.url, alive.url)
    await asyncio.to_thread(front.wait_until_ready, "agent", [gone.url, alive.url])
    await gone.stop()
    began = time.monotonic()
    assert {await post(rig, f"{front.url('agent')}/run", str(number)) for number in range(10)} == {200}
    assert time.monotonic() - began < 1.0
    assert '"retries":"+1"' in front.log


@pytest.mark.parametrize("service", balancer.PORTS)
async def test_a_service_without_a_replica_is_a_failure_in_the_meshs_form_that_may_be_tried_again(
    rig: Rig, service: str
) -> None:
    front = rig.balancer(service, f"http://127.0.0.1:{free_port()}")
    await asyncio.to_thread(front.wait_until_ready, service, [])
    answered = await rig.client.post(f"{front.url(service)}/run")
    problem = read(answered.status_code, dict(answered.headers), answered.content, service=service)
    assert (problem.status, problem.kind) == (503, FailureKind.TRANSPORT_UNREACHABLE)
    assert (problem.terminal, problem.in_mesh_form, problem.retry_after_s) == (False, True, 1.0)


async def test_the_mesh_repeats_what_reached_no_replica_until_one_is_there_or_its_patience_ends(rig: Rig) -> None:
    replica = await rig.replica(fine)
    replica.ready = False
    front = rig.balancer("agent", replica.url)
    await asyncio.to_thread(front.wait_until_ready, "agent", [])
    url = f"{front.url('agent')}/run"
    impatient, patient = HttpClient(patience_s=0.01), HttpClient(patience_s=BOUND_S)
    with pytest.raises(ServiceError, match="No replica of this service is ready"):
        await impatient.request("POST", url, service="agent", timeout_s=BOUND_S)
    asked = asyncio.create_task(patient.request("POST", url, service="agent", timeout_s=BOUND_S))
    await until(lambda: front.log.count('"status":503') >= 3)
    replica.ready = True
    assert (await asked).status == 200
    assert len(replica.asked) == 1
    await impatient.close()
    await patient.close()


async def test_a_draining_replica_gets_no_new_request_within_its_lead_and_ends_the_open_ones(rig: Rig) -> None:
    may_end = asyncio.Event()

    async def slow_when_asked(asked: Asked) -> None:
        if asked.path == "/slow":
            await may_end.wait()
        await asked.write(FINE)

    drained, _ = replicas = [await rig.replica(slow_when_asked) for _ in range(2)]
    front = rig.balancer("agent", *(replica.url for replica in replicas))
    url = front.url("agent")
    open_requests = [asyncio.create_task(post(rig, f"{url}/slow", "")) for _ in replicas]
    await until(lambda: all(len(replica.asked) == 1 for replica in replicas))
    drained.ready = False
    seen, last_at = 1, 0.0
    while not drained.told_at or time.monotonic() < drained.told_at + LEAD_S:
        assert await post(rig, f"{url}/run", "") == 200
        if len(drained.asked) > seen:
            seen, last_at = len(drained.asked), time.monotonic()
    assert seen > 1
    assert last_at - drained.told_at < LEAD_S / 2
    may_end.set()
    assert await asyncio.gather(*open_requests) == [200, 200]


async def test_a_client_that_leaves_is_gone_for_the_service_before_and_within_an_answer(rig: Rig) -> None:
    async def never_ends(asked: Asked) -> None:
        if asked.path == "/stream":
            await asked.write(SSE_HEAD + event("begun"))

    replica = await rig.replica(never_ends)
    front = rig.balancer("model_proxy", replica.url)
    for path in ("/plain", "/stream"):
        reader, writer = await asyncio.open_connection(front.address, balancer.PORTS["model_proxy"])
        writer.write(f"POST {path} HTTP/1.1\r\nHost: balancer\r\nContent-Length: 1\r\n\r\nx".encode())
        if path == "/stream":
            await asyncio.wait_for(reader.readuntil(b"begun"), BOUND_S)
        await until(lambda path=path: [asked.path for asked in replica.asked][-1:] == [path])  # type: ignore[misc]
        writer.close()
        await asyncio.wait_for(replica.asked[-1].gone.wait(), 2.0)


async def _delays_s(client: httpx.AsyncClient, url: str, sent_at: list[float]) -> list[float]:
    """How long each event of one stream was under way."""
    sent_at.clear()
    delays = []
    async with client.stream("POST", url) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                delays.append(time.monotonic() - sent_at[int(line.removeprefix("data: "))])
    return delays


async def test_events_of_a_stream_are_hardly_later_than_without_a_balancer(rig: Rig) -> None:
    sent_at: list[float] = []

    async def streams(asked: Asked) -> None:
        await asked.write(SSE_HEAD)
        for number in range(EVENTS):
            sent_at.append(time.monotonic())
            await asked.write(event(number))
            await asyncio.sleep(0.02)
        await asked.write(END)

    replica = await rig.replica(streams)
    front = rig.balancer("model_proxy", replica.url)
    direct = [await _delays_s(rig.client, replica.url, sent_at) for _ in range(5)]
    balanced = [await _delays_s(rig.client, front.url("model_proxy"), sent_at) for _ in range(5)]
    assert {len(delays) for delays in (*direct, *balanced)} == {EVENTS}
    for part in (slice(0, 1), slice(1, None)):
        added_s = _median_s(delays[part] for delays in balanced) - _median_s(delays[part] for delays in direct)
        assert added_s < ADDED_MAX_S, part


def _median_s(parts: Iterable[list[float]]) -> float:
    return median(delay for delays in parts for delay in delays)


async def test_a_body_of_64_mib_reaches_the_service_whole(rig: Rig) -> None:
    replica = await rig.replica(fine)
    front = rig.balancer("environment", replica.url)
    body = bytes(64 * 2**20)
    assert (await rig.client.post(f"{front.url('environment')}/run", content=body)).status_code == 200
    assert replica.asked[0].body == body


async def test_the_service_learns_who_called(rig: Rig) -> None:
    replica = await rig.replica(fine)
    front = rig.balancer("environment", replica.url)
    await rig.client.get(f"{front.url('environment')}/version")
    assert replica.asked[0].headers["x-forwarded-for"] == "127.0.0.1"


async def test_what_went_wrong_is_logged_without_any_secret(rig: Rig) -> None:
    replica = await rig.replica(drops)
    front = rig.balancer("model_proxy", replica.url)
    url = f"{front.url('model_proxy')}/v1/responses?api_key=secret-1"
    headers = {"Authorization": "Bearer secret-2", "Cookie": "session=secret-3", "x-api-key": "secret-4"}
    with pytest.raises(httpx.TransportError):
        await rig.client.post(url, headers=headers, content="secret-5")
    await until(lambda: "responses" in front.log)
    assert "secret" not in front.log


async def test_a_reload_refuses_nothing_cuts_nothing_and_goes_over_to_the_new_replicas(rig: Rig) -> None:
    go_on = asyncio.Event()

    async def answers(asked: Asked) -> None:
        if asked.path != "/stream":
            await asked.write(FINE)
            return
        await asked.write(SSE_HEAD + event("before"))
        await go_on.wait()
        await asked.write(event("after") + END)

    before, after = [await rig.replica(answers) for _ in range(2)]
    front = rig.balancer("agent", before.url)
    url = front.url("agent")
    stop = asyncio.Event()

    async def keeps_asking() -> list[int | None]:
        statuses = []
        while not stop.is_set():
            statuses.append(await post(rig, f"{url}/run", ""))
        return statuses

    load = [asyncio.create_task(keeps_asking()) for _ in range(4)]
    async with rig.client.stream("POST", f"{url}/stream") as stream:
        lines = stream.aiter_lines()
        assert await anext(lines) == 'data: "before"'
        for urls in ([after.url], [before.url, after.url], [after.url]):
            await asyncio.to_thread(front.reload, {"agent": urls})
            await asyncio.sleep(0.1)
        stop.set()
        statuses = {status for statuses in await asyncio.gather(*load) for status in statuses}
        go_on.set()
        assert [line async for line in lines if line] == ['data: "after"']
    assert statuses == {200}
    assert before.asked
    assert after.asked


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not holds():  # noqa: ASYNC110 - another process tells no event
            await asyncio.sleep(0.005)
