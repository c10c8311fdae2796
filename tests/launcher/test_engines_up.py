"""`paddock up` and an embedded mesh with model engines: they serve the mesh's models, and go when it goes."""

import contextlib
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from services.launcher.embedded import EmbeddedMeshError, embedded_mesh
from services.launcher.stopping import stop_plan
from shared.configuration import load_settings
from tests.launcher.driver import ENGINE
from tests.launcher.rig import BOUND_S, Launched, children_of, free_ports, gone
from tests.launcher.test_mesh import FREE_PORTS, paddock_up, urls_of

STOP_S = 5.0
COUNT = 4
PARTS = ("cache", *map(str, range(COUNT)), "router")
ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "What is 3 times 4?"}]},
    "question": "What is 3 times 4?",
    "expected_answer": "12",
}


def engines(*arguments: str, router: bool = True, **fields: Any) -> dict[str, Any]:
    command = [*ENGINE, "--port", "{port}", "--worker", "detached"]
    first = free_ports(COUNT + 2)
    entry: dict[str, Any] = {
        "command": [*command, "--says", r"It is \boxed{12}.", *arguments],
        "count": COUNT,
        "devices": 2,
        "port": first,
        "env": {"CUDA_VISIBLE_DEVICES": "{devices}", "OPTIONS": '{"cache": "{cache_url}", "index": {index}}'},
        "cache": {"command": command, "port": first + COUNT},
        **fields,
    }
    if router:
        forward = ["--forward", "{engine_urls}", "--says", "joined={engine_urls}"]
        entry["router"] = {"command": [*command, *forward], "port": first + COUNT + 1}
    return entry


def written_config(folder: Path, entry: dict[str, Any], **sections: Any) -> Path:
    path = folder / "mesh.yaml"
    settings = {
        "models": {"policy": {"upstream": "chat_completions", "model": "m"}},
        "agents": {"tool_loop": {"harness": "tool_loop"}},
        "resources": {"math": {"verifier": "math"}},
        "environments": {"math": {"resources": "math"}},
        "engines": {"policy": entry},
        "state_dir": str(folder),
        **sections,
    }
    path.write_text(yaml.safe_dump(settings))
    return path


@contextlib.contextmanager
def up(folder: Path, entry: dict[str, Any], *arguments: str, **sections: Any) -> Iterator[Launched]:
    config = written_config(folder, entry, **sections)
    environ = {**FREE_PORTS, "PADDOCK_CLIENT_TOKEN": "a-token", "HF_TOKEN": "the-engines-own"}
    with paddock_up("--config", str(config), *arguments, environ=environ) as launched:
        yield launched


def reward_of(launched: Launched, **fields: Any) -> Any:
    url = f"{urls_of(launched)['environment']}/run"
    answer = httpx.post(url, json={**ROW, **fields}, headers={"Authorization": "Bearer a-token"}, timeout=BOUND_S)
    return answer.json().get("reward", answer.text)


def output_of(folder: Path, part: str) -> str:
    return (folder / "engines" / f"policy-{part}.log").read_text()


def called_with(folder: Path, part: str) -> list[str]:
    arguments: list[str] = json.loads(re.findall(r"^called (.*)$", output_of(folder, part), re.M)[-1])
    return arguments


def engine_pids(folder: Path) -> list[int]:
    """All that the engines' output tells of: every program and its worker."""
    return [
        int(pid)
        for log in (folder / "engines").iterdir()
        for pid in re.findall(r"^(?:engine|worker) (\d+)", log.read_text(), re.M)
    ]


@pytest.mark.behaviour("LA-2", "LA-4", "LA-5")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_rows_are_answered_by_engines_behind_a_router_and_all_is_gone_within_five_seconds(
    number: signal.Signals, status: int, tmp_path: Path
) -> None:
    with up(tmp_path, engines()) as launched:
        assert [reward_of(launched) for _ in range(COUNT)] == [1.0] * COUNT
        assert "asked /v1/chat/completions" in output_of(tmp_path, "router")
        processes = [*children_of(launched.pid), *engine_pids(tmp_path)]
        assert len(engine_pids(tmp_path)) == 2 * len(PARTS)
        os.kill(launched.pid, number)
        assert launched.read_to_the_end(STOP_S) == status
        assert [pid for pid in processes if not gone(pid)] == []
        assert not [line for line in launched.lines if "is killed" in line]


@pytest.mark.behaviour("LA-2")
def test_programs_are_called_with_what_the_launcher_knows_and_without_the_meshs_secrets(tmp_path: Path) -> None:
    entry = engines()
    with up(tmp_path, entry) as launched:
        urls = [f"http://127.0.0.1:{entry['port'] + index}" for index in range(COUNT)]
        arguments = called_with(tmp_path, "router")
        assert arguments[arguments.index("--forward") + 1 :] == [*urls, "--says", f"joined={','.join(urls)}"]
        assert arguments[:2] == ["--port", str(entry["router"]["port"])]
        for index in range(COUNT):
            assert called_with(tmp_path, str(index))[:2] == ["--port", str(entry["port"] + index)]
            assert f"devices {2 * index},{2 * index + 1}\n" in output_of(tmp_path, str(index))
            options = Path(f"/proc/{pid_of_engine(tmp_path, str(index))}/environ").read_bytes().split(b"\0")
            cache_url = f"http://127.0.0.1:{entry['cache']['port']}"
            assert f'OPTIONS={{"cache": "{cache_url}", "index": {index}}}'.encode() in options
            assert b"HF_TOKEN=the-engines-own" in options
        for part in PARTS:
            assert "secrets []\n" in output_of(tmp_path, part)
        told = "\n".join(launched.lines)
        for name in ("cache of policy", "engine policy-3", "router of policy"):
            assert re.search(rf"^{name} is started; its output goes to {tmp_path}/engines/policy-", told, re.M)
            assert re.search(rf"^{name} is ready after [\d.]+ s\.$", told, re.M)


def pid_of_engine(folder: Path, part: str) -> int:
    return int(re.findall(r"^engine (\d+)", output_of(folder, part), re.M)[-1])


@pytest.mark.behaviour("LA-2")
def test_without_a_router_the_model_proxy_spreads_episodes_and_goes_on_when_an_engine_dies(tmp_path: Path) -> None:
    with up(tmp_path, engines(router=False), "--on-death", "restart") as launched:
        assert {reward_of(launched) for _ in range(16)} == {1.0}
        asked = [output_of(tmp_path, str(index)).count("asked") for index in range(COUNT)]
        assert sum(asked) == 16
        assert sum(count > 0 for count in asked) >= 2
        os.kill(pid_of_engine(tmp_path, "0"), signal.SIGKILL)
        assert {reward_of(launched) for _ in range(8)} == {1.0}
        launched.read_until("engine policy-0 is ready", count=2)
        assert any("It is started again (1 of 3 within 60 s)." in line for line in launched.lines)
        assert {reward_of(launched) for _ in range(8)} == {1.0}


@pytest.mark.behaviour("LA-6")
def test_an_engine_that_ends_by_itself_ends_the_mesh_when_asked_to_also_with_status_0(tmp_path: Path) -> None:
    with up(tmp_path, engines(), "--on-death", "end") as launched:
        pids = engine_pids(tmp_path)
        os.kill(pid_of_engine(tmp_path, "2"), signal.SIGTERM)
        assert launched.read_to_the_end(6.0) == 1
        told = "\n".join(launched.lines)
        assert re.search(r"^engine policy-2 \(pid \d+\) ended .*its program ended with exit status 0\.", told, re.M)
        assert [pid for pid in pids if not gone(pid)] == []


@pytest.mark.behaviour("LA-1")
def test_an_engine_that_fails_at_its_start_ends_everything_and_says_why(tmp_path: Path) -> None:
    config = written_config(tmp_path, engines("--leave", "1", count=1))
    with Launched(["-m", "services.cli", "up", "--config", str(config)], FREE_PORTS) as launched:
        assert launched.read_to_the_end() == 1
        told = "\n".join(launched.lines)
        assert re.search(
            r"^engine policy-0 \(pid \d+\) ended .* before it was ready: its program ended with", told, re.M
        )
        assert "\n  | RuntimeError: no device has enough memory" in told
        assert "All services are ready." not in told
        assert [pid for pid in engine_pids(tmp_path) if not gone(pid)] == []


def test_engines_that_cannot_be_started_are_all_told_before_anything_is(tmp_path: Path) -> None:
    entry = engines()
    entry["router"]["command"] = ["no-such-router"]
    with socket.create_server(("127.0.0.1", entry["port"] + 1)):
        config = written_config(tmp_path, entry)
        with Launched(["-m", "services.cli", "up", "--config", str(config)], FREE_PORTS) as launched:
            assert launched.read_to_the_end() == 2
            assert launched.process.stderr is not None
            told = launched.process.stderr.read().decode()
    assert "engines.policy.router.command: 'no-such-router' is not there: install it, or give its path." in told
    assert f"engines.policy.port: port {entry['port'] + 1} on 127.0.0.1 is taken" in told
    assert not (tmp_path / "engines").exists()


def test_an_embedded_mesh_has_its_engines_too_and_tells_of_their_start(tmp_path: Path) -> None:
    loaded = load_settings([written_config(tmp_path, engines())], {})
    told: list[str] = []
    with embedded_mesh(loaded, log_path=tmp_path / "mesh.log", progress=told.append) as mesh:
        answer = httpx.post(f"{mesh.environment_url}/run", json=ROW, timeout=BOUND_S)
        assert answer.json()["reward"] == 1.0
        pids = engine_pids(tmp_path)
    assert len(pids) == 2 * len(PARTS)
    assert [pid for pid in pids if not gone(pid, 1.0)] == []
    assert [line.partition(" is ready after ")[0] for line in told if " is ready after " in line][
        -1
    ] == "router of policy"


def test_an_embedded_mesh_whose_engine_fails_says_why(tmp_path: Path) -> None:
    loaded = load_settings([written_config(tmp_path, engines("--leave", "1", count=1))], {})
    with (
        pytest.raises(EmbeddedMeshError, match=r"(?s)engine policy-0 .*RuntimeError: no device has enough memory"),
        embedded_mesh(loaded, log_path=tmp_path / "mesh.log"),
    ):
        raise AssertionError("it started")
    assert [pid for pid in engine_pids(tmp_path) if not gone(pid, 1.0)] == []


@pytest.mark.behaviour("LA-4")
def test_a_stop_takes_five_seconds_at_most_unless_the_configuration_asks_for_more(tmp_path: Path) -> None:
    def times(**sections: Any) -> tuple[float, ...]:
        entry = {"command": [sys.executable], "stop_grace_s": sections.pop("engine_grace_s", 1.5)}
        return stop_plan(load_settings([written_config(tmp_path, entry, **sections)], {})).times_s

    assert times()[-1] <= 4.5
    assert times(engines={})[-1] <= 4.5
    assert times(engine_grace_s=20.0)[-1] >= 20.0
    assert times(serving={"stop_grace_s": 10.0})[-1] >= 20.0
    with_lead = times(serving={"drain_lead_s": 3.0, "stop_grace_s": 10.0})
    assert len(with_lead) == 3, "the engines serve through the model proxy's lead"
    assert with_lead[0] >= 13.0
    assert with_lead[1] >= with_lead[0] + 13.0
    assert with_lead[2] > with_lead[1]
