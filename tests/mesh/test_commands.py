"""What the commands say of themselves, of the machine and of a configuration, right or wrong."""

import json
from pathlib import Path

import pytest

from tests.mesh.chat import ChatServer
from tests.mesh.processes import paddock
from tests.serving import free_port

COMMANDS = ("up", "serve", "run", "demo", "doctor", "config", "schema")
TOKEN = "a-mesh-token-that-nobody-may-see"
CLIENT_TOKEN = "a-client-token-that-nobody-may-see"
KEY = "a-key-that-nobody-may-see"
PASSWORD = "a-password-that-nobody-may-see"
SECRETS = (TOKEN, CLIENT_TOKEN, KEY, PASSWORD)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_command_alone_says_what_there_is(tmp_path: Path) -> None:
    done = paddock("--help", cwd=tmp_path)
    assert done.status == 0
    for command in COMMANDS:
        assert f"\n    {command} " in done.out
    assert "PADDOCK_MODEL_BASE_URL" in done.out
    assert paddock(cwd=tmp_path).status == 2


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("up", ["--on-death", "143 or 130"]),
        ("serve", ["model_proxy", "--host", "--port", "PADDOCK_MESH_TOKEN"]),
        ("run", ["--environment", "--resume", "--repeats", "--limit", "Exit status: 0"]),
        ("demo", ["scripted"]),
        ("doctor", ["Exit status 1"]),
        ("config", ["--defaults", "Secrets are hidden"]),
        ("schema", ["row", "native", "config"]),
    ],
)
def test_every_command_says_what_it_does_and_takes(command: str, words: list[str], tmp_path: Path) -> None:
    done = paddock(command, "--help", cwd=tmp_path)
    assert (done.status, done.err) == (0, "")
    for word in ["--config", *words]:
        assert word in done.out


@pytest.fixture
def secrets(chat: ChatServer) -> dict[str, str]:
    return {
        "PADDOCK_MESH_TOKEN": TOKEN,
        "PADDOCK_CLIENT_TOKEN": CLIENT_TOKEN,
        "PADDOCK_MODEL_BASE_URL": chat.url.replace("http://", f"http://someone:{PASSWORD}@"),
        "PADDOCK_MODEL_NAME": "a-model",
        "PADDOCK_MODEL_API_KEY": KEY,
    }


@pytest.mark.behaviour("CF-1")
def test_config_shows_values_with_their_sources_and_hides_secrets(tmp_path: Path, secrets: dict[str, str]) -> None:
    write(tmp_path / "paddock.yaml", "serving: {keep_alive_s: 50}\n")
    more = write(tmp_path / "more.yaml", "serving: {keep_alive_s: 40}\n")
    done = paddock("config", "--config", tmp_path / "paddock.yaml", "--config", more, cwd=tmp_path, environ=secrets)
    assert done.status == 0, done.told
    lines = {line.split()[0]: line for line in done.out.splitlines()}
    assert lines["serving.keep_alive_s"].split()[1:] == ["40.0", "#", str(more)]
    assert lines["models.policy.model"].endswith("# PADDOCK_MODEL_BASE_URL")
    assert lines["security.mesh_token"].split("  ")[-1].strip() == "# PADDOCK_MESH_TOKEN"
    assert lines["serving.max_body_mib"].endswith("# default")
    assert [secret for secret in SECRETS if secret in done.told] == []


def test_config_lists_every_default_with_its_meaning(tmp_path: Path) -> None:
    done = paddock("config", "--defaults", cwd=tmp_path)
    assert done.status == 0
    rows = [line.split(" | ") for line in done.out.splitlines() if line.startswith("| `")]
    assert len(rows) > 40
    assert [row[0] for row in rows if len(row[2].rstrip(" |")) < 10] == []


def test_doctor_reaches_the_model_and_hides_secrets(tmp_path: Path, secrets: dict[str, str]) -> None:
    ports = {f"PADDOCK_{name}_URL": f"http://127.0.0.1:{free_port()}" for name in ("ENVIRONMENT", "AGENT")}
    done = paddock("doctor", cwd=tmp_path, environ={**secrets, **ports})
    assert done.status == 0, done.told
    told = [line.split()[0:2] for line in done.out.splitlines()]
    assert ["ok", "configuration"] in told
    assert ["ok", "python"] in told
    assert any(line.startswith("ok      model policy") and "answers" in line for line in done.out.splitlines())
    assert [secret for secret in SECRETS if secret in done.told] == []


def test_doctor_finds_what_keeps_the_mesh_from_running(tmp_path: Path) -> None:
    config = write(tmp_path / "bad.yaml", "agents: {a: {harness: tool_lop, model: nobody}}\n")
    done = paddock("doctor", "--config", config, cwd=tmp_path)
    assert done.status == 1
    wrong = [line for line in done.out.splitlines() if line.startswith("WRONG")]
    assert len(wrong) == 2
    assert any("Did you mean 'tool_loop'?" in line for line in wrong)

    nobody = {"PADDOCK_MODEL_BASE_URL": f"http://127.0.0.1:{free_port()}/v1"}
    done = paddock("doctor", cwd=tmp_path, environ=nobody)
    assert done.status == 1
    assert f"{nobody['PADDOCK_MODEL_BASE_URL']} cannot be reached" in done.out


@pytest.mark.parametrize("name", ["config", "row", "native", "reply", "failure", "verdict", "receipt", "capture"])
def test_schema_prints_a_json_schema(name: str, tmp_path: Path) -> None:
    done = paddock("schema", name, cwd=tmp_path)
    assert done.status == 0, done.told
    assert {"properties", "title"} <= json.loads(done.out).keys()


BAD = """\
store: {url: "tape://x"}
models:
  policy: {upstream: scriptedd}
  other: {upstream: chat_completions, base_url: nowhere, api_key_env: A_VARIABLE_THAT_IS_NOT_SET}
agents:
  solver: {harness: tool_lop, model: polcy}
resources:
  sums: {verifier: maths, tools: [wether], judge: oter}
environments:
  sums: {resources: summs, agent: sover}
"""
TOLD = {
    "store.url": "there is no store of kind 'tape'",
    "models.policy": "There is no kind of upstream 'scriptedd'. Did you mean 'scripted'?",
    "models.other.base_url": "'nowhere' is no http://",
    "models.other.api_key_env": "A_VARIABLE_THAT_IS_NOT_SET is not set",
    "agents.solver": "There is no harness 'tool_lop'. Did you mean 'tool_loop'?",
    "agents.solver.model": "There is no model 'polcy'. Did you mean 'policy'? Known: other, policy.",
    "resources.sums": "There is no verifier 'maths'. Did you mean 'math'?",
    "resources.sums.tools": "There is no toolset 'wether'. Did you mean 'weather'?",
    "resources.sums.judge": "There is no model 'oter'. Did you mean 'other'?",
    "environments.sums.resources": "There is no resources entry 'summs'. Did you mean 'sums'?",
    "environments.sums.agent": "There is no agent 'sover'. Did you mean 'solver'?",
}


@pytest.mark.behaviour("CF-1")
@pytest.mark.parametrize("words", [("up",), ("run", "rows.jsonl"), ("config",)], ids=lambda words: words[0])
def test_everything_that_is_wrong_is_told_at_once_with_file_and_key(words: tuple[str, ...], tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", "{}\n")
    config = write(tmp_path / "bad.yaml", BAD)
    done = paddock(*words, "--config", config, cwd=tmp_path)
    assert (done.status, done.out) == (2, ""), done.told
    told = [line.strip() for line in done.err.splitlines()[1:]]
    for key, sentence in TOLD.items():
        assert any(line.startswith(f"{config}: {key}: ") and sentence in line for line in told), (key, told)
    assert len(told) == len(TOLD)


@pytest.mark.behaviour("CF-1", "ES-1", "ES-2", "ES-4")
def test_unknown_keys_and_impossible_values_are_told_with_their_keys(tmp_path: Path) -> None:
    config = write(
        tmp_path / "bad.yaml",
        "servces: {}\n"
        "serving: {max_body_mib: 0, keep_alive_s: .nan, log_level: loud}\n"
        "agents: {solver: {model: policy}}\n"
        "environments: {sums: {resources: r, agent: a, max_concurrent: 3, tools: [ftp], episode_timeout: 3}}\n",
    )
    done = paddock("up", "--config", config, cwd=tmp_path, environ={"PADDOCK_AGENT_URL": "nonsense"})
    assert (done.status, done.out) == (2, "")
    for told in (
        f"{config}: servces: unknown key. There is no key 'servces'. Did you mean 'services'?",
        f"{config}: serving.max_body_mib: ",
        f"{config}: serving.keep_alive_s: ",
        f"{config}: serving.log_level: ",
        f"{config}: agents.solver.harness: ",
        f"{config}: environments.sums.tools.0: ",
        f"{config}: environments.sums.episode_timeout: unknown key.",
        "PADDOCK_AGENT_URL: services.agent.url: 'nonsense' is no address of a service",
    ):
        assert told in done.err, done.err


@pytest.mark.parametrize(
    ("text", "why"), [(None, "cannot be read: No such file"), ("a: [1\n", "is not valid YAML"), ("- 1\n", "a mapping")]
)
def test_a_file_that_is_no_configuration_is_told(text: str | None, why: str, tmp_path: Path) -> None:
    path = tmp_path / "paddock.yaml"
    if text is not None:
        write(path, text)
    done = paddock("up", "--config", path, cwd=tmp_path)
    assert (done.status, done.out) == (2, "")
    assert f"{path}: " in done.err
    assert why in done.err


def test_a_run_of_a_file_that_is_not_there_starts_nothing(tmp_path: Path) -> None:
    done = paddock("run", "no.jsonl", cwd=tmp_path)
    assert (done.status, done.out, done.err) == (2, "", "no.jsonl does not exist.\n")


def test_a_run_against_an_address_where_nothing_is_says_so(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", "{}\n")
    url = f"http://127.0.0.1:{free_port()}"
    done = paddock("run", "rows.jsonl", "--url", url, cwd=tmp_path)
    assert done.status == 2
    assert f"Nothing answers at {url}" in done.err
    assert "paddock up" in done.err


@pytest.mark.parametrize("service", ["environment", "agent", "model-proxy", "resources"])
def test_a_service_that_others_could_reach_needs_a_token(service: str, tmp_path: Path) -> None:
    done = paddock("serve", service, "--host", "0.0.0.0", "--port", free_port(), cwd=tmp_path)
    assert (done.status, done.out) == (2, "")
    assert "set PADDOCK_MESH_TOKEN, or listen on 127.0.0.1" in done.err
