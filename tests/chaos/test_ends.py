"""Everyone is asked to stop at once: all end in time, nothing is left, and those who come after go on."""

import asyncio
import signal

import pytest

from tests.chaos.fleet import TERMINATED, Fleet
from tests.chaos.journal import stamp
from tests.chaos.rows import tasks
from tests.chaos.trial import ended, prepared

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.redis,
    pytest.mark.balancer,
    pytest.mark.full,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="package"),
]


@pytest.mark.parametrize("store", ["there", "away"])
async def test_everyone_ends_in_time_and_leaves_nothing_behind(
    shared_fleet: Fleet, tell: list[str], store: str
) -> None:
    fleet = shared_fleet
    mine = tasks(f"all-end-store-{store}", 8)
    client, faults = prepared(fleet, mine, 1)
    began = stamp()
    fleet.model.hold(lambda _key, turn: turn == 0)
    running = asyncio.create_task(client.run_all(fleet.url, mine))
    await fleet.model.wait_until_held(task.key() for task in mine if task.kind != "queued")
    if store == "away":
        fleet.redis.signal(signal.SIGSTOP)
    try:
        ends = await asyncio.gather(*(replica.terminate() for replica in fleet.everyone), return_exceptions=True)
        left = await asyncio.to_thread(fleet.strays)
    finally:
        fleet.redis.signal(signal.SIGCONT)
    assert {replica.name: end for replica, end in zip(fleet.everyone, ends, strict=True) if end != TERMINATED} == {}
    assert left == []
    fleet.model.let_go()
    await asyncio.gather(*(replica.start() for replica in fleet.everyone))
    trial = await ended(fleet, client, faults, await running, began)
    tell += [f"everyone stops, the store is {store}", *trial.told]
    trial.require_all_well()
