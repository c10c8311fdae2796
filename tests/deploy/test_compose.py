"""The shipped Compose file on a real engine: built, brought up without any configuration, used, taken down."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.deploy.compose_project import IMAGE, SERVICES, TREE, ComposeProject, compose_project, run

pytestmark = [pytest.mark.compose, pytest.mark.timeout(900)]

DEMO_ROWS = sorted((TREE / "services" / "collector" / "demo").glob("*.jsonl"))
WRONG_ON_PURPOSE = {"sum-of-the-first-hundred", "umbrella-in-london"}
READ_TOKEN = "print(open('/run/paddock/mesh-token').read())"
CALL_WITHOUT_TOKEN = """
import http.client
connection = http.client.HTTPConnection("agent", 8200, timeout=10)
connection.request("POST", "/tool_loop/v1/agent_sessions", "{}", {"content-type": "application/json"})
print(connection.getresponse().status)
"""


@pytest.fixture(scope="module")
def mesh() -> Iterator[ComposeProject]:
    with compose_project() as project:
        yield project


def test_the_demo_rows_are_run_from_outside_with_tools_and_both_rewards(mesh: ComposeProject, tmp_path: Path) -> None:
    paddock = Path(sys.executable).with_name("paddock")
    run(str(paddock), "run", *map(str, DEMO_ROWS), "--url", mesh.url, "-o", str(tmp_path / "out.jsonl"))
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(results) == sum(len(path.read_text(encoding="utf-8").splitlines()) for path in DEMO_ROWS)
    rewards = {result["task_id"]["task_id"]: result["reward"] for result in results}
    assert {task for task, reward in rewards.items() if reward == 0.0} == WRONG_ON_PURPOSE
    assert set(rewards.values()) == {0.0, 1.0}


def test_only_the_environment_server_can_be_reached_and_only_from_this_machine(mesh: ComposeProject) -> None:
    bindings = {service: mesh.container(service)["HostConfig"]["PortBindings"] or {} for service in SERVICES}
    assert bindings.pop("environment") == {"8100/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(mesh.port)}]}
    assert list(bindings.values()) == [{}, {}, {}]
    assert httpx.get(f"{mesh.url}/readyz", timeout=10).status_code == 200


def test_the_services_share_a_token_that_no_container_shows_and_nobody_passes_without(mesh: ComposeProject) -> None:
    tokens = {mesh.inside(service, READ_TOKEN) for service in SERVICES}
    assert len(tokens) == 1
    token = tokens.pop()
    assert len(token) >= 32
    assert all(token not in json.dumps(mesh.container(service)) for service in SERVICES)
    assert token not in mesh.compose("logs", "--no-color")
    assert mesh.inside("environment", CALL_WITHOUT_TOKEN) == "401"


def test_agent_and_resources_have_no_way_out_of_the_mesh(mesh: ComposeProject) -> None:
    assert {service: mesh.is_closed_in(service) for service in SERVICES} == {
        "environment": False,  # its port is published
        "agent": True,
        "model-proxy": False,  # it calls the upstream
        "resources": True,
    }


def test_no_service_runs_as_root_or_without_an_init(mesh: ComposeProject) -> None:
    for service in SERVICES:
        assert mesh.inside(service, "import os; print(os.getuid())") == "10001"
        assert mesh.container(service)["HostConfig"]["Init"] is True


def test_the_build_secret_is_not_in_the_image() -> None:
    look = "import os; print(os.path.exists('/run/secrets/build_ca'), any('PIP_CERT' in name for name in os.environ))"
    assert (
        run("docker", "run", "--rm", "--network", "none", "--entrypoint", "python3", IMAGE, "-c", look)
        == "False False\n"
    )


def test_stop_is_obeyed_the_token_outlives_it_and_down_leaves_nothing() -> None:
    with compose_project() as project:
        token = project.inside("agent", READ_TOKEN)
        project.compose("stop")
        ends = {service: project.container(service)["State"]["ExitCode"] for service in SERVICES}
        assert ends == dict.fromkeys(SERVICES, 143)
        project.compose("up", "--wait", "--wait-timeout", "90")
        assert project.inside("agent", READ_TOKEN) == token
        assert project.left() != []
    assert project.left() == []
