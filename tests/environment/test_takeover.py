"""Environment servers that are killed, frozen or stopped in the middle of an episode: another one finishes it."""

import asyncio
import signal
from pathlib import Path

import pytest

from services.environment.page import episode_key
from shared.store.redis_scripts import LEASE_PARTS, slot_key
from tests.environment.parties import native
from tests.environment.replicas import SOON_S, Replicas, replicas

pytestmark = [pytest.mark.redis, pytest.mark.timeout(180)]

STORY = ["seed resources", "seed agent", "run", "close agent", "verify", "close resources"]


async def until(event: asyncio.Event) -> None:
    async with asyncio.timeout(SOON_S):
        await event.wait()


async def began(started: Replicas, step: str, rollout_id: str = "r1") -> asyncio.Event:
    """Let the first replica run an episode as far as `step`; the event lets that step go on."""
    gate = started.parties.hold(step)
    reply = await started.all[0].run(native(rollout_id), Prefer="respond-async, wait=0")
    assert reply.status_code == 202
    await until(started.parties.event(step))
    return gate


@pytest.mark.parametrize("step", STORY)
async def test_an_episode_whose_server_is_killed_is_finished_by_another(tmp_path: Path, step: str) -> None:
    async with replicas(tmp_path) as started:
        parties = started.parties
        gate = await began(started, step)
        started.all[0].kill()
        await until(parties.event(step, 2))
        gate.set()
        answer = await started.all[1].outcome("r1")
        assert answer["result"]["reward"] == 1.0
        assert answer["evidence"]["takeovers"] == 1
        for bodies in parties.bodies.values():
            # What is asked for again is the same session and the same request: it is joined, not done twice.
            assert all(_without_time_left(body) == _without_time_left(bodies[0]) for body in bodies)
        assert parties.order.index("close agent") < parties.order.index("verify")
        assert parties.order[-1] == "close resources"
        assert started.keys_without_ttl() == []
        replayed = await started.all[1].run(native("r1"))
        assert replayed.json() == answer


def _without_time_left(body: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in body.items() if name != "deadline"}


@pytest.mark.parametrize("step", ["run", "verify"])
async def test_a_frozen_server_that_wakes_up_changes_nothing(tmp_path: Path, step: str) -> None:
    async with replicas(tmp_path) as started:
        parties = started.parties
        gate = await began(started, step)
        started.all[0].freeze()
        await until(parties.event(step, 2))
        # The successor is in the same step now; what the frozen one does on waking must not disturb it.
        before = len(parties.order)
        started.all[0].thaw()
        await started.all[0].ready()
        assert (await started.all[0].http.get("/episodes/r1")).status_code == 202
        assert parties.order[before:] == []
        gate.set()
        answers = [await replica.outcome("r1") for replica in started.all]
        assert answers[0] == answers[1]
        assert answers[0]["result"]["reward"] == 1.0
        assert parties.order[before:].count("close agent") <= 1
        assert parties.order.count("close resources") == 1


async def test_a_server_that_froze_at_the_very_end_keeps_no_claim_on_what_has_ended(tmp_path: Path) -> None:
    keys = [f"r{number}" for number in range(10)]
    async with replicas(tmp_path, count=1) as started:
        gate = started.parties.hold("close resources")
        for key in keys:
            await started.all[0].run(native(key), Prefer="respond-async, wait=0")
        await until(started.parties.event("close resources", len(keys)))
        started.all[0].freeze()
        gate.set()
        await until_unclaimed(started, keys)
        started.all[0].thaw()
        for key in keys:
            assert (await started.all[0].outcome(key))["result"]["reward"] == 1.0
        await until_unclaimed(started, keys)


async def until_unclaimed(started: Replicas, keys: list[str]) -> None:
    """Until nobody has a claim on these episodes that has not run out."""
    names = [slot_key(LEASE_PARTS[1], episode_key(key)) for key in keys]
    async with asyncio.timeout(SOON_S):
        while True:
            now_s, now_us = started.redis.ask("TIME")
            now = int(now_s) * 1_000_000 + int(now_us)
            if not any(started.redis.ask("ZCOUNT", name, now, "+inf") for name in names):
                return
            await asyncio.sleep(0.1)


async def test_a_stopped_server_hands_its_episodes_over_at_once(tmp_path: Path) -> None:
    async with replicas(tmp_path, lease_s=30.0) as started:
        gate = await began(started, "run")
        waiting = asyncio.create_task(started.all[1].outcome("r1"))
        started.all[0].process.send(signal.SIGTERM)
        assert await asyncio.to_thread(started.all[0].process.ended, SOON_S) == 143
        await until(started.parties.event("run", 2))
        gate.set()
        answer = await waiting
        assert answer["result"]["reward"] == 1.0
        assert started.parties.order.count("close agent") == 1


async def test_a_lone_server_that_is_restarted_goes_on_with_its_episodes(tmp_path: Path) -> None:
    async with replicas(tmp_path, count=1) as started:
        gate = await began(started, "run")
        started.all[0].kill()
        again = await started.start()
        await until(started.parties.event("run", 2))
        gate.set()
        assert (await again.outcome("r1"))["result"]["reward"] == 1.0


async def test_a_repeated_request_takes_over_at_once_what_no_server_has(tmp_path: Path) -> None:
    async with replicas(tmp_path) as started:
        gate = await began(started, "run")
        started.all[0].kill()
        gate.set()
        async with asyncio.timeout(SOON_S):
            reply = await started.all[1].run(native("r1"))
        assert reply.json()["result"]["reward"] == 1.0


@pytest.mark.behaviour("ES-27")
async def test_the_episodes_time_goes_on_under_the_next_server(tmp_path: Path) -> None:
    async with replicas(tmp_path, episode_timeout_s=6.0) as started:
        await began(started, "run")
        started.all[0].kill()
        await until(started.parties.event("run", 2))
        taken_over_at = asyncio.get_running_loop().time()
        answer = await started.all[1].outcome("r1")
        assert answer["result"]["agent_timed_out"]["set_by"] == "episode"
        assert asyncio.get_running_loop().time() - taken_over_at < 5.0


async def test_a_failure_stays_what_it_was_when_its_server_dies_in_the_cleanup(tmp_path: Path) -> None:
    async with replicas(tmp_path) as started:
        started.parties.fail("run", 500, body={"error": {"message": "the harness fell over"}})
        await began(started, "close agent")
        started.all[0].kill()
        await until(started.parties.event("close agent", 2))
        del started.parties.hooks["close agent"]
        started.all[1].process.send(signal.SIGCONT)
        failure = (await started.all[1].outcome("r1"))["failure"]
        assert "the harness fell over" in failure["failure_reason"]
        assert failure["stage"] == "agent"
        assert "verify" not in started.parties.order


async def test_a_client_cancels_over_any_server(tmp_path: Path) -> None:
    async with replicas(tmp_path) as started:
        await began(started, "run")
        assert (await started.all[1].http.delete("/episodes/r1")).status_code == 202
        answers = [await replica.outcome("r1") for replica in started.all]
        assert answers[0] == answers[1]
        assert answers[0]["failure"]["failure_kind"] == "cancelled"
        assert "verify" not in started.parties.order
        assert started.parties.order[-2:] == ["close agent", "close resources"]


async def test_a_cancellation_outlives_the_server_that_was_to_carry_it_out(tmp_path: Path) -> None:
    async with replicas(tmp_path, count=3) as started:
        await began(started, "run")
        started.all[0].freeze()
        assert (await started.all[1].http.delete("/episodes/r1")).status_code == 202
        started.all[0].kill()
        answer = await started.all[2].outcome("r1")
        assert answer["failure"]["failure_kind"] == "cancelled"
        assert "verify" not in started.parties.order


async def test_servers_share_one_admission_limit_and_a_dead_one_frees_its_places(tmp_path: Path) -> None:
    async with replicas(tmp_path, max_concurrent=1, queue_timeout_s=SOON_S) as started:
        parties = started.parties
        gate = await began(started, "run", "r1")
        second = await started.all[1].run(native("r2"), Prefer="respond-async, wait=1")
        assert second.json()["state"] == "queued"
        assert parties.order.count("seed resources") == 1
        started.all[0].kill()
        await until(parties.event("run", 2))
        gate.set()
        assert (await started.all[1].outcome("r1"))["result"]["reward"] == 1.0
        assert (await started.all[1].outcome("r2"))["result"]["reward"] == 1.0


async def test_a_queued_episode_whose_server_dies_is_run_by_another(tmp_path: Path) -> None:
    async with replicas(tmp_path, max_concurrent=1, queue_timeout_s=SOON_S) as started:
        gate = await began(started, "run", "r1")
        queued = await started.all[1].run(native("r2"), Prefer="respond-async, wait=0")
        assert queued.json()["state"] == "queued"
        started.all[1].kill()
        gate.set()
        assert (await started.all[0].outcome("r2"))["result"]["reward"] == 1.0


async def test_a_store_that_is_away_delays_an_episode_and_refuses_new_ones(tmp_path: Path) -> None:
    async with replicas(tmp_path) as started:
        gate = await began(started, "run")
        started.redis.stop()
        refused = await started.all[0].run(native("r2"))
        assert refused.status_code == 503
        assert refused.json()["failure"]["failure_kind"] == "persistence_failed"
        assert int(refused.headers["retry-after"]) >= 1
        assert (await started.all[0].http.get("/readyz")).status_code == 503
        gate.set()
        started.redis.start()
        answer = await started.all[1].outcome("r1")
        assert answer["result"]["reward"] == 1.0
        assert (await started.all[0].run(native("r2"))).json()["result"]["reward"] == 1.0


async def test_nothing_is_begun_that_other_servers_could_not_find(tmp_path: Path) -> None:
    async with replicas(tmp_path, count=1) as started:
        row = native("r1")
        row["task"]["task_input"]["responses_create_params"]["instructions"] = "x" * 8_000_000
        used = started.redis.ask("INFO", "memory")["used_memory"]
        # The row fills the store, so that the list of open episodes cannot be written any more.
        started.redis.ask("CONFIG", "SET", "maxmemory", used + 4_000_000)
        assert (await started.all[0].run(row)).status_code == 503
        assert started.parties.order == []
        started.redis.ask("CONFIG", "SET", "maxmemory", 0)
        async with asyncio.timeout(SOON_S):
            while (reply := await started.all[0].run(row)).status_code == 503:
                pass
        assert reply.json()["result"]["reward"] == 1.0
        assert started.parties.order.count("run") == 1


async def test_a_store_that_lost_everything_is_told_of_the_episodes_that_run(tmp_path: Path) -> None:
    async with replicas(tmp_path, lease_s=30.0) as started:
        gate = await began(started, "run")
        started.redis.ask("FLUSHALL")
        gate.set()
        reply = await started.all[0].run(native("r1"))
        assert reply.json()["result"]["reward"] == 1.0
        assert started.parties.order.count("run") == 1
        assert started.keys_without_ttl() == []
