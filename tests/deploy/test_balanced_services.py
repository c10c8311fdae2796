"""Two real model proxies behind the balancer: one that is asked to stop, and one that is killed, under load."""

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import orjson
import pytest

from tests import balancer
from tests.balancer import Balancer
from tests.mesh.processes import Running, running
from tests.model_proxy.wire import (
    COMPLETION,
    DONE,
    END,
    SSE_HEAD,
    Asked,
    RawUpstream,
    delta,
    event,
    events_of,
    json_body,
    piece,
    raw_upstream,
    request_of,
)
from tests.serving import free_port

pytestmark = [pytest.mark.balancer, pytest.mark.timeout(180)]

BOUND_S = 60.0
CALLERS = 6
HELD = 8
TERMINATED = 143


@dataclass
class Rig:
    stack: AsyncExitStack
    folder: Path
    model: RawUpstream
    ports: list[int]
    front: Balancer
    client: httpx.AsyncClient
    _started: "itertools.count[int]"

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def start(self, port: int) -> Running:
        environ = {"PADDOCK_MODEL_BASE_URL": self.model.url, "PADDOCK_MODEL_NAME": "m"}
        arguments = ("serve", "model-proxy", "--port", port)
        name = f"proxy-{next(self._started)}"
        return self.stack.enter_context(running(*arguments, cwd=self.folder, environ=environ, name=name))

    async def all_ready(self) -> None:
        await asyncio.to_thread(self.front.wait_until_ready, "model_proxy", self.urls, BOUND_S)

    async def ask(self, key: str, *, stream: bool) -> str | None:
        """How the model's response ended; None when its connection was dropped."""
        url = f"{self.front.url('model_proxy')}/rollouts/{key}/v1/responses"
        body = request_of("responses", stream=stream) | {"input": key}
        try:
            answered = await self.client.post(url, json=body)
        except httpx.TransportError:
            return None
        assert answered.status_code == 200, answered.text
        response = events_of(answered.text)[-1]["response"] if stream else answered.json()
        return str(response["status"])


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        model = await stack.enter_async_context(raw_upstream(answer))
        ports = [free_port(), free_port()]
        front = stack.enter_context(balancer.start({"model_proxy": [f"http://127.0.0.1:{port}" for port in ports]}))
        client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=BOUND_S))
        yield Rig(stack, tmp_path, model, ports, front, client, itertools.count())


async def answer(asked: Asked) -> None:
    """A model that takes its time, so that some call is always under way."""
    if not asked.json.get("stream"):
        await asyncio.sleep(0.1)
        await asked.write(json_body(COMPLETION))
        return
    await asked.write(SSE_HEAD + event(delta({"role": "assistant", "content": ""})))
    for word in ("slowly", " said"):
        await asyncio.sleep(0.1)
        await asked.write(event(delta({"content": word})))
    await asked.write(event(delta({}, "stop")) + piece(DONE) + END)


async def test_replicas_that_are_stopped_one_after_the_other_lose_no_call(rig: Rig) -> None:
    replicas = [rig.start(port) for port in rig.ports]
    await rig.all_ready()
    stop = asyncio.Event()

    async def keeps_asking(caller: int) -> list[str | None]:
        ends: list[str | None] = []
        while not stop.is_set():
            number = len(ends)
            ends.append(await rig.ask(f"caller-{caller}-{number}", stream=bool(number % 2)))
        return ends

    load = [asyncio.create_task(keeps_asking(caller)) for caller in range(CALLERS)]
    for replica, port in zip(replicas, rig.ports, strict=True):
        replica.send(signal.SIGTERM)
        assert await asyncio.to_thread(replica.ended, BOUND_S) == TERMINATED
        rig.start(port)
        await rig.all_ready()
    stop.set()
    ends = [end for ends in await asyncio.gather(*load) for end in ends]
    assert len(ends) > CALLERS * 10
    assert set(ends) == {"completed"}


async def test_a_killed_replica_costs_only_the_calls_that_it_held_and_none_is_repeated(rig: Rig) -> None:
    go_on = asyncio.Event()

    async def held(asked: Asked) -> None:
        if b"held" in asked.body:
            await go_on.wait()
        await answer(asked)

    rig.model.handler = held
    killed, _ = [rig.start(port) for port in rig.ports]
    await rig.all_ready()
    calls = {f"held-{number}": number % 2 == 0 for number in range(HELD)}
    tasks = {key: asyncio.create_task(rig.ask(key, stream=stream)) for key, stream in calls.items()}
    async with asyncio.timeout(BOUND_S):
        while len(rig.model.asked) < HELD:
            rig.model.arrived.clear()
            await rig.model.arrived.wait()
    killed.kill()
    afterwards = await asyncio.gather(*(rig.ask(f"after-{number}", stream=False) for number in range(HELD)))
    go_on.set()
    ends = {key: await task for key, task in tasks.items()}
    assert set(afterwards) == {"completed"}
    lost = {key for key, end in ends.items() if end is None}
    assert {key for key, end in ends.items() if end == "completed"} == set(calls) - lost
    assert lost == {_key_of(asked) for asked in rig.model.asked[:HELD] if asked.gone.is_set()}
    assert 0 < len(lost) < HELD
    assert len(rig.model.asked) == 2 * HELD


def _key_of(asked: Asked) -> str:
    content = orjson.loads(asked.body)["messages"][-1]["content"]
    return str(content if isinstance(content, str) else content[0]["text"])
