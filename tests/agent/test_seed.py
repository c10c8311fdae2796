"""Seeding: one session per id, bound to its first seed."""

import asyncio
from typing import Any

import pytest

from shared.http.service import Mesh
from shared.plugins import PluginFolder
from tests.agent.harnesses.holding import CREATED, Holding
from tests.agent.peers import spec
from tests.agent.rig import Rig, running

FOLDER = PluginFolder("tests.agent.harnesses", "harness")
HOLDING = {"loop": {"harness": "holding"}}


def _holding() -> Holding:
    return CREATED[-1]


def _http_tools(name: str = "tools") -> dict[str, Any]:
    return {"type": "direct_http", "name": name, "base_url": "http://127.0.0.1:9", "tools": [spec("add")]}


@pytest.mark.behaviour("AG-1")
@pytest.mark.parametrize(
    ("changed", "path"),
    [
        ({"agent_session_id": ""}, ["agent_session_id"]),
        ({"surprise": 1}, ["surprise"]),
        ({"episode_id": {"rollout_id": "-x"}}, ["episode_id", "rollout_id"]),
        ({"tool_accesses": [_http_tools(), _http_tools()]}, ["tool_accesses"]),
    ],
)
async def test_a_seed_that_does_not_fit_is_refused_with_the_fields_path(
    changed: dict[str, Any], path: list[str]
) -> None:
    async with running() as rig:
        answer = await rig.session(**changed).seed()
        assert answer.status_code == 422
        assert answer.json()["detail"][0]["loc"] == path
        assert "set-cookie" not in answer.headers


async def test_an_unknown_agent_is_refused_with_the_nearest_name() -> None:
    async with running() as rig:
        answer = await rig.session(agent="lop").seed()
        assert answer.status_code == 422
        assert "Did you mean 'loop'?" in answer.json()["error"]["message"]


@pytest.mark.behaviour("AG-2", "AG-6")
async def test_twenty_identical_seeds_at_once_give_one_setup() -> None:
    async with running(agents=HOLDING, harnesses=FOLDER) as rig:
        caller = rig.session()
        _holding().gate.clear()
        seeds = [asyncio.create_task(caller.seed()) for _ in range(20)]
        await _holding().in_setup.wait()
        _holding().gate.set()
        answers = await asyncio.gather(*seeds)
        assert [answer.status_code for answer in answers] == [200] * 20
        assert len({answer.text for answer in answers}) == 1
        assert len({answer.headers["set-cookie"] for answer in answers}) == 1
        assert _holding().log == ["setup"]


@pytest.mark.behaviour("AG-2")
async def test_the_same_seed_over_another_replica_joins() -> None:
    async with running(replicas=2) as rig:
        caller = rig.session()
        first = await caller.seed()
        second = await caller.over(1).seed()
        assert (first.status_code, second.status_code) == (200, 200)
        assert first.headers["set-cookie"] == second.headers["set-cookie"]


@pytest.mark.behaviour("AG-3")
@pytest.mark.parametrize(
    "changed",
    [
        {"episode_id": {"rollout_id": "another", "attempt": 0}},
        {"task_id": {"taskset": "sums", "task_id": "2"}},
        {"tool_accesses": [_http_tools()]},
        {"sandbox_access": {"connection": {"kind": "direct", "provider": "x", "descriptor": {}}, "workdir": "/"}},
    ],
)
async def test_a_changed_seed_is_refused_and_the_first_binding_stays(changed: dict[str, Any]) -> None:
    async with running() as rig:
        caller = rig.session()
        await caller.seed()
        assert (await caller.seed(**changed)).status_code == 409
        assert (await caller.seed()).status_code == 200
        assert (await caller.activate()).status_code == 200


@pytest.mark.behaviour("AG-4")
async def test_a_cookie_of_another_session_a_gone_one_or_nobody_is_refused() -> None:
    async with running() as rig:
        first, second = rig.session(), rig.session()
        await first.seed()
        second.cookies |= first.cookies
        assert (await second.seed()).status_code == 409
        second.cookies = {"paddock_agent_session": "forged~signature"}
        assert (await second.seed()).status_code == 409
        second.cookies = {}
        assert (await second.seed()).status_code == 200
        await second.close()
        rig.clock.now += 301
        expired = await second.seed()
        assert (expired.status_code, expired.json()["failure"]["failure_kind"]) == (409, "session_lost")
        assert expired.json()["failure"]["terminal"] is False


@pytest.mark.behaviour("AG-5")
async def test_a_closed_id_cannot_be_seeded_again_within_the_window() -> None:
    async with running() as rig:
        caller = rig.session()
        await caller.seed()
        await caller.close()
        assert (await caller.seed()).status_code == 409
        caller.cookies = {}
        assert (await caller.seed()).status_code == 409
        rig.clock.now += 301
        assert (await caller.seed()).status_code == 200


@pytest.mark.behaviour("AG-11")
async def test_a_failed_setup_that_is_cleaned_up_frees_its_id() -> None:
    async with running(agents=HOLDING, harnesses=FOLDER) as rig:
        _holding().failures = {"setup": 1}
        caller = rig.session()
        failed = await caller.seed()
        assert (failed.status_code, failed.json()["failure"]["failure_kind"]) == (503, "provider_unavailable")
        assert failed.json()["failure"]["stage"] == "seed"
        assert caller.cookies == {}
        assert (await caller.seed()).status_code == 200
        assert _holding().log == ["setup", "teardown None", "setup"]


@pytest.mark.behaviour("AG-12", "AG-28")
async def test_a_failed_setup_whose_cleanup_fails_waits_for_a_close() -> None:
    async with running(agents=HOLDING, harnesses=FOLDER) as rig:
        _holding().failures = {"setup": 1, "teardown": 2}
        caller = rig.session()
        failed = await caller.seed()
        assert failed.json()["error"]["message"] == "no setup today"
        assert (await caller.seed()).status_code == 409
        assert (await caller.activate(**{"X-Agent-Session": caller.session_id})).status_code == 409
        assert (await caller.close()).status_code == 502
        closed = await caller.close()
        assert (closed.status_code, closed.json()["cleanup"]["cleanup_confirmed"]) == (200, True)
        assert _holding().log == ["setup", "teardown None", "teardown None", "teardown None"]


@pytest.mark.behaviour("AG-13")
async def test_a_caller_that_leaves_during_the_setup_leaves_nothing_unowned() -> None:
    async with running(agents=HOLDING, harnesses=FOLDER) as rig:
        _holding().gate.clear()
        caller = rig.session()
        seeding = asyncio.create_task(caller.seed())
        await _holding().in_setup.wait()
        seeding.cancel()
        await asyncio.wait((seeding,))
        _holding().gate.set()
        assert (await caller.seed()).status_code == 200
        assert _holding().held == {caller.session_id}
        assert (await caller.close()).status_code == 200
        assert _holding().held == set()
        assert _holding().log == ["setup", f"teardown {caller.session_id}"]


@pytest.mark.behaviour("AG-13", "AG-29")
async def test_a_close_during_the_setup_waits_for_it_and_releases_what_it_got() -> None:
    async with running(agents=HOLDING, harnesses=FOLDER) as rig:
        _holding().gate.clear()
        caller = rig.session()
        seeding = asyncio.create_task(caller.seed())
        await _holding().in_setup.wait()
        closing = asyncio.create_task(caller.close())
        await _until_stopping(rig, caller.session_id)
        _holding().gate.set()
        assert (await seeding).status_code == 409
        assert (await closing).status_code == 200
        assert _holding().held == set()


async def test_a_setup_whose_process_died_is_started_again_by_who_seeds_next() -> None:
    async with running(replicas=2, agents=HOLDING, harnesses=FOLDER) as rig:
        dead, alive = CREATED[-2:]
        dead.gate.clear()
        caller = rig.session()
        seeding = asyncio.create_task(caller.seed())
        await dead.in_setup.wait()
        rig.clock.now += 20
        joined = asyncio.create_task(caller.over(1).seed())
        assert (await joined).status_code == 200
        assert alive.log == ["teardown None", "setup"]
        dead.gate.set()
        assert (await seeding).status_code == 409


@pytest.mark.behaviour("AG-10")
async def test_a_draining_server_refuses_new_seeds() -> None:
    async with running() as rig:
        mesh: Mesh = rig.apps[0].state.mesh
        mesh.draining.set()
        answer = await rig.session().seed()
        assert (answer.status_code, answer.json()["failure"]["failure_kind"]) == (503, "shutdown")
        assert int(answer.headers["retry-after"]) >= 1


async def _until_stopping(rig: Rig, session_id: str) -> None:
    key = f"agent:{{{session_id}}}"
    while (record := await rig.store.get(key)) is None or b'"stopping"' not in record.value:
        await rig.store.wait_for_change(key, version=record.version if record else 0, timeout_s=1.0)
