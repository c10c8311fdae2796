"""`paddock run` through a storm: it repeats what is lost on the way, and a resumed run tries again what failed."""

import asyncio
from collections import defaultdict
from pathlib import Path

import pytest

from tests.chaos.fleet import Fleet
from tests.chaos.rows import tasks
from tests.chaos.trial import prepared, raging
from tests.mesh import rows
from tests.mesh.processes import paddock

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.redis,
    pytest.mark.balancer,
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="package"),
]

SEED = 5
RESUMES = 2
RUN_S = 300.0


@pytest.mark.behaviour("CO-3", "CO-5")
async def test_every_row_of_a_run_gets_its_one_right_result(
    shared_fleet: Fleet, tell: list[str], tmp_path: Path
) -> None:
    fleet, mine = shared_fleet, tasks("collected", 60)
    _, faults = prepared(fleet, mine, SEED)
    file = rows.write(tmp_path / "rows.jsonl", [task.flat_row() for task in mine])
    out = tmp_path / "out.jsonl"
    words = ("run", file, "-o", out, "--url", fleet.url, "--concurrency", 12)
    async with raging(faults, SEED):
        done = await asyncio.to_thread(paddock, *words, cwd=tmp_path, bound_s=RUN_S)
    first = rows.read(out)
    for _ in range(RESUMES):
        if done.status:
            done = await asyncio.to_thread(paddock, "run", "--resume", "-o", out, cwd=tmp_path, bound_s=RUN_S)
    assert done.status == 0, done.told
    results, failures = rows.read(out), rows.read(tmp_path / "out_failures.jsonl")
    tell.append(f"a run of the collector: {len(first)} of {len(mine)} rows graded in the storm")
    assert sorted(result["_ng_task_index"] for result in results) == list(range(len(mine)))
    assert {result["_ng_task_index"]: result["reward"] for result in results} == {
        index: task.reward for index, task in enumerate(mine)
    }
    attempts: dict[int, set[int]] = defaultdict(set)
    for result in results:
        attempts[result["_ng_task_index"]].add(result["episode_id"]["attempt"])
    for failure in failures:
        attempts[failure["task_index"]].add(failure["episode_id"]["attempt"])
    for index, task in enumerate(mine):
        assert fleet.model.turns[task.rollout_id][0] <= len(attempts[index]), task
