"""One kind of fault at a time, so that a failure names its cause."""

import asyncio
import os

import pytest

from tests.chaos.fleet import Fleet
from tests.chaos.journal import stamp
from tests.chaos.rows import tasks
from tests.chaos.trial import ended, prepared

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.redis,
    pytest.mark.balancer,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="package"),
]

EPISODES = 8
SAMPLE = (
    "kill environment", "kill agent", "stop environment", "freeze environment", "freeze agent",
    "restart the balancer", "pause redis", "restart redis", "cut clients",
)  # fmt: skip
"""What CI has the time for; `make full` tries all."""
OTHERS = (
    "kill model_proxy", "kill resources", "stop agent", "stop model_proxy", "stop resources",
    "freeze model_proxy", "freeze resources", "reload the balancer",
)  # fmt: skip


@pytest.mark.parametrize("fault", [*SAMPLE, *(pytest.param(other, marks=pytest.mark.full) for other in OTHERS)])
async def test_episodes_survive(shared_fleet: Fleet, tell: list[str], fault: str) -> None:
    """All episodes are in their first turn when it happens."""
    fleet = shared_fleet
    mine = tasks(fault.replace(" ", "-"), EPISODES)
    client, faults = prepared(fleet, mine, int(os.environ.get("PADDOCK_CHAOS_SEED", "1")))
    began = stamp()
    fleet.model.hold(lambda _key, turn: turn == 0)
    running = asyncio.create_task(client.run_all(fleet.url, mine, twins=0.5))
    await fleet.model.wait_until_held(task.key() for task in mine if task.kind != "queued")
    fleet.model.pace(0.2)
    fault_done = asyncio.create_task(faults.do(fault))
    await asyncio.sleep(0.3)
    fleet.model.let_go()
    await fault_done
    trial = await ended(fleet, client, faults, await running, began)
    tell += [f"only '{fault}'", *trial.told]
    trial.require_all_well()
