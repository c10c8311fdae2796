"""What an operator sees of a mesh: metrics and log lines, without a secret in any."""

import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from shared.contracts.failure import FailureKind, Stage
from tests.mesh import rows
from tests.mesh.chat import ChatServer, Gate, calls, refuses, says
from tests.mesh.processes import SERVICES, UpMesh
from tests.mesh.watched import (
    BOUND_S,
    CLIENT_TOKEN,
    MESH_TOKEN,
    MODEL_KEY,
    RIGHT,
    SECRETS,
    TOOL_KEY,
    all_lines,
    configuration,
    keyed,
    lines_of,
    risen,
    run,
    scraped,
    started,
    token_of,
)
from tests.serving import free_port

OPEN_LABELS = {"route", "version", "le"}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, chat: ChatServer) -> Iterator[UpMesh]:
    """Without a collector."""
    with started(tmp_path_factory.mktemp("plain"), chat) as running:
        yield running


# Metrics.


def test_an_episode_is_counted_by_every_service(mesh: UpMesh, chat: ChatServer) -> None:
    chat.on("<counted-all>", calls("get_weather", {"city": "Rome"}), says("Take a coat."))
    before = {service: scraped(mesh, service) for service in SERVICES}
    row = keyed("<counted-all>", "counted-all-1", "weather", rows.weather("<counted-all>"))
    assert run(mesh, row)["reward"] == 1.0
    lines_of(mesh, "counted-all-1")
    after = {service: scraped(mesh, service) for service in SERVICES}

    def rose(service: str, name: str, **labels: str) -> float:
        return risen(before[service], after[service], name, **labels)

    ended = {"environment": "weather", "outcome": "result"}
    assert rose("environment", "paddock_episodes_total", **ended, kind="none") == 1
    assert rose("environment", "paddock_episode_seconds_count", **ended) == 1
    for stage in ("seed", "agent", "cleanup", "verification"):
        assert rose("environment", "paddock_stage_seconds_count", environment="weather", stage=stage) == 1
    for state in ("ready", "active", "closed"):
        assert rose("agent", "paddock_agent_sessions_total", agent="tool_loop", state=state) == 1
    assert rose("agent", "paddock_activations_total", agent="tool_loop", end="completed") == 1
    assert rose("agent", "paddock_activation_seconds_count", agent="tool_loop") == 1
    assert rose("agent", "paddock_agent_closes_total", agent="tool_loop", outcome="closed") == 1
    for state in ("open", "verifying", "graded", "closed"):
        assert rose("resources", "paddock_resources_sessions_total", resources="weather", state=state) == 1
    assert rose("resources", "paddock_tool_calls_total", resources="weather", outcome="ok") == 1
    assert rose("resources", "paddock_verifications_total", resources="weather", outcome="graded") == 1
    assert rose("model_proxy", "paddock_model_calls_total", model="policy", outcome="ok") == 2
    assert rose("model_proxy", "paddock_upstream_statuses_total", model="policy", status="200") == 2
    assert rose("model_proxy", "paddock_upstream_attempts_total", model="policy") == 2
    assert rose("model_proxy", "paddock_first_byte_seconds_count", model="policy") == 2
    assert rose("model_proxy", "paddock_model_call_seconds_count", model="policy") == 2
    assert rose("model_proxy", "paddock_tokens_total", model="policy", direction="input") == 14
    assert rose("model_proxy", "paddock_tokens_total", model="policy", direction="output") == 4
    assert rose("model_proxy", "paddock_captures_sealed_total") == 1
    assert rose("model_proxy", "paddock_capture_bytes_total") > 500
    for service, what in (
        ("environment", "episodes"), ("agent", "activations"), ("resources", "verifications"),
        ("model_proxy", "model_calls"),
    ):  # fmt: skip
        assert after[service]["paddock_running", frozenset({("what", what)})] == 0
    assert after["environment"]["paddock_leases_held", frozenset({("what", "episode")})] == 0
    assert after["agent"]["paddock_leases_held", frozenset({("what", "agent")})] == 0


@pytest.mark.parametrize(
    ("environment", "kind", "end", "category"),
    [("math", "model_rate_limited", "failed", "rate_limit"), ("nobody", "model_error", "error", "connection")],
)
def test_a_failure_is_counted_by_its_kind_and_by_how_the_call_ended(
    mesh: UpMesh, chat: ChatServer, environment: str, kind: str, end: str, category: str
) -> None:
    chat.on("<counted-failure>", refuses(429, {"message": "slow down", "code": "rate_limit_exceeded"}))
    before = {service: scraped(mesh, service) for service in SERVICES}
    key = f"counted-failure-{environment}"
    body = run(mesh, keyed("<counted-failure>", key, environment))
    assert body["failure"]["failure_kind"] == kind, body
    lines_of(mesh, key)
    after = {service: scraped(mesh, service) for service in SERVICES}
    agent, model = ("tool_loop", "policy") if environment == "math" else ("nobody", "nobody")
    status = "429" if environment == "math" else "none"
    for service, name, labels in (
        ("environment", "paddock_episodes_total", {"environment": environment, "outcome": "failure", "kind": kind}),
        ("agent", "paddock_activations_total", {"agent": agent, "end": end}),
        ("model_proxy", "paddock_model_calls_total", {"model": model, "outcome": category}),
        ("model_proxy", "paddock_upstream_statuses_total", {"model": model, "status": status}),
    ):
        assert risen(before[service], after[service], name, **labels) == 1, (name, labels)


def test_who_waits_for_a_place_is_counted_while_it_waits_and_how_long(mesh: UpMesh, chat: ChatServer) -> None:
    gate = Gate()
    scene = chat.on("<first-in>", gate.before(says(RIGHT)))
    chat.on("<second-in>", says(RIGHT))
    before = scraped(mesh, "environment")
    queued = ("paddock_episodes_queued", frozenset({("environment", "narrow")}))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(run, mesh, keyed("<first-in>", "first-in-1", "narrow"))
        scene.wait_for_call()
        second = pool.submit(run, mesh, keyed("<second-in>", "second-in-1", "narrow"))
        deadline = time.monotonic() + BOUND_S
        while scraped(mesh, "environment").get(queued) != 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        waiting = scraped(mesh, "environment")
        assert waiting[queued] == 1
        assert waiting["paddock_leases_held", frozenset({("what", "admission")})] == 1
        gate.open()
        assert [one.result(BOUND_S)["reward"] for one in (first, second)] == [1.0, 1.0]
    after = scraped(mesh, "environment")
    assert after[queued] == 0
    admitted = {"environment": "narrow", "outcome": "admitted"}
    assert risen(before, after, "paddock_admission_wait_seconds_count", **admitted) == 2
    assert risen(before, after, "paddock_admission_wait_seconds_sum", **admitted) > 0


def test_no_label_takes_its_value_from_a_request(mesh: UpMesh) -> None:
    """Whatever callers send: the values are the code's own words and the configuration's names."""
    mark = "invented-by-the-caller"
    tokens = dict.fromkeys(SERVICES, MESH_TOKEN) | {"environment": CLIENT_TOKEN}
    paths = ("/run", f"/{mark}", f"/{mark}/{mark}", f"/{mark}/v1/responses", f"/{mark}/v1/agent_sessions",
             f"/{mark}/seed_session", f"/{mark}/verify", f"/rollouts/{mark}/v1/responses", f"/captures/{mark}",
             f"/episodes/{mark}", f"/weather/{mark}", "/v1/responses")  # fmt: skip
    body = {**keyed("<x>", mark), "environment": mark, "agent_ref": {"name": mark}, "model": mark, "input": "x"}
    with httpx.Client(timeout=BOUND_S, trust_env=False) as client:
        for service, token in tokens.items():
            headers = {"Authorization": f"Bearer {token}", "X-Paddock-Key": mark, "X-Agent-Session": mark}
            for path in paths:
                for method in ("POST", "GET", "DELETE", "PROPFIND"):
                    client.request(method, mesh.urls[service] + path, json=body, headers=headers)
    loaded = configuration("http://x/v1")
    known = {
        "other", "none", "ok", *SERVICES, *(kind.value for kind in FailureKind), *(stage.value for stage in Stage),
        *(name for section in loaded.values() for name in section),
    }  # fmt: skip
    for service in SERVICES:
        for (name, labels), _ in scraped(mesh, service).items():
            for label, value in labels:
                assert mark not in value, (name, label)
                if label in OPEN_LABELS or re.fullmatch(r"[1-5]\d\d", value):
                    continue
                assert value in known or re.fullmatch(r"[a-z_]+", value), (name, label, value)


# Log lines.


def test_every_service_writes_one_line_for_an_episode_with_key_stage_and_instance(
    mesh: UpMesh, chat: ChatServer
) -> None:
    chat.on("<lines>", says(RIGHT))
    run(mesh, keyed("<lines>", "lines-1"))
    told = lines_of(mesh, "lines-1")
    assert Counter(line["service"] for line in told) == dict.fromkeys(SERVICES, 1)
    by_service = {line["service"]: line for line in told}
    for service, line in by_service.items():
        ready = httpx.get(f"{mesh.urls[service]}/readyz", timeout=BOUND_S, trust_env=False).json()
        assert line["instance"] == ready["instance"]
        assert line["level"] == "info"
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
        assert re.fullmatch(r"[0-9a-f]{32}", line["trace_id"])
    stages = {service: line["stage"] for service, line in by_service.items()}
    assert stages == {
        "environment": "verification", "agent": "cleanup", "model_proxy": "cleanup", "resources": "verification",
    }  # fmt: skip


def test_no_secret_is_in_any_line_answer_or_metric_whatever_fails(mesh: UpMesh, chat: ChatServer) -> None:
    """Servers that repeat what they were sent, addresses that hold a password, and faults at every service."""
    told = " ".join(SECRETS)
    echo = {"message": f"bad header: Authorization: Bearer {MODEL_KEY}; {MODEL_KEY}", "code": MODEL_KEY}
    answers: list[Any] = []
    for status in (400, 401, 403, 404, 429, 500, 503):
        chat.on(f"<echo-{status}>", refuses(status, echo, ("x-request-id", MODEL_KEY)))
        answers.append(run(mesh, keyed(f"<echo-{status}>", f"echo-{status}")))
    chat.on("<says-it>", says(f"{MODEL_KEY} {RIGHT}"))
    answers.append(run(mesh, keyed("<says-it>", "says-it")))
    chat.on("<judge-echo>", says(r"\boxed{13}"), refuses(401, echo))
    answers.append(run(mesh, keyed("<judge-echo>", "judge-echo", "judged")))
    for environment in ("foreign", "nobody"):
        answers.append(run(mesh, keyed("<x>", f"secret-{environment}", environment)))
    assert [body.get("failure") is not None for body in answers[:7]] == [True] * 7
    answers.append(_misused(mesh, told))
    seen = {"answers": repr(answers), "lines": mesh.told, "captures": _captures(mesh)}
    seen |= {service: repr(scraped(mesh, service)) for service in SERVICES}
    for where, text in seen.items():
        assert [secret for secret in SECRETS if secret in text] == [], where
    for line in all_lines(mesh):
        assert line["service"] in SERVICES


def _captures(mesh: UpMesh) -> str:
    headers = {"Authorization": f"Bearer {MESH_TOKEN}"}
    keys = [*(f"echo-{status}" for status in (400, 401, 503)), "says-it", "judge-echo", "secret-foreign"]
    with httpx.Client(timeout=BOUND_S, trust_env=False, headers=headers) as client:
        return "".join(client.get(f"{mesh.urls['model_proxy']}/captures/{key}").text for key in keys)


def _misused(mesh: UpMesh, told: str) -> list[str]:
    """Answers to requests that hold secrets where none belong, right and wrong tokens, whole and cut off."""
    answers = []
    session = token_of("misused-1", "")
    with httpx.Client(timeout=BOUND_S, trust_env=False) as client:
        for service, url in mesh.urls.items():
            for token in (MESH_TOKEN, CLIENT_TOKEN, session, f"{session}x", "wrong"):
                headers = {"Authorization": f"Bearer {token}"}
                for path in ("/run", "/tool_loop/v1/responses", "/math/verify", "/v1/responses", "/captures/x/seal"):
                    answered = client.post(url + path, content=b'{"model": "policy", "input"', headers=headers)
                    answers.append(f"{service} {path} {answered.status_code} {answered.text}")
                    answers.append(client.post(url + path, json={"model": "policy"}, headers=headers).text)
    own = mesh.urls["agent"]
    # What a caller itself sends is repeated to that caller only, never in a log.
    client_told = httpx.post(
        f"{own}/tool_loop/v1/responses", json={"input": told}, timeout=BOUND_S, trust_env=False,
        headers={"Authorization": f"Bearer {MESH_TOKEN}", "X-Paddock-Key": "x", "X-Agent-Session": "no-such"},
    )  # fmt: skip
    assert client_told.status_code == 409
    return answers


def test_a_store_whose_address_holds_a_password_is_told_without_it(tmp_path: Path, chat: ChatServer) -> None:
    url = f"redis://:{TOOL_KEY}@127.0.0.1:{free_port()}/0"
    with started(tmp_path, chat, PADDOCK_STORE_URL=url) as mesh:
        answered = httpx.post(
            f"{mesh.url}/run", json=keyed("<x>", "no-store-1"), timeout=BOUND_S, trust_env=False,
            headers={"Authorization": f"Bearer {CLIENT_TOKEN}"},
        )  # fmt: skip
        assert answered.status_code == 503
        assert f"127.0.0.1:{urlsplit(url).port}" in answered.text
        assert TOOL_KEY not in answered.text + mesh.told
        store = scraped(mesh, "environment")
        assert any(dict(labels).get("outcome") == "unavailable" for _, labels in store)
