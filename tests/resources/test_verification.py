"""Verification: once per session, bounded, replayed; failures are never rewards."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest

from shared.ports.store import Lease, Record
from shared.store.memory import MemoryStore
from tests.resources.plugins.verifiers.scripted import RUNS, gate
from tests.resources.rig import FAKES, Served, close_body, loaded, resources, seed_body, verify_body

ENTRIES: dict[str, Any] = {
    "easy": {"verifier": "scripted"},
    "hasty": {"verifier": "scripted", "verify_timeout_s": 0.2},
    "bound": {"verifier": "scripted", "needs_session": True},
    "lending": {"verifier": "scripted", "tools": ["ledger"]},
}


@pytest.fixture
async def server() -> AsyncIterator[Served]:
    async with resources(loaded(ENTRIES), plugins=FAKES) as served:
        yield served


async def test_concurrent_verifies_run_the_verifier_once(server: Served) -> None:
    task = {"name": "concurrent"}
    started, go_on = gate("concurrent")
    cookies = await server.seed("easy", "s", task)
    calls = [asyncio.create_task(server.post("easy/verify", verify_body(task), cookies=cookies)) for _ in range(8)]
    await asyncio.wait_for(started.wait(), 5)
    go_on.set()
    replies = await asyncio.gather(*calls)
    assert {reply.status_code for reply in replies} == {200}
    assert len({reply.content for reply in replies}) == 1
    assert RUNS["concurrent"] == 1


async def test_a_caller_that_leaves_does_not_end_the_verification_for_the_others(server: Served) -> None:
    task = {"name": "leaver"}
    started, go_on = gate("leaver")
    cookies = await server.seed("easy", "s", task)
    leaver = asyncio.create_task(server.post("easy/verify", verify_body(task), cookies=cookies))
    await asyncio.wait_for(started.wait(), 5)
    leaver.cancel()
    stayer = asyncio.create_task(server.post("easy/verify", verify_body(task), cookies=cookies))
    go_on.set()
    assert (await stayer).json()["run"] == 1
    assert RUNS["leaver"] == 1


async def test_a_verifiers_own_fields_travel_as_they_are(server: Served) -> None:
    task = {"name": "fields", "reward": 0.25}
    cookies = await server.seed("easy", "s", task)
    verdict = (await server.post("easy/verify", verify_body(task), cookies=cookies)).json()
    assert verdict == {
        "reward": 0.25, "mask_sample": False, "run": 1, "nothing": None, "state": {}, "text": "größer",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ({"name": "raises", "end": "raise"}, "ValueError: the answer sheet is missing"),
        ({"name": "not_json", "end": "not_json"}, "failed: TypeError"),
    ],
)
async def test_a_verifier_that_fails_is_a_failure_and_can_be_asked_again(
    server: Served, task: dict[str, Any], says: str
) -> None:
    cookies = await server.seed("easy", "s", task)
    for run in (1, 2):
        reply = await server.post("easy/verify", verify_body(task), cookies=cookies)
        assert reply.status_code == 500
        assert reply.json()["failure"] == {"failure_kind": "verifier_error", "terminal": True, "stage": "verification"}
        assert says in reply.json()["error"]["message"]
        assert "sk-abc" not in reply.text
        assert "reward" not in reply.json()
        assert RUNS[task["name"]] == run


async def test_a_verifier_that_takes_too_long_is_a_retryable_failure(server: Served) -> None:
    task = {"name": "hangs", "end": "hang"}
    cookies = await server.seed("hasty", "s", task)
    reply = await server.post("hasty/verify", verify_body(task), cookies=cookies)
    assert reply.status_code == 500
    assert reply.json()["failure"]["terminal"] is False
    assert "longer than 0.2 s" in reply.json()["error"]["message"]


async def test_without_a_session_a_verifier_that_needs_one_gives_no_grade(server: Served) -> None:
    for entry in ("bound", "lending"):
        reply = await server.post(f"{entry}/verify", verify_body({"name": "none"}))
        assert reply.status_code == 410
        assert reply.json()["failure"]["failure_kind"] == "session_lost"
    assert RUNS["none"] == 0


async def test_a_stateless_verifier_grades_from_the_body_when_the_session_is_gone(server: Served) -> None:
    async with resources(loaded(ENTRIES), plugins=FAKES) as another_store:
        cookies = await another_store.seed("easy", "gone", {"name": "alone"})
    assert (await server.post("easy/verify", verify_body({"name": "alone"}), cookies=cookies)).json()["run"] == 1
    misfit = await server.post("easy/verify", verify_body({"name": 5}))
    assert misfit.status_code == 422
    assert misfit.json()["detail"][0]["loc"] == ["name"]


@pytest.mark.parametrize("missing", ["response", "responses_create_params"])
async def test_a_verify_body_without_its_parts_is_refused(server: Served, missing: str) -> None:
    body = verify_body({"name": "parts"})
    del body[missing]
    refused = await server.post("easy/verify", body)
    assert refused.status_code == 422
    assert refused.json()["detail"][0]["loc"] == [missing]


async def test_the_seeded_task_data_counts_and_the_body_may_not_change_it(server: Served) -> None:
    cookies = await server.seed("easy", "s", {"name": "seeded", "reward": 0.5})
    changed = await server.post("easy/verify", verify_body({"name": "seeded", "reward": 1.0}), cookies=cookies)
    assert changed.status_code == 422
    assert changed.json()["detail"][0]["loc"] == ["reward"]
    left_out = await server.post("easy/verify", verify_body({"_ng_note": 1}), cookies=cookies)
    assert left_out.json()["reward"] == 0.5


async def test_a_session_closed_without_a_verdict_is_not_graded(server: Served) -> None:
    task = {"name": "closed"}
    cookies = await server.seed("bound", "s", task)
    await server.post("bound/close_session", close_body("s"))
    assert (await server.post("bound/verify", verify_body(task), cookies=cookies)).status_code == 410
    assert RUNS["closed"] == 0


async def test_a_close_ends_a_running_verification(server: Served) -> None:
    task = {"name": "ended"}
    started, _ = gate("ended")
    cookies = await server.seed("bound", "s", task)
    verifying = asyncio.create_task(server.post("bound/verify", verify_body(task), cookies=cookies))
    await asyncio.wait_for(started.wait(), 5)
    assert (await server.post("bound/close_session", close_body("s"))).json()["status"] == "closed"
    assert (await asyncio.wait_for(verifying, 5)).status_code == 410


async def test_replicas_run_the_verifier_once_and_both_answer() -> None:
    store = MemoryStore()
    task = {"name": "replicas"}
    started, go_on = gate("replicas")
    async with (
        resources(loaded(ENTRIES), plugins=FAKES, store=store) as one,
        resources(loaded(ENTRIES), plugins=FAKES, store=store) as two,
    ):
        cookies = await one.seed("bound", "s", task)
        first = asyncio.create_task(one.post("bound/verify", verify_body(task), cookies=cookies))
        await asyncio.wait_for(started.wait(), 5)
        second = asyncio.create_task(two.post("bound/verify", verify_body(task), cookies=cookies))
        late = await two.post("bound/seed_session", seed_body("s", task))
        go_on.set()
        replies = await asyncio.gather(first, second)
        after = await one.post("bound/verify", verify_body(task), cookies=cookies)
    assert late.status_code == 200
    assert replies[0].content == replies[1].content == after.content
    assert RUNS["replicas"] == 1


async def test_a_live_verification_keeps_its_claim_however_long_it_takes() -> None:
    store = MemoryStore()
    task = {"name": "long"}
    started, go_on = gate("long")
    async with (
        resources(loaded(ENTRIES), plugins=FAKES, store=store, lease_s=0.6) as one,
        resources(loaded(ENTRIES), plugins=FAKES, store=store, lease_s=0.6) as two,
    ):
        cookies = await one.seed("bound", "s", task)
        first = asyncio.create_task(one.post("bound/verify", verify_body(task), cookies=cookies))
        await asyncio.wait_for(started.wait(), 5)
        second = asyncio.create_task(two.post("bound/verify", verify_body(task), cookies=cookies))
        done, _ = await asyncio.wait({first, second}, timeout=1.5)
        assert done == set()
        go_on.set()
        replies = await asyncio.gather(first, second)
    assert replies[0].content == replies[1].content
    assert RUNS["long"] == 1


async def test_another_replica_takes_over_from_one_that_died() -> None:
    store = MemoryStore()
    task = {"name": "orphan"}
    async with resources(loaded(ENTRIES), plugins=FAKES, store=store, lease_s=0.3) as survivor:
        cookies = await survivor.seed("bound", "s", task)
        record = await store.get("resources:{s}")
        assert record is not None
        # What a process leaves that is killed in the middle of a verification.
        claimed = orjson.loads(record.value) | {"state": "verifying", "claim": "of the dead"}
        await store.replace("resources:{s}", orjson.dumps(claimed), version=record.version, ttl_s=60)
        reply = await asyncio.wait_for(survivor.post("bound/verify", verify_body(task), cookies=cookies), 5)
    assert reply.json()["run"] == 1


async def test_a_shutdown_gives_the_claim_back_for_the_next_replica() -> None:
    store = MemoryStore()
    task = {"name": "stopped"}
    started, go_on = gate("stopped")
    async with resources(loaded(ENTRIES), plugins=FAKES, store=store) as one:
        cookies = await one.seed("bound", "s", task)
        left = asyncio.create_task(one.post("bound/verify", verify_body(task), cookies=cookies))
        await asyncio.wait_for(started.wait(), 5)
    with pytest.raises((httpx.HTTPError, AssertionError)):
        assert (await left).status_code == 200
    go_on.set()
    async with resources(loaded(ENTRIES), plugins=FAKES, store=store) as two:
        reply = await asyncio.wait_for(two.post("bound/verify", verify_body(task), cookies=cookies), 5)
    assert reply.json()["run"] == 2


class CountingStore(MemoryStore):
    """Notes every operation on a record."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

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
        return await super().replace(key, value, version=version, ttl_s=ttl_s, lease=lease)


async def test_a_plain_episode_takes_four_store_operations() -> None:
    store = CountingStore()
    task = {"name": "thrifty"}
    async with resources(loaded(ENTRIES), plugins=FAKES, store=store) as server:
        cookies = await server.seed("bound", "s", task)
        await server.post("bound/verify", verify_body(task), cookies=cookies)
        await server.post("bound/close_session", close_body("s"))
    assert store.operations == ["create", "replace", "replace", "replace"]


async def test_a_record_of_another_release_is_a_lost_session() -> None:
    store = MemoryStore()
    await store.create("resources:{s}", b'{"schema_version":99}', ttl_s=60)
    async with resources(loaded(ENTRIES), plugins=FAKES, store=store) as server:
        reply = await server.post("bound/seed_session", seed_body("s", {"name": "old"}))
    assert reply.status_code == 410


async def test_results_are_aggregated_and_gaps_told(server: Served) -> None:
    results = [
        {"reward": 1.0, "reward_components": {"form": 1.0}},
        {"reward": 0.0, "reward_components": {"form": 0.5}},
        {"reward": 0.0, "mask_sample": True, "failure_kind": "judge_failed"},
        {"failure": {"failure_kind": "provider_lost"}},
        {"reward": 0.0, "mask_sample": True},
    ]
    for body in ({"results": results}, results):
        metrics = (await server.post("easy/aggregate_metrics", body)).json()
        assert metrics == {
            "count": 5,
            "graded": 2,
            "coverage": 0.4,
            "mean_reward": 0.5,
            "reward_deviation": 0.5,
            "mean_reward_components": {"form": 0.75},
            "gaps": {"judge_failed": 1, "masked": 1, "provider_lost": 1},
            "scripted": {"seen": 2},
        }
    empty = (await server.post("easy/aggregate_metrics", {"results": []})).json()
    assert (empty["count"], empty["mean_reward"], empty["coverage"]) == (0, None, None)
    for wrong in ({"results": 1}, {}, [1]):
        assert (await server.post("easy/aggregate_metrics", wrong)).status_code == 422
