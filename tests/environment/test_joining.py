"""One episode id, one episode: join, replay, conflict; short connections; cancellation."""

import asyncio
from typing import Any

import httpx
import orjson
import pytest

from tests.environment.parties import House, flat, house, native

SOON_S = 10.0


async def until(event: asyncio.Event) -> None:
    async with asyncio.timeout(SOON_S):
        await event.wait()


async def test_the_same_request_joins_and_later_replays() -> None:
    async with house() as home:
        gate = home.parties.hold("run")
        first = asyncio.create_task(home.run(native()))
        await until(home.parties.event("run"))
        others = [asyncio.create_task(home.run(native())) for _ in range(5)]
        await asyncio.sleep(0)
        gate.set()
        replies = [reply.content for reply in await asyncio.gather(first, *others)]
        replies.append((await home.run(native())).content)
        assert len(set(replies)) == 1
        assert home.parties.order.count("run") == 1


async def test_failures_are_replayed_too_and_another_attempt_runs_anew() -> None:
    async with house() as home:
        home.parties.fail("run", 500, times=1)
        first = await home.run(native())
        assert first.json()["failure"]["terminal"] is False
        assert (await home.run(native())).content == first.content
        assert (await home.run(native(attempt=1))).json()["result"]["reward"] == 1.0


async def test_another_body_for_the_same_episode_is_a_conflict() -> None:
    async with house() as home:
        await home.run(native())
        reply = await home.run(native(hint="other"))
        assert reply.status_code == 409
        assert reply.json()["failure"]["failure_kind"] == "conflict"
        assert home.parties.order.count("run") == 1


async def test_an_idempotency_key_names_a_flat_rows_episode() -> None:
    async with house() as home:
        first = await home.run(flat(), **{"Idempotency-Key": "k1"})
        again = await home.run(flat(), **{"Idempotency-Key": "k1"})
        assert first.content == again.content
        assert first.json()["episode_id"]["rollout_id"] == "k1"
        assert home.parties.order.count("run") == 1


async def test_a_client_that_goes_away_leaves_the_episode_running() -> None:
    async with house() as home:
        gate = home.parties.hold("run")
        with pytest.raises(httpx.ReadTimeout):
            await home.http.post("/run", content=orjson.dumps(native()), timeout=httpx.Timeout(0.3, connect=SOON_S))
        await until(home.parties.event("run"))
        gate.set()
        assert (await home.run(native())).json()["result"]["reward"] == 1.0
        assert home.parties.order.count("run") == 1


@pytest.mark.behaviour("ES-34")
async def test_a_client_may_ask_that_its_leaving_cancels_the_episode() -> None:
    async with house() as home:
        home.parties.hold("run")
        headers = {"X-Paddock-On-Disconnect": "cancel"}
        asked = asyncio.create_task(home.http.post("/run", content=orjson.dumps(native()), headers=headers))
        await until(home.parties.event("run"))
        asked.cancel()
        reply = await ended(home, "r1")
        assert reply["failure"]["failure_kind"] == "cancelled"
        assert home.parties.order[-2:] == ["close agent", "close resources"]
        assert "verify" not in home.parties.order


async def ended(home: House, key: str) -> Any:
    reply = await home.http.get(f"/episodes/{key}", headers={"Prefer": "wait=10"})
    assert reply.status_code == 200
    return reply.json()


@pytest.mark.behaviour("ES-23", "ES-34")
@pytest.mark.parametrize("step", ["seed resources", "seed agent", "run", "close agent", "verify"])
async def test_an_episode_can_be_cancelled_at_every_stage_and_is_cleaned_up(step: str) -> None:
    async with house() as home:
        home.parties.hold(step)
        waiting = asyncio.create_task(home.run(native()))
        await until(home.parties.event(step))
        cancelled = await home.http.delete("/episodes/r1")
        assert cancelled.status_code == 202
        if step == "close agent":
            home.parties.hooks.clear()
        failure = (await waiting).json()["failure"]
        assert failure["failure_kind"] == "cancelled"
        assert failure["terminal"] is False
        assert home.parties.order[-1] == "close resources"
        assert ("close agent" in home.parties.order) == (step != "seed resources")
        if step != "verify":
            assert "verify" not in home.parties.order
        assert (await home.http.delete("/episodes/r1")).status_code == 409


async def test_unknown_episodes_are_not_found() -> None:
    async with house() as home:
        for reply in (
            await home.http.get("/episodes/nobody"),
            await home.http.delete("/episodes/nobody"),
            await home.http.get("/episodes/nobody/events"),
        ):
            assert reply.status_code == 404
            assert "nobody" in reply.json()["error"]["message"]


async def test_long_episodes_are_waited_for_over_short_connections() -> None:
    async with house() as home:
        gate = home.parties.hold("run")
        reply = await home.run(native(), Prefer="respond-async")
        assert reply.status_code == 202
        assert reply.headers["location"] == "/episodes/r1"
        await until(home.parties.event("run"))
        reply = await home.http.get(reply.headers["location"], headers={"Prefer": "wait=1"})
        assert reply.status_code == 202
        assert reply.json() == {"key": "r1", "environment": "sums", "state": "running", "stage": "agent"}
        gate.set()
        reply = await home.http.get("/episodes/r1", headers={"Prefer": "wait=10"})
        assert reply.json()["result"]["reward"] == 1.0


async def test_episodes_are_listed_in_order_and_by_state() -> None:
    async with house() as home:
        await asyncio.gather(*(home.run(native(f"r{n}")) for n in range(5)))
        home.parties.hold("run")
        await home.run(native("r9"), Prefer="respond-async")
        await until(home.parties.event("run"))
        listed = (await home.http.get("/episodes?state=done&limit=2&after=r0")).json()["episodes"]
        assert [episode["key"] for episode in listed] == ["r1", "r2"]
        running = (await home.http.get("/episodes?state=running")).json()["episodes"]
        assert [episode["key"] for episode in running] == ["r9"]


async def test_stage_changes_are_streamed_until_the_end() -> None:
    async with house() as home:
        gate = home.parties.hold("run")
        await home.run(native(), Prefer="respond-async")
        await until(home.parties.event("run"))
        seen = []
        async with asyncio.timeout(SOON_S), home.http.stream("GET", "/episodes/r1/events") as stream:
            assert stream.headers["x-accel-buffering"] == "no"
            async for line in stream.aiter_lines():
                if line.startswith("data: "):
                    seen.append(orjson.loads(line[6:]))
                    gate.set()
        assert seen[0]["stage"] == "agent"
        assert seen[-1]["state"] == "done"


@pytest.mark.behaviour("ES-62")
async def test_aggregate_metrics_are_the_resources_servers_word() -> None:
    async with house() as home:
        reply = await home.http.post("/aggregate_metrics", json={"results": [{"reward": 1}, {"reward": 0}]})
        assert reply.json() == {"rows": 2}
        assert (await home.http.post("/aggregate_metrics?environment=other", json={})).status_code == 422
