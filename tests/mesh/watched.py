"""A mesh to watch: what it is configured with, how an episode is run on it, and what is read of it."""

import time
from pathlib import Path
from typing import Any

import httpx
import orjson
from prometheus_client.parser import text_string_to_metric_families

from shared.tokens import SessionClaims, Signer
from tests.mesh import rows
from tests.mesh.chat import ChatServer
from tests.mesh.processes import SERVICES, UpMesh, up
from tests.serving import free_port

MESH_TOKEN = "mesh-token-4711-of-this-test"
CLIENT_TOKEN = "client-token-4711-of-this-test"
MODEL_KEY = "model-key-4711-of-this-test"
TOOL_KEY = "tool-key-4711-of-this-test"
COLLECTOR_KEY = "collector-key-4711-of-this-test"
SECRETS = (MESH_TOKEN, CLIENT_TOKEN, MODEL_KEY, TOOL_KEY, COLLECTOR_KEY)
RIGHT = r"\boxed{12}"
BOUND_S = 60.0
TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"


def configuration(chat_url: str) -> dict[str, Any]:
    model = {"upstream": "chat_completions", "api_key_env": "A_MODELS_KEY", "model": "m", "base_url": chat_url}
    foreign = {
        "type": "mcp", "name": "foreign", "required": True, "url": f"http://me:{TOOL_KEY}@127.0.0.1:{free_port()}/mcp",
        "headers": {"Authorization": f"Bearer {TOOL_KEY}"},
    }  # fmt: skip
    weather = {"verifier": "tool_calls", "tools": ["weather"], "without_expected_calls": "offered_tool"}
    entry = {"resources": "math", "agent": "tool_loop"}
    return {
        "models": {
            "policy": model,
            "private": {**model, "trace_context": False},
            "nobody": {**model, "base_url": f"http://127.0.0.1:{free_port()}/v1"},
        },
        "agents": {
            "tool_loop": {"harness": "tool_loop", "model": "policy"},
            "private": {"harness": "tool_loop", "model": "private"},
            "nobody": {"harness": "tool_loop", "model": "nobody"},
            "foreign": {"harness": "tool_loop", "tool_accesses": [foreign]},
        },
        "resources": {
            "math": {"verifier": "math"}, "judged": {"verifier": "math", "judge": "policy"}, "weather": weather,
        },
        "environments": {
            "math": entry,
            "private": {**entry, "agent": "private"},
            "nobody": {**entry, "agent": "nobody"},
            "foreign": {**entry, "agent": "foreign"},
            "judged": {**entry, "resources": "judged"},
            "weather": {"resources": "weather", "agent": "tool_loop", "tools": ["direct_http"]},
            "weather_mcp": {"resources": "weather", "agent": "tool_loop", "tools": ["mcp"]},
            "narrow": {**entry, "max_concurrent": 1, "queue_timeout_s": 30.0},
        },
    }  # fmt: skip


def started(folder: Path, chat: ChatServer, **environ: str) -> Any:
    config = folder / "paddock.json"
    config.write_bytes(orjson.dumps(configuration(chat.url)))
    given = {"A_MODELS_KEY": MODEL_KEY, "PADDOCK_MESH_TOKEN": MESH_TOKEN, "PADDOCK_CLIENT_TOKEN": CLIENT_TOKEN}
    return up("--config", config, cwd=folder, environ={**given, **environ})


def token_of(key: str, trace: str) -> str:
    claims = SessionClaims(key=key, model="policy", session="s", expires_at=time.time() + 60, trace=trace)
    return Signer(MESH_TOKEN, "session-token").session_token(claims)


def run(mesh: UpMesh, row: dict[str, Any], **headers: str) -> dict[str, Any]:
    given = {"Authorization": f"Bearer {CLIENT_TOKEN}", **headers}
    answered = httpx.post(f"{mesh.url}/run", json=row, headers=given, timeout=BOUND_S, trust_env=False)
    body: dict[str, Any] = answered.json()
    assert answered.status_code == 200, body
    return body


def keyed(marker: str, key: str, environment: str = "math", row: dict[str, Any] | None = None) -> dict[str, Any]:
    given = rows.math(marker, "12") if row is None else row
    return {**given, "environment": environment, "episode_id": {"rollout_id": key, "attempt": 0}}


def lines_of(mesh: UpMesh, key: str, enough: int = len(SERVICES)) -> list[dict[str, Any]]:
    """The log lines of an episode, once there are enough of them: a service may write one after it has answered."""
    deadline = time.monotonic() + BOUND_S
    while True:
        told = [line for line in all_lines(mesh) if line.get("key") == key]
        if len(told) >= enough or time.monotonic() > deadline:
            return told
        time.sleep(0.05)


def all_lines(mesh: UpMesh) -> list[dict[str, Any]]:
    """Every whole line of the services' standard error; each is JSON."""
    return [orjson.loads(line) for line in mesh.running.err.split("\n")[:-1]]


Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scraped(mesh: UpMesh, service: str) -> Series:
    text = httpx.get(f"{mesh.urls[service]}/metrics", timeout=BOUND_S, trust_env=False).text
    families = text_string_to_metric_families(text)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def risen(before: Series, after: Series, name: str, **labels: str) -> float:
    """By how much one series has risen."""
    series = (name, frozenset(labels.items()))
    return after.get(series, 0.0) - before.get(series, 0.0)
