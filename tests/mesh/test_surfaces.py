"""What all four services show to whom: health, metrics, documentation, and who may call the rest."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from shared.contracts.failure import FailureKind
from tests.mesh import rows
from tests.mesh.chat import ChatServer, says
from tests.mesh.processes import SERVICES, UpMesh, up

TOKEN = "a-mesh-token-of-the-test"
CLIENT_TOKEN = "a-client-token-of-the-test"
RIGHT = r"\boxed{12}"
BOUND_S = 45.0
GUARDED = [
    ("environment", "POST", "/run"),
    ("environment", "GET", "/episodes"),
    ("environment", "DELETE", "/episodes/x"),
    ("environment", "POST", "/aggregate_metrics"),
    ("agent", "POST", "/tool_loop/v1/agent_sessions"),
    ("agent", "POST", "/tool_loop/v1/responses"),
    ("agent", "POST", "/tool_loop/v1/agent_sessions/close"),
    ("model_proxy", "POST", "/v1/responses"),
    ("model_proxy", "POST", "/v1/chat/completions"),
    ("model_proxy", "POST", "/rollouts/x/v1/responses"),
    ("model_proxy", "GET", "/v1/models"),
    ("model_proxy", "GET", "/captures/x"),
    ("model_proxy", "POST", "/captures/x/seal"),
    ("resources", "POST", "/math/seed_session"),
    ("resources", "POST", "/math/verify"),
    ("resources", "POST", "/math/close_session"),
    ("resources", "POST", "/weather/get_weather"),
    ("resources", "POST", "/weather/mcp"),
    ("resources", "GET", "/math/reverify_mode"),
]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, chat: ChatServer) -> Iterator[UpMesh]:
    environ = {
        "PADDOCK_MODEL_BASE_URL": chat.url,
        "PADDOCK_MODEL_NAME": "m",
        "PADDOCK_MESH_TOKEN": TOKEN,
        "PADDOCK_CLIENT_TOKEN": CLIENT_TOKEN,
    }
    with up(cwd=tmp_path_factory.mktemp("mesh"), environ=environ) as started:
        yield started


def ask(
    mesh: UpMesh, service: str, method: str, path: str, *, token: str | None = None, body: Any = None
) -> httpx.Response:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    url = mesh.urls[service] + path
    return httpx.request(method, url, headers=headers, json=body, timeout=BOUND_S, trust_env=False)


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_tells_how_it_is_to_anyone(mesh: UpMesh, service: str) -> None:
    assert ask(mesh, service, "GET", "/healthz").json() == {"status": "ok"}
    ready = ask(mesh, service, "GET", "/readyz").json()
    assert (ready["status"], ready["service"]) == ("ready", service)
    assert len(ready["instance"]) >= 8
    version = ask(mesh, service, "GET", "/version").json()
    assert version == {"service": service, "version": ready["build"]}
    docs = ask(mesh, service, "GET", "/docs")
    assert docs.headers["content-type"].startswith("text/html")
    assert "/openapi.json" in docs.text
    metrics = ask(mesh, service, "GET", "/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert "# TYPE paddock_requests_total counter" in metrics.text


@pytest.mark.parametrize("service", SERVICES)
def test_the_openapi_document_has_the_routes_that_the_service_has(mesh: UpMesh, service: str) -> None:
    paths = ask(mesh, service, "GET", "/openapi.json").json()["paths"]
    known = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert {("GET", path) for path in ("/healthz", "/readyz", "/metrics", "/version")} <= known
    verbs = {path.split("/")[-1] for owner, _, path in GUARDED if owner == service} - {"x", "get_weather", "mcp"}
    assert verbs <= {path.split("/")[-1] for _, path in known}, known


@pytest.mark.parametrize(("service", "method", "path"), GUARDED, ids=lambda part: str(part).replace("/", "-"))
def test_nothing_but_that_is_open(mesh: UpMesh, service: str, method: str, path: str) -> None:
    wrong = TOKEN if service == "environment" else CLIENT_TOKEN
    for token in (None, "another", wrong):
        refused = ask(mesh, service, method, path, token=token, body={})
        assert refused.status_code == 401, refused.text
        assert refused.json()["failure"]["failure_kind"] == "unauthorized"
        assert TOKEN not in refused.text
    right = CLIENT_TOKEN if service == "environment" else TOKEN
    answered = ask(mesh, service, method, path, token=right, body={})
    if service == "model_proxy" and path.startswith("/v1/") and method == "POST":
        assert "A model call needs an episode" in answered.json()["error"]["message"]
    else:
        assert answered.status_code not in {401, 403}


def test_a_path_that_is_not_there_and_a_wrong_method_are_told_in_the_meshs_form(mesh: UpMesh) -> None:
    for service in SERVICES:
        token = CLIENT_TOKEN if service == "environment" else TOKEN
        lost = ask(mesh, service, "GET", "/no/such/path/at/all", token=token)
        assert (lost.status_code, lost.json()["failure"]["failure_kind"]) == (404, "not_found")
        wrong = ask(mesh, service, "DELETE", "/readyz")
        assert wrong.status_code == 405
        assert "error" in wrong.json()


def test_an_episode_runs_with_both_tokens_and_is_counted(mesh: UpMesh, chat: ChatServer) -> None:
    chat.on("<counted>", says(RIGHT))
    row = rows.math("<counted>", "12", environment="math")
    assert ask(mesh, "environment", "POST", "/run", token=CLIENT_TOKEN, body=row).json()["reward"] == 1.0
    bad = ask(mesh, "environment", "POST", "/run", token=CLIENT_TOKEN, body={**row, "expected_answer": 12})
    assert bad.status_code == 422
    assert bad.json()["detail"][0]["loc"] == ["expected_answer"]
    metrics = {service: ask(mesh, service, "GET", "/metrics").text for service in SERVICES}
    assert 'paddock_episodes_total{environment="math",kind="none",outcome="result"} 1.0' in metrics["environment"]
    assert 'paddock_stage_seconds_count{environment="math",stage="verification"} 1.0' in metrics["environment"]
    assert 'paddock_upstream_statuses_total{model="policy",status="200"} 1.0' in metrics["model_proxy"]
    assert 'status="200"' in metrics["agent"]
    assert 'status="200"' in metrics["resources"]
    assert TOKEN not in "".join(metrics.values()) + mesh.told
    assert CLIENT_TOKEN not in "".join(metrics.values()) + mesh.told


@pytest.mark.parametrize(
    ("row", "where", "told"),
    [
        ({"environment": "maths"}, ["environment"], "Did you mean 'math'?"),
        ({"environment": None}, ["environment"], "Known: gpqa, math, mcqa, string_match, weather"),
        ({"environment": "math", "responses_create_params": {"input": "x", "temprature": 1}}, None, "temprature"),
        ({"environment": "mcqa", "options": [{"A": "tin"}], "expected_answer": "B"}, [], "no option"),
        ({"environment": "string_match", "extraction_mode": "middle"}, ["extraction_mode"], "boxed"),
    ],
)
def test_a_row_that_does_not_fit_is_422_with_its_field(
    mesh: UpMesh, row: dict[str, Any], where: list[str] | None, told: str
) -> None:
    body = {**rows.math("<bad>", "12"), **row}
    refused = ask(mesh, "environment", "POST", "/run", token=CLIENT_TOKEN, body=body)
    assert refused.status_code == 422, refused.text
    answer = refused.json()
    assert answer["failure"] == {"failure_kind": FailureKind.BAD_ROW, "terminal": True} | (
        {"stage": answer["failure"]["stage"]} if "stage" in answer["failure"] else {}
    )
    assert answer["detail"]
    if where is not None:
        assert answer["detail"][0]["loc"] == where
    assert told in refused.text


def test_a_model_that_is_not_configured_is_told_with_the_nearest(mesh: UpMesh) -> None:
    body = {"model": "polcy", "input": "x"}
    refused = ask(mesh, "model_proxy", "POST", "/rollouts/x/v1/responses", token=TOKEN, body=body)
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"
    assert "Did you mean 'policy'?" in refused.json()["error"]["message"]
