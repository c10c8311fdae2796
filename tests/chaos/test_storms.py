"""All faults at once, in random order: a fixed short sample, and in `make full` long ones from fresh seeds, too."""

import os
import secrets

import pytest

from tests.chaos.fleet import Fleet
from tests.chaos.rows import tasks
from tests.chaos.trial import stormy

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.redis,
    pytest.mark.balancer,
    pytest.mark.timeout(1200),
    pytest.mark.asyncio(loop_scope="package"),
]


def _seeds(*fixed: int) -> list[int]:
    """`PADDOCK_CHAOS_SEED` repeats one; else the fixed ones, and a fresh one that the test's name tells."""
    given = os.environ.get("PADDOCK_CHAOS_SEED")
    return [int(given)] if given else [*fixed, secrets.randbelow(2**31)]


@pytest.mark.parametrize("seed", _seeds(1)[:1])
async def test_a_short_storm(shared_fleet: Fleet, tell: list[str], seed: int) -> None:
    trial = await stormy(shared_fleet, tasks(f"short-{seed}", 40), seed, at_once=20)
    tell += [f"a short storm, seed {seed}", *trial.told]
    trial.require_all_well()
    assert trial.graded > 0


@pytest.mark.full
@pytest.mark.parametrize("seed", _seeds(2, 3))
async def test_a_long_storm(shared_fleet: Fleet, tell: list[str], seed: int) -> None:
    trial = await stormy(shared_fleet, tasks(f"long-{seed}", 300), seed, at_once=24)
    tell += [f"a long storm, seed {seed}", *trial.told]
    trial.require_all_well()
    assert trial.graded > len(trial.episodes) / 4
