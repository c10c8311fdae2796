"""`paddock run` on rows of each shipped environment, with a model that is right on some and wrong on others."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.mesh import rows
from tests.mesh.background import Background
from tests.mesh.chat import ChatServer, calls, refuses, says
from tests.mesh.processes import ServedMesh, paddock, served
from tests.mesh.recorder import Recorder, in_turn
from tests.serving import free_port, serving

KEY = "key-that-nobody-may-see-4711"
BOUND_S = 60.0


@dataclass(frozen=True)
class Case:
    """A row, what the model says to it, and the reward that it is worth."""

    row: dict[str, Any]
    answers: tuple[Any, ...]
    reward: float


def _marker(environment: str, number: int) -> str:
    return f"<{environment} {number}>"


def _math() -> list[Case]:
    def case(number: int, expected: str, said: str, reward: float) -> Case:
        return Case(rows.math(_marker("math", number), expected), (says(said),), reward)

    return [
        case(0, "12", r"It is \boxed{12}.", 1.0),
        case(1, r"\(\frac{3}{4}\)", r"So \boxed{0.75}", 1.0),
        case(2, "12", r"It is \boxed{13}.", 0.0),
        case(3, "7", "I would rather not say.", 0.0),
    ]


def _choice(environment: str, extra: dict[str, Any]) -> list[Case]:
    def case(number: int, said: str, reward: float) -> Case:
        row = rows.choice(
            _marker(environment, number), "C", "tin", "zinc", "iron", "lead",
            grading_mode="strict_single_letter_boxed", **extra,
        )  # fmt: skip
        return Case(row, (says(said),), reward)

    return [
        case(0, r"First I thought of \boxed{A}, but it is \boxed{C}", 1.0),
        case(1, "Weighing it all.\nAnswer: C", 1.0),
        case(2, r"\boxed{B}", 0.0),
        case(3, "Iron.", 0.0),
    ]


def _match() -> list[Case]:
    def case(number: int, mode: str, said: str, reward: float) -> Case:
        return Case(rows.match(_marker("string_match", number), "Oslo", mode), (says(said),), reward)

    return [
        case(0, "boxed", r"\boxed{oslo}", 1.0),
        case(1, "final_answer", "Bergen? No.\nFinal answer: Oslo.", 1.0),
        case(2, "last_line", "Oslo\nBergen", 0.0),
        case(3, "boxed", "Oslo, of course.", 0.0),
    ]


def _weather() -> list[Case]:
    def case(number: int, answers: tuple[Any, ...], reward: float) -> Case:
        return Case(rows.weather(_marker("weather", number)), answers, reward)

    return [
        case(0, (calls("get_weather", {"city": "Oslo"}), says("Take a coat.")), 1.0),
        case(1, (says("Certainly sunny."),), 0.0),
        case(2, (calls("get_weather", {"town": "Oslo"}), says("Take a coat.")), 0.0),
    ]


GPQA_FIELDS = {"agent_ref": {"type": "responses_api_agents", "name": "science_simple_agent"}, "metadata": {"level": 3}}
CASES = {
    "math": _math(),
    "mcqa": _choice("mcqa", {}),
    "gpqa": _choice("gpqa", GPQA_FIELDS),
    "string_match": _match(),
    "weather": _weather(),
}


def play(chat: ChatServer) -> None:
    """Set every case's answers, from the first."""
    for environment, cases in CASES.items():
        for number, case in enumerate(cases):
            chat.on(_marker(environment, number), *case.answers)


@pytest.fixture(scope="module")
def model(chat: ChatServer) -> dict[str, str]:
    return {
        "PADDOCK_MODEL_BASE_URL": chat.url,
        "PADDOCK_MODEL_NAME": "a-model-of-the-test",
        "PADDOCK_MODEL_API_KEY": KEY,
    }


@pytest.mark.behaviour("ES-60", "CO-3")
@pytest.mark.parametrize("environment", list(CASES))
def test_a_run_grades_each_row_of_a_file(
    environment: str, tmp_path: Path, chat: ChatServer, model: dict[str, str]
) -> None:
    play(chat)
    before = len(chat.asked)
    file = rows.write(tmp_path / "rows.jsonl", [case.row for case in CASES[environment]])
    done = paddock("run", file, "--environment", environment, "-o", tmp_path / "out.jsonl", cwd=tmp_path, environ=model)
    assert done.status == 0, done.told
    results = sorted(rows.read(tmp_path / "out.jsonl"), key=lambda result: result["_ng_task_index"])
    assert [result["reward"] for result in results] == [case.reward for case in CASES[environment]]
    assert {result["environment"] for result in results} == {environment}
    asked = chat.asked[before:]
    assert len(asked) == sum(len(case.answers) for case in CASES[environment])
    assert {one.headers["authorization"] for one in asked} == {f"Bearer {KEY}"}
    assert {one.json["model"] for one in asked} == {"a-model-of-the-test"}
    assert rows.read(tmp_path / "out_failures.jsonl") == []
    kept = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert KEY not in kept + done.told


@pytest.mark.behaviour("CF-2", "ES-60")
def test_benchmark_harness_and_model_come_from_files_that_do_not_know_each_other(
    tmp_path: Path, chat: ChatServer
) -> None:
    chat.on("<composed>", says(r"\boxed{12}"))
    files = {
        "benchmark": "resources: {sums: {verifier: math}}\nenvironments: {sums: {resources: sums}}\n",
        "harness": "agents: {solver: {harness: tool_loop}}\n",
        "model": f"models: {{policy: {{upstream: chat_completions, base_url: '{chat.url}', model: m}}}}\n",
    }
    named: list[object] = []
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text)
        named += ["--config", tmp_path / f"{name}.yaml"]
    file = rows.write(tmp_path / "rows.jsonl", [rows.math("<composed>", "12")])
    done = paddock("run", file, "-o", tmp_path / "out.jsonl", *named, cwd=tmp_path)
    assert done.status == 0, done.told
    (result,) = rows.read(tmp_path / "out.jsonl")
    assert (result["reward"], result["agent_ref"]["name"]) == (1.0, "solver")


@dataclass(frozen=True)
class Recorded:
    """A mesh of single processes with a recorder before agent and resources."""

    mesh: ServedMesh
    recorder: Recorder

    @property
    def url(self) -> str:
        return self.mesh.url("environment")


@pytest.fixture(scope="module")
def recorded(
    tmp_path_factory: pytest.TempPathFactory, background: Background, model: dict[str, str]
) -> Iterator[Recorded]:
    recorder = Recorder()
    ports = {"agent": free_port(), "resources": free_port()}
    peers = {name: background.enter(serving(recorder.app(f"http://127.0.0.1:{port}"))) for name, port in ports.items()}
    environ = {**model, "PADDOCK_MESH_TOKEN": "a-mesh-token-of-the-test", "PADDOCK_DRAIN_LEAD_S": "0"}
    with served(cwd=tmp_path_factory.mktemp("mesh"), environ=environ, ports=ports, **peers) as mesh:
        yield Recorded(mesh, recorder)


@pytest.mark.behaviour("ES-10", "ES-17", "ES-8")
def test_every_episode_goes_through_its_steps_in_order_and_one_after_the_other(
    tmp_path: Path, chat: ChatServer, recorded: Recorded
) -> None:
    play(chat)
    cases = [(name, case) for name, listed in CASES.items() for case in listed]
    file = rows.write(tmp_path / "rows.jsonl", [{**case.row, "environment": name} for name, case in cases])
    done = paddock("run", file, "-o", tmp_path / "out.jsonl", "--url", recorded.url, cwd=tmp_path)
    assert done.status == 0, done.told
    results = sorted(rows.read(tmp_path / "out.jsonl"), key=lambda result: result["_ng_task_index"])
    assert [result["reward"] for result in results] == [case.reward for _, case in cases]
    assert recorded.recorder.steps.keys() == {result["episode_id"]["rollout_id"] for result in results}
    before, after = ("seed resources", "seed agent"), ("close agent", "verify", "close resources")
    for result, (name, case) in zip(results, cases, strict=True):
        steps = recorded.recorder.steps[result["episode_id"]["rollout_id"]]
        tools = in_turn("tool get_weather") if name == "weather" and len(case.answers) > 1 else []
        assert steps == [*in_turn(*before), "run", *tools, "run ended", *in_turn(*after)]


@pytest.mark.behaviour("ES-50", "ES-10")
def test_an_episode_whose_model_fails_is_closed_and_never_verified(recorded: Recorded, chat: ChatServer) -> None:
    chat.on("<failing>", refuses(503, {"message": "busy"}))
    row = rows.math("<failing>", "12", environment="math", episode_id={"rollout_id": "failing", "attempt": 0})
    body = httpx.post(f"{recorded.url}/run", json=row, timeout=BOUND_S, trust_env=False).json()
    assert body["failure"]["failure_kind"] == "model_overloaded"
    steps = ("seed resources", "seed agent", "run", "close agent", "close resources")
    assert recorded.recorder.steps["failing"] == in_turn(*steps)


@pytest.mark.behaviour("AG-17", "ES-11")
def test_an_answer_that_is_lost_on_the_way_costs_nothing_and_repeats_nothing(
    recorded: Recorded, chat: ChatServer
) -> None:
    scene = chat.on("<lost>", says(r"\boxed{12}"))
    steps = ("seed resources", "seed agent", "run", "close agent", "verify", "close resources")
    recorded.recorder.lose("lost", *steps)
    row = rows.math("<lost>", "12", environment="math", episode_id={"rollout_id": "lost", "attempt": 0})
    body = httpx.post(f"{recorded.url}/run", json=row, timeout=BOUND_S, trust_env=False).json()
    assert body["reward"] == 1.0
    assert len(scene.asked) == 1
    assert body["response"]["usage"]["input_tokens"] == 7
    expected = [told for step in steps for told in (step, f"{step} lost", step, f"{step} ended")]
    assert recorded.recorder.steps["lost"] == expected
