"""Any replica joins, replays, closes or takes over any session."""

import asyncio

import pytest

from shared.clients.agent import AgentClient
from shared.contracts.agent import CloseAgentRequest, SeedAgentRequest
from shared.deadline import Deadline
from shared.errors import StoreUnavailableError
from shared.http.client import HttpClient
from shared.ports.store import Lease, Record
from shared.store.memory import MemoryStore
from tests.agent.peers import message
from tests.agent.rig import Clock, running


class CountingStore(MemoryStore):
    """Counts operations; while `away` is set, every change fails."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.operations: list[str] = []
        self.away = asyncio.Event()
        self.refused = asyncio.Event()

    async def get(self, key: str) -> Record | None:
        self.operations.append("get")
        return await super().get(key)

    async def create(self, key: str, value: bytes, *, ttl_s: float) -> Record | None:
        self.operations.append("create")
        return await super().create(key, value, ttl_s=ttl_s)

    async def replace(
        self, key: str, value: bytes, *, version: int, ttl_s: float, lease: Lease | None = None
    ) -> Record:
        self.operations.append("replace")
        if self.away.is_set():
            self.refused.set()
            raise StoreUnavailableError("The store is away.", retry_after_s=1)
        return await super().replace(key, value, version=version, ttl_s=ttl_s, lease=lease)

    async def acquire(
        self, name: str, owner: str, *, ttl_s: float, places: int = 1, wait_s: float = 0.0
    ) -> Lease | None:
        self.operations.append("acquire")
        return await super().acquire(name, owner, ttl_s=ttl_s, places=places, wait_s=wait_s)

    async def release(self, lease: Lease) -> None:
        self.operations.append("release")
        await super().release(lease)


async def test_an_episode_costs_at_most_six_store_operations() -> None:
    store = CountingStore(Clock())
    async with running(store=store) as rig:
        caller = rig.session()
        await caller.seed()
        await caller.activate(Prefer="wait=30")
        await caller.close()
        assert store.operations == ["create", "acquire", "replace", "replace", "replace"]


async def test_another_replica_joins_a_run_and_replays_its_result() -> None:
    async with running(replicas=2) as rig:
        caller = rig.session()
        await caller.seed()
        rig.proxy.gate.clear()
        first = asyncio.create_task(caller.activate())
        await rig.proxy.asked.wait()
        joined = asyncio.create_task(caller.over(1).activate())
        rig.proxy.gate.set()
        answers = [(await first).content, (await joined).content, (await caller.over(1).activate()).content]
        assert len(set(answers)) == 1
        assert len(rig.proxy.requests) == 1
        assert (await caller.over(1).close()).json()["status"] == "closed"
        assert (await caller.close()).json()["status"] == "closed"


async def test_identical_activations_over_two_replicas_at_once_run_once() -> None:
    async with running(replicas=2) as rig:
        caller = rig.session()
        await caller.seed()
        answers = await asyncio.gather(*(caller.over(number % 2).activate() for number in range(20)))
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.content for answer in answers}) == 1
        assert len(rig.proxy.requests) == 1


@pytest.mark.behaviour("AG-22", "AG-32")
async def test_a_close_over_another_replica_stops_the_run() -> None:
    async with running(replicas=2) as rig:
        caller = rig.session()
        await caller.seed()
        rig.proxy.gate.clear()
        waiting = asyncio.create_task(caller.activate())
        await rig.proxy.asked.wait()
        receipt = await caller.over(1).close()
        assert (receipt.status_code, receipt.json()["status"]) == (200, "closed")
        assert (await waiting).status_code == 409
        assert (await caller.close()).content == receipt.content


async def test_a_run_whose_process_died_is_session_lost_for_joiners_and_closes_with_proof() -> None:
    async with running(replicas=2) as rig:
        caller = rig.session()
        await caller.seed()
        rig.proxy.gate.clear()
        dead = asyncio.create_task(caller.activate(Prefer="wait=0"))
        await rig.proxy.asked.wait()
        await dead
        rig.clock.now += 20
        lost = await caller.over(1).activate()
        assert (lost.status_code, lost.json()["failure"]["failure_kind"]) == (410, "session_lost")
        assert lost.json()["failure"]["terminal"] is False
        receipt = (await caller.over(1).close()).json()
        assert receipt["cleanup"]["cleanup_confirmed"] is True
        assert "died" in receipt["cleanup"]["error"]
        assert "agent_activation_interrupted" in receipt["agent_observations"]["gaps"]
        again = await caller.activate()
        assert again.status_code == 409


async def test_a_run_keeps_its_claim_where_claims_live_no_longer_than_it_does() -> None:
    async with running(replicas=2, store=MemoryStore(), lease_s=1.0) as rig:
        caller = rig.session()
        await caller.seed()
        rig.proxy.gate.clear()
        first = asyncio.create_task(caller.activate())
        await rig.proxy.asked.wait()
        joined = await caller.over(1).activate(Prefer="wait=3")
        assert joined.status_code == 202
        rig.proxy.gate.set()
        assert (await first).json()["output"] == [message("4")]


async def test_a_close_finds_that_the_runs_process_died() -> None:
    async with running(replicas=2) as rig:
        caller = rig.session()
        await caller.seed()
        rig.proxy.gate.clear()
        started = await caller.activate(Prefer="wait=0")
        await rig.proxy.asked.wait()
        assert started.status_code == 202
        rig.clock.now += 20
        receipt = await caller.over(1).close()
        assert receipt.json()["cleanup"]["cleanup_confirmed"] is True


async def test_a_store_that_is_away_for_a_moment_costs_no_result() -> None:
    store = CountingStore(Clock())
    async with running(store=store) as rig:
        caller = rig.session()
        await caller.seed()
        rig.proxy.gate.clear()
        waiting = asyncio.create_task(caller.activate())
        await rig.proxy.asked.wait()
        store.away.set()
        rig.proxy.gate.set()
        await store.refused.wait()
        store.away.clear()
        assert (await waiting).json()["output"] == [message("4")]


async def test_a_server_that_shuts_down_writes_that_its_runs_are_lost() -> None:
    store = MemoryStore()
    async with running(store=store) as rig:
        caller = rig.session()
        await caller.seed()
        rig.proxy.gate.clear()
        assert (await caller.activate(Prefer="wait=0")).status_code == 202
        await rig.proxy.asked.wait()
    async with running(store=store) as later:
        caller = later.session(**caller.seed_body)
        lost = await caller.activate(**{"X-Agent-Session": caller.session_id})
        assert (lost.status_code, lost.json()["failure"]["failure_kind"]) == (410, "session_lost")
        assert "shut down" in (await caller.close()).json()["cleanup"]["error"]


async def test_the_environments_client_fits_the_routes() -> None:
    async with running() as rig:
        http = HttpClient()
        client = AgentClient(http, rig.urls[0], "loop")
        body = rig.session().seed_body
        request = SeedAgentRequest.model_validate({**body, "agent_session_id": "odd; id~ü"})
        seeded = await client.seed(request, timeout_s=5)
        key = request.episode_id.key
        done = await client.activate(b'{"input":"x"}', key=key, cookies=seeded.cookies, deadline=Deadline.after(5))
        closing = CloseAgentRequest(agent_session_id="odd; id~ü", episode_id=request.episode_id)
        receipt = await client.close(closing, cookies=done.cookies, timeout_s=5)
        await http.close()
        assert done.response.status == "completed"
        assert receipt.cleanup.cleanup_confirmed is True
