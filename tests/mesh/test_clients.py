"""Clients that leave, ask twice, ask too much or cancel, and models that never answer, on the whole mesh."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson
import pytest

from tests.launcher.rig import children_of
from tests.mesh import rows
from tests.mesh.chat import ChatServer, Gate, calls, hangs, says
from tests.mesh.processes import SERVICES, UpMesh, paddock, up

TOKEN = "a-mesh-token-of-the-test"
HEAD = {"Authorization": f"Bearer {TOKEN}"}
RIGHT = r"\boxed{12}"
BOUND_S = 45.0
# Until a connection to the model is closed after its call was given up: design's bound is 2 s on a quiet machine.
SOON_S = 8.0
BRIEF_S = 3.5


def _configuration(chat_url: str) -> dict[str, Any]:
    weather = {"verifier": "tool_calls", "tools": ["weather"], "without_expected_calls": "offered_tool"}
    entry = {"resources": "math", "agent": "tool_loop"}
    return {
        "models": {"policy": {"upstream": "chat_completions", "base_url": chat_url, "model": "m"}},
        "agents": {
            "tool_loop": {"harness": "tool_loop"},
            "brief": {"harness": "tool_loop", "close_timeout_s": 1.0},
        },
        "resources": {
            "math": {"verifier": "math"},
            "brief": {"verifier": "math", "close_timeout_s": 1.0, "verify_timeout_s": 1.0},
            "weather": weather,
        },
        "environments": {
            "math": entry,
            "narrow": {**entry, "max_concurrent": 1, "queue_timeout_s": 1.0, "queue_size": 1},
            "full": {**entry, "max_concurrent": 1, "queue_timeout_s": 30.0, "queue_size": 0},
            "brief": {
                "resources": "brief", "agent": "brief", "episode_timeout_s": BRIEF_S, "cleanup_timeout_s": 2.5,
            },
            "weather": {"resources": "weather", "agent": "tool_loop", "tools": ["direct_http"]},
        },
    }  # fmt: skip


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, chat: ChatServer) -> Iterator[UpMesh]:
    folder = tmp_path_factory.mktemp("mesh")
    config = folder / "paddock.json"
    config.write_bytes(orjson.dumps(_configuration(chat.url)))
    with up("--config", config, cwd=folder, environ={"PADDOCK_MESH_TOKEN": TOKEN}) as started:
        yield started


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as started:
        yield started


def ask(mesh: UpMesh, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
    content = None if body is None else orjson.dumps(body)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.request(method, mesh.url + path, content=content, headers=given, timeout=BOUND_S, trust_env=False)


def row(marker: str, key: str | None = None, environment: str = "math", **fields: Any) -> dict[str, Any]:
    ids = {} if key is None else {"episode_id": {"rollout_id": key, "attempt": 0}}
    return rows.math(marker, "12", environment=environment, **ids, **fields)


def ended(mesh: UpMesh, key: str) -> dict[str, Any]:
    """The outcome of an episode, waited for."""
    deadline = time.monotonic() + BOUND_S
    while time.monotonic() < deadline:
        answered = ask(mesh, "GET", f"/episodes/{key}", prefer="wait=5")
        if answered.status_code == 200:
            body: dict[str, Any] = answered.json()
            return body
        assert answered.status_code == 202, answered.text
    raise TimeoutError(f"the episode {key} did not end")


def post_and_leave(mesh: UpMesh, body: dict[str, Any], stay: Callable[[], object], **headers: str) -> None:
    """Send the row on a connection of its own, stay as long as told, and close it without reading the answer."""
    address = urlsplit(mesh.url)
    content = orjson.dumps(body)
    lines = ["POST /run HTTP/1.1", "Host: paddock", f"Content-Length: {len(content)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=10.0) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + content)
        stay()


def sealed(mesh: UpMesh, key: str) -> bool:
    capture = httpx.get(f"{mesh.urls['model_proxy']}/captures/{key}", headers=HEAD, trust_env=False).json()
    return bool(capture["sealed"])


def assert_closed(body: dict[str, Any]) -> None:
    receipt = body["evidence"]["close_receipt"]
    assert (receipt["status"], receipt["cleanup"]["cleanup_confirmed"]) == ("closed", True)
    assert "cleanup_errors" not in body["evidence"]


@pytest.mark.behaviour("ES-34", "AG-35")
def test_a_client_that_leaves_ends_nothing_and_may_ask_again(
    mesh: UpMesh, chat: ChatServer, pool: ThreadPoolExecutor
) -> None:
    gate = Gate()
    scene = chat.on("<left>", gate.before(says(RIGHT)))
    post_and_leave(mesh, row("<left>", "left"), scene.wait_for_call)
    again = pool.submit(ask, mesh, "POST", "/run", row("<left>", "left"))
    assert ask(mesh, "GET", "/episodes/left").json()["stage"] == "agent"
    gate.open()
    assert again.result(BOUND_S).json()["reward"] == 1.0
    assert ask(mesh, "POST", "/run", row("<left>", "left")).json()["reward"] == 1.0
    assert len(scene.asked) == 1


@pytest.mark.behaviour("ES-34")
def test_a_client_that_leaves_and_wants_it_so_cancels_its_episode(mesh: UpMesh, chat: ChatServer) -> None:
    scene = chat.on("<leaves>", hangs)
    called: list[Any] = []
    post_and_leave(
        mesh, row("<leaves>", "leaves"), lambda: called.append(scene.wait_for_call()),
        X_Paddock_On_Disconnect="cancel",
    )  # fmt: skip
    chat.wait_until_gone(called[0], SOON_S)
    body = ended(mesh, "leaves")
    assert body["failure"]["failure_kind"] == "cancelled"
    assert "reward" not in body
    assert_closed(body)
    assert sealed(mesh, "leaves")


@pytest.mark.behaviour("AG-17")
def test_the_same_episode_many_times_at_once_is_one_run(
    mesh: UpMesh, chat: ChatServer, pool: ThreadPoolExecutor
) -> None:
    gate = Gate()
    scene = chat.on("<twice>", gate.before(says(RIGHT)))
    answers = [pool.submit(ask, mesh, "POST", "/run", row("<twice>", "twice")) for _ in range(4)]
    scene.wait_for_call()
    gate.open()
    bodies = [answer.result(BOUND_S).content for answer in answers]
    assert len(set(bodies)) == 1
    assert orjson.loads(bodies[0])["reward"] == 1.0
    assert len(scene.asked) == 1


def test_another_body_for_the_same_episode_is_a_conflict_and_changes_nothing(mesh: UpMesh, chat: ChatServer) -> None:
    scene = chat.on("<one body>", says(RIGHT))
    first = ask(mesh, "POST", "/run", row("<one body>", "one-body"))
    other = ask(mesh, "POST", "/run", {**row("<one body>", "one-body"), "expected_answer": "13"})
    assert other.status_code == 409
    assert other.json()["failure"] == {"failure_kind": "conflict", "terminal": True}
    assert "one-body" in other.json()["error"]["message"]
    assert ask(mesh, "POST", "/run", row("<one body>", "one-body")).content == first.content
    assert len(scene.asked) == 1


@pytest.mark.behaviour("ES-35")
@pytest.mark.parametrize(("environment", "why"), [("narrow", "stayed taken for 1 s"), ("full", "wait for admission")])
def test_an_episode_without_a_place_is_answered_with_429_and_nothing_is_kept(
    mesh: UpMesh, chat: ChatServer, pool: ThreadPoolExecutor, environment: str, why: str
) -> None:
    gate = Gate()
    holds = chat.on(f"<holds {environment}>", gate.before(says(RIGHT)))
    first = pool.submit(ask, mesh, "POST", "/run", row(f"<holds {environment}>", environment=environment))
    holds.wait_for_call()
    scene = chat.on(f"<no place {environment}>", says(RIGHT))
    key = f"no-place-{environment}"
    refused = ask(mesh, "POST", "/run", row(f"<no place {environment}>", key, environment))
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert why in refused.json()["error"]["message"]
    assert refused.json()["failure"] == {"failure_kind": "overloaded", "terminal": False}
    assert scene.asked == []
    gate.open()
    assert first.result(BOUND_S).json()["reward"] == 1.0
    again = ask(mesh, "POST", "/run", row(f"<no place {environment}>", key, environment))
    assert again.json()["reward"] == 1.0


@pytest.mark.behaviour("ES-34")
def test_a_cancelled_episode_ends_its_call_of_the_model_soon_and_is_cleaned_up(
    mesh: UpMesh, chat: ChatServer, pool: ThreadPoolExecutor
) -> None:
    scene = chat.on("<cancel>", hangs)
    waiting = pool.submit(ask, mesh, "POST", "/run", row("<cancel>", "cancel"))
    asked = scene.wait_for_call()
    began = time.monotonic()
    assert ask(mesh, "DELETE", "/episodes/cancel").status_code == 202
    chat.wait_until_gone(asked, SOON_S)
    body = waiting.result(BOUND_S).json()
    assert time.monotonic() - began < 2 * SOON_S
    assert "reward" not in body
    assert body["failure"]["failure_kind"] == "cancelled"
    assert body["failure"]["terminal"] is False
    assert_closed(body)
    assert sealed(mesh, "cancel")
    assert ask(mesh, "DELETE", "/episodes/cancel").status_code == 409
    assert ask(mesh, "DELETE", "/episodes/never-seen").status_code == 404


@pytest.mark.behaviour("ES-29", "ES-49")
def test_a_task_that_runs_into_its_wall_limit_is_graded_as_far_as_it_came(mesh: UpMesh, chat: ChatServer) -> None:
    scene = chat.on("<wall>", hangs)
    body = ask(mesh, "POST", "/run", row("<wall>", agent_timeout_s=1.0)).json()
    assert body["reward"] == 0.0
    assert body["response"]["status"] == "incomplete"
    assert body["agent_timed_out"] == {"limit_s": 1.0, "set_by": "task"}
    assert_closed(body)
    chat.wait_until_gone(scene.asked[0], SOON_S)


@pytest.mark.behaviour("ES-29")
def test_what_was_done_before_the_wall_limit_is_in_the_graded_response(mesh: UpMesh, chat: ChatServer) -> None:
    chat.on("<half way>", calls("get_weather", {"city": "Oslo"}), hangs)
    sent = {**rows.weather("<half way>"), "environment": "weather", "agent_timeout_s": 3.0}
    body = ask(mesh, "POST", "/run", sent).json()
    assert [item["type"] for item in body["response"]["output"]] == ["function_call", "function_call_output"]
    assert body["reward_components"]["served"] == 1.0
    assert body["reward"] == 0.0, "no final message"
    assert body["agent_timed_out"]["set_by"] == "task"


@pytest.mark.behaviour("ES-32")
def test_an_episode_keeps_time_for_close_and_verification_of_a_model_that_never_answers(
    mesh: UpMesh, chat: ChatServer
) -> None:
    chat.on("<brief>", hangs)
    body = ask(mesh, "POST", "/run", row("<brief>", environment="brief")).json()
    assert body["reward"] == 0.0
    assert body["agent_timed_out"]["set_by"] == "episode"
    assert body["agent_timed_out"]["limit_s"] <= BRIEF_S - 2.0


@pytest.mark.behaviour("ES-27", "ES-33")
def test_an_episode_whose_resources_stand_still_ends_at_its_deadline(mesh: UpMesh, chat: ChatServer) -> None:
    chat.on("<frozen>", says(RIGHT))
    frozen = children_of(mesh.running.pid)[SERVICES.index("resources")]
    os.kill(frozen, signal.SIGSTOP)
    began = time.monotonic()
    try:
        body = ask(mesh, "POST", "/run", row("<frozen>", environment="brief")).json()
    finally:
        os.kill(frozen, signal.SIGCONT)
    assert time.monotonic() - began > BRIEF_S - 0.5
    assert time.monotonic() - began < BRIEF_S + 2.5 + SOON_S
    assert "reward" not in body
    failure = body["failure"]
    assert (failure["failure_kind"], failure["stage"], failure["terminal"]) == ("deadline", "seed", False), failure
    assert "resources" in failure["cleanup_error"]["message"]
    assert ask(mesh, "POST", "/run", row("<frozen>")).json()["reward"] == 1.0


def test_a_promised_episode_is_waited_for_and_its_stages_are_told(mesh: UpMesh, chat: ChatServer) -> None:
    gate = Gate()
    scene = chat.on("<async>", gate.before(says(RIGHT)))
    accepted = ask(mesh, "POST", "/run", row("<async>", "async"), prefer="respond-async")
    assert (accepted.status_code, accepted.headers["location"]) == (202, "/episodes/async")
    scene.wait_for_call()
    told = ask(mesh, "GET", "/episodes/async", prefer="wait=1")
    assert (told.status_code, told.json()["stage"]) == (202, "agent")
    running = ask(mesh, "GET", "/episodes?state=running").json()["episodes"]
    assert "async" in str(running)
    with httpx.stream("GET", f"{mesh.url}/episodes/async/events", timeout=BOUND_S, trust_env=False) as stream:
        lines = stream.iter_lines()
        first = [next(lines), next(lines)]
        assert first[0] == "event: stage"
        assert orjson.loads(first[1].removeprefix("data: "))["stage"] == "agent"
        gate.open()
        events = [line for line in lines if line.startswith("event: ")]
    assert events[-1] == "event: end"
    assert ended(mesh, "async")["reward"] == 1.0


def test_a_run_waits_for_places_instead_of_losing_rows(mesh: UpMesh, chat: ChatServer, tmp_path: Path) -> None:
    markers = [f"<crowd {number}>" for number in range(3)]
    for marker in markers:
        chat.on(marker, says(RIGHT))
    file = rows.write(tmp_path / "rows.jsonl", [rows.math(marker, "12") for marker in markers])
    out = tmp_path / "out.jsonl"
    done = paddock("run", file, "--environment", "narrow", "-o", out, "--url", mesh.url, cwd=tmp_path)
    assert done.status == 0, done.told
    assert [result["reward"] for result in rows.read(out)] == [1.0] * 3
