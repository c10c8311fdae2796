"""Services that are killed in the middle of an episode: no hang, no grade, and a failure that may be tried again."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.mesh import rows
from tests.mesh.chat import ChatServer, Gate, Scene, calls, says
from tests.mesh.processes import ServedMesh, paddock, running, served

TOKEN = "a-mesh-token-of-the-test"
RIGHT = r"\boxed{12}"
WRONG = r"\boxed{13}"
CLOSE_S = 2.0
CLEANUP_S = 6.0
# The cleanup's budget, the tries before it, and a machine that is busy with other things.
BOUND_S = 45.0


def _configuration(chat_url: str) -> dict[str, Any]:
    resources = {"close_timeout_s": CLOSE_S, "verify_timeout_s": 30.0}
    return {
        "models": {
            "policy": {"upstream": "chat_completions", "base_url": chat_url, "model": "m"},
            "judge": {"upstream": "chat_completions", "base_url": chat_url, "model": "j"},
        },
        "agents": {"tool_loop": {"harness": "tool_loop", "model": "policy", "close_timeout_s": CLOSE_S}},
        "resources": {
            "math": {"verifier": "math", **resources},
            "judged": {"verifier": "math", "judge": "judge", **resources},
            "weather": {
                "verifier": "tool_calls", "tools": ["weather"], "without_expected_calls": "offered_tool", **resources,
            },
        },
        "environments": {
            name: {"resources": name, "agent": "tool_loop", "tools": tools, "cleanup_timeout_s": CLEANUP_S}
            for name, tools in (("math", []), ("judged", []), ("weather", ["direct_http"]))
        },
    }  # fmt: skip


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, chat: ChatServer) -> Iterator[ServedMesh]:
    folder = tmp_path_factory.mktemp("mesh")
    config = folder / "paddock.json"
    config.write_bytes(orjson.dumps(_configuration(chat.url)))
    environ = {"PADDOCK_CONFIG": str(config), "PADDOCK_MESH_TOKEN": TOKEN, "PADDOCK_DRAIN_LEAD_S": "0"}
    with served(cwd=folder, environ=environ) as started:
        yield started


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as started:
        yield started


def post(mesh: ServedMesh, row: dict[str, Any]) -> dict[str, Any]:
    answered = httpx.post(f"{mesh.url('environment')}/run", json=row, timeout=BOUND_S, trust_env=False)
    assert answered.status_code == 200, answered.text
    body: dict[str, Any] = answered.json()
    return body


def assert_no_grade_but_another_try(body: dict[str, Any], stage: str) -> None:
    assert "reward" not in body
    failure = body["failure"]
    assert (failure["terminal"], failure["stage"]) == (False, stage), failure


def assert_works(mesh: ServedMesh, chat: ChatServer) -> None:
    """A fresh episode is graded."""
    chat.on("<fresh>", says(RIGHT))
    assert post(mesh, rows.math("<fresh>", "12", environment="math"))["reward"] == 1.0


@pytest.mark.behaviour("ES-40", "ES-50", "ES-25")
def test_an_agent_server_that_is_killed_in_the_middle_of_a_run(
    mesh: ServedMesh, chat: ChatServer, pool: ThreadPoolExecutor
) -> None:
    gate = Gate()
    scene = chat.on("<agent dies>", gate.before(says(RIGHT)))
    answer = pool.submit(post, mesh, rows.math("<agent dies>", "12", environment="math"))
    asked = scene.wait_for_call()
    mesh.services["agent"].kill()
    try:
        body = answer.result(BOUND_S)
        chat.wait_until_gone(asked, 10.0)
    finally:
        gate.open()
        mesh.start("agent")
    assert_no_grade_but_another_try(body, "agent")
    assert body["failure"]["failure_kind"].startswith("transport_")
    assert "agent" in body["failure"]["cleanup_error"]["message"]
    assert_works(mesh, chat)


@pytest.mark.behaviour("ES-50")
def test_an_agent_server_that_is_started_again_at_once(
    mesh: ServedMesh, chat: ChatServer, pool: ThreadPoolExecutor
) -> None:
    scene = chat.on("<agent again>", Gate().before(says(RIGHT)))
    answer = pool.submit(post, mesh, rows.math("<agent again>", "12", environment="math"))
    scene.wait_for_call()
    mesh.services["agent"].kill()
    mesh.start("agent")
    assert_no_grade_but_another_try(answer.result(BOUND_S), "agent")
    assert_works(mesh, chat)


@pytest.mark.behaviour("ES-43", "ES-50")
def test_a_resources_server_that_is_killed_before_the_verification(
    mesh: ServedMesh, chat: ChatServer, pool: ThreadPoolExecutor
) -> None:
    gate = Gate()
    scene = chat.on("<resources die>", gate.before(says(RIGHT)))
    answer = pool.submit(post, mesh, rows.math("<resources die>", "12", environment="math"))
    scene.wait_for_call()
    mesh.services["resources"].kill()
    try:
        gate.open()
        body = answer.result(BOUND_S)
    finally:
        mesh.start("resources")
    assert_no_grade_but_another_try(body, "verification")
    assert body["failure"]["failure_kind"] == "transport_unreachable"
    assert "12" in str(body["failure"]["partial_response"]["output"])
    assert_works(mesh, chat)


@pytest.mark.behaviour("ES-50")
def test_a_resources_server_that_lost_what_it_saw_gives_no_grade_for_it(
    mesh: ServedMesh, chat: ChatServer, pool: ThreadPoolExecutor
) -> None:
    gate = Gate()
    scene = chat.on("<tools lost>", calls("get_weather", {"city": "Oslo"}), gate.before(says("Take a coat.")))
    answer = pool.submit(post, mesh, {**rows.weather("<tools lost>"), "environment": "weather"})
    scene.wait_for_call()
    scene.wait_for_call()
    mesh.services["resources"].kill()
    mesh.start("resources")
    gate.open()
    body = answer.result(BOUND_S)
    assert_no_grade_but_another_try(body, "verification")
    assert body["failure"]["failure_kind"] == "session_lost"


@pytest.mark.behaviour("ES-50")
def test_a_model_proxy_that_is_killed_in_the_middle_of_a_call(
    mesh: ServedMesh, chat: ChatServer, pool: ThreadPoolExecutor
) -> None:
    gate = Gate()
    scene = chat.on("<proxy dies>", gate.before(says(RIGHT)))
    answer = pool.submit(post, mesh, rows.math("<proxy dies>", "12", environment="math"))
    asked = scene.wait_for_call()
    mesh.services["model_proxy"].kill()
    try:
        body = answer.result(BOUND_S)
        chat.wait_until_gone(asked, 10.0)
    finally:
        gate.open()
        mesh.start("model_proxy")
    assert "reward" not in body
    assert body["failure"]["terminal"] is False
    assert_works(mesh, chat)


def _run_through_a_kill(
    mesh: ServedMesh, scenes: list[Scene], file: Path, environment: str, *, waits: int, release: Callable[[], None]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """Kill and restart the environment server while a run waits for it; results, failures and what was told."""
    folder = file.parent
    arguments = ("run", file, "--environment", environment, "-o", folder / "out.jsonl", "--url")
    with running(*arguments, mesh.url("environment"), cwd=folder, environ={}, name="run") as run:
        for scene in scenes:
            for _ in range(waits):
                scene.wait_for_call()
        mesh.services["environment"].kill()
        time.sleep(1.0)  # the run meets a closed port for a while
        mesh.start("environment")
        release()
        status = run.ended(2 * BOUND_S)
        assert status in {0, 1}, run.err
        return rows.read(folder / "out.jsonl"), rows.read(folder / "out_failures.jsonl"), run.out + run.err


@pytest.mark.behaviour("CO-3", "CO-4", "CO-5")
def test_an_environment_server_that_is_killed_costs_a_run_no_row(
    mesh: ServedMesh, chat: ChatServer, tmp_path: Path
) -> None:
    gate = Gate()
    markers = [f"<run {number}>" for number in range(6)]
    scenes = [chat.on(marker, gate.before(says(RIGHT))) for marker in markers]
    file = rows.write(tmp_path / "rows.jsonl", [rows.math(marker, "12") for marker in markers])
    results, failures, told = _run_through_a_kill(mesh, scenes, file, "math", waits=1, release=gate.open)
    assert sorted(result["_ng_task_index"] for result in results) == list(range(6)), told
    assert [result["reward"] for result in results] == [1.0] * 6
    assert failures == []


@pytest.mark.behaviour("CO-4", "ES-50")
def test_an_environment_server_that_is_killed_during_the_verification(
    mesh: ServedMesh, chat: ChatServer, tmp_path: Path
) -> None:
    gate = Gate()
    scene = chat.on("<judged>", says(WRONG), gate.before(says("[[A=B]]")))
    file = rows.write(tmp_path / "rows.jsonl", [rows.math("<judged>", "12")])
    results, failures, told = _run_through_a_kill(mesh, [scene], file, "judged", waits=2, release=gate.open)
    assert len(results) + len(failures) == 1, told
    assert [record["failure"]["terminal"] for record in failures] in ([], [False]), failures
    if failures:
        chat.on("<judged>", says(WRONG), says("[[A=B]]"))
        arguments = ("run", "--resume", "-o", tmp_path / "out.jsonl", "--url", mesh.url("environment"))
        assert paddock(*arguments, cwd=tmp_path).status == 0
    (result,) = rows.read(tmp_path / "out.jsonl")
    assert (result["_ng_task_index"], result["reward"], result["library_reward"]) == (0, 1.0, 0.0), result


def test_nothing_of_what_was_killed_is_left(mesh: ServedMesh) -> None:
    """Every service answers for itself, as one process."""
    for name, service in mesh.services.items():
        told = httpx.get(f"{mesh.url(name)}/readyz", trust_env=False).json()
        assert told["service"] == name
        assert service.process.poll() is None
