"""An owner that stands still for longer than its claim lives, while another takes over, changes nothing on waking."""

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from services.agent.record import record_key
from services.environment.page import episode_key
from services.environment.record import decoded
from services.resources.records import store_key
from shared.clients.agent import AgentClient
from shared.clients.resources import ResourcesClient
from shared.contracts.agent import CloseAgentRequest, SeedAgentRequest
from shared.contracts.episode import EpisodeId, TaskId
from shared.contracts.failure import FailureKind
from shared.contracts.resources import SeedResourcesRequest
from shared.deadline import Deadline
from shared.errors import ServiceError
from shared.http.client import HttpClient
from tests.chaos.fleet import LEASE_S, MESH_TOKEN, Fleet, Replica
from tests.chaos.journal import stamp
from tests.chaos.rows import Task
from tests.chaos.trial import ended, prepared

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.redis,
    pytest.mark.balancer,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="package"),
]

SOON_S = 60.0


@pytest_asyncio.fixture(loop_scope="package")
async def http() -> AsyncIterator[HttpClient]:
    client = HttpClient(MESH_TOKEN)
    yield client
    await client.close()


async def test_an_environment_server(shared_fleet: Fleet, tell: list[str]) -> None:
    fleet, task, began = shared_fleet, Task("frozen-environment", "math", True), stamp()
    client, faults = prepared(fleet, [task], 1)
    fleet.model.hold(lambda _key, turn: turn == 0)
    running = asyncio.create_task(client.run_all(fleet.url, [task]))
    await fleet.model.wait_until_held([task.key()])
    key = episode_key(task.key())
    stored = await fleet.store.get(key)
    assert stored is not None
    frozen = await _named(fleet.replicas["environment"], decoded(stored.value).owner)
    frozen.send(signal.SIGSTOP)
    assert await fleet.store.wait_for_change(key, version=stored.version, timeout_s=SOON_S) != stored
    fleet.model.let_go()
    episodes = await running
    before = await fleet.store.get(key)
    frozen.send(signal.SIGCONT)
    await frozen.ready()
    await asyncio.sleep(LEASE_S)
    assert await fleet.store.get(key) == before
    trial = await ended(fleet, client, faults, episodes, began)
    tell += ["a frozen environment server", *trial.told]
    trial.require_all_well()
    assert [episode.ended_as for episode in episodes] == ["result"]


async def test_an_agent_server(shared_fleet: Fleet, http: HttpClient) -> None:
    fleet, task = shared_fleet, Task("frozen-agent", "math", True)
    fleet.model.know([task])
    fleet.model.hold(lambda _key, turn: turn == 0)
    frozen, other, _ = fleet.replicas["agent"]
    first, second = (AgentClient(http, replica.url, "tool_loop") for replica in (frozen, other))
    episode = EpisodeId(rollout_id=task.rollout_id)
    session = "agent-session-frozen"
    seed = SeedAgentRequest(
        agent_session_id=session, episode_id=episode, task_id=TaskId(taskset="chaos", task_id="1"), tool_accesses=[]
    )
    cookies = (await first.seed(seed, timeout_s=SOON_S)).cookies
    body = b'{"input":"#frozen-agent# What is it?"}'
    deadline = Deadline.after(SOON_S)
    waiting = asyncio.create_task(first.activate(body, key=task.key(), cookies=cookies, deadline=deadline))
    await fleet.model.wait_until_held([task.key()])
    frozen.send(signal.SIGSTOP)
    try:
        with pytest.raises(ServiceError) as lost:
            await second.activate(body, key=task.key(), cookies=cookies, deadline=deadline)
        assert lost.value.kind is FailureKind.SESSION_LOST
        close = CloseAgentRequest(agent_session_id=session, episode_id=episode)
        receipt = await second.close(close, cookies=cookies, timeout_s=SOON_S)
        before = await fleet.store.get(record_key(session))
        fleet.model.let_go()
    finally:
        frozen.send(signal.SIGCONT)
    with pytest.raises(ServiceError):
        await waiting
    await asyncio.sleep(LEASE_S)
    assert await fleet.store.get(record_key(session)) == before
    assert await first.close(close, cookies=cookies, timeout_s=SOON_S) == receipt
    assert fleet.model.turns[task.key()] == {0: 1}


@pytest.mark.full
async def test_a_resources_server(shared_fleet: Fleet, http: HttpClient) -> None:
    fleet, task = shared_fleet, Task("frozen-resources", "judged", True)
    fleet.model.know([task])
    fleet.model.hold(lambda _key, turn: turn == -1)
    frozen, other, _ = fleet.replicas["resources"]
    first, second = (ResourcesClient(http, replica.url, "judged") for replica in (frozen, other))
    session = "resources-session-frozen"
    data = {"question": "#frozen-resources# What is it?", "expected_answer": "12"}
    seed = SeedResourcesRequest(
        resources_session_id=session,
        episode_id=EpisodeId(rollout_id=task.rollout_id),
        task_id=TaskId(taskset="chaos", task_id="1"),
        task_data=data,
    )
    cookies = (await first.seed(seed, timeout_s=SOON_S)).cookies
    waiting = asyncio.create_task(first.verify(_SUBMISSION, cookies=cookies, timeout_s=SOON_S))
    await fleet.model.wait_until_held([task.key()])
    frozen.send(signal.SIGSTOP)
    try:
        asking = asyncio.create_task(second.verify(_SUBMISSION, cookies=cookies, timeout_s=SOON_S))
        await fleet.model.wait_until_judged(task.key(), 2)
        fleet.model.let_go()
        verified = await asking
        before = await fleet.store.get(store_key(session))
    finally:
        frozen.send(signal.SIGCONT)
    assert (await waiting).raw == verified.raw
    assert verified.verdict.reward == 1.0
    await asyncio.sleep(LEASE_S)
    assert await fleet.store.get(store_key(session)) == before


_SUBMISSION = (
    b'{"responses_create_params":{"input":"x"},"response":{"id":"resp_1","object":"response","status":"completed",'
    b'"output":[{"type":"message","id":"msg_1","role":"assistant","status":"completed",'
    b'"content":[{"type":"output_text","text":"\\\\boxed{13}","annotations":[]}]}]}}'
)


async def _named(replicas: list[Replica], owner: str) -> Replica:
    """The replica that has given itself the name in an owner's."""
    names = [await replica.instance() for replica in replicas]
    return replicas[names.index(owner.partition(".")[0])]
