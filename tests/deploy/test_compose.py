"""The shipped Compose file on a real engine: built, brought up without any configuration, used, taken down."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.deploy.compose_project import BESIDE, IMAGE, SERVICES, TREE, ComposeProject, compose_project, run

pytestmark = [pytest.mark.compose, pytest.mark.timeout(900)]

DEMO_ROWS = sorted((TREE / "services" / "collector" / "demo").glob("*.jsonl"))
WRONG_ON_PURPOSE = {"sum-of-the-first-hundred", "umbrella-in-london"}
READ_TOKEN = "print(open('/run/paddock/mesh-token').read())"
CALL_WITHOUT_TOKEN = """
import http.client
connection = http.client.HTTPConnection("balancer", 8200, timeout=10)
connection.request("POST", "/tool_loop/v1/agent_sessions", "{}", {"content-type": "application/json"})
print(connection.getresponse().status)
"""
CONNECT = """
import socket
try:
    socket.create_connection(("%s", %d), timeout=2).close()
except OSError:
    print("closed")
else:
    print("open")
"""


@pytest.fixture(scope="module")
def mesh() -> Iterator[ComposeProject]:
    with compose_project() as project:
        yield project


def row_of(key: str) -> dict[str, object]:
    """A row that the scripted model answers rightly."""
    row: dict[str, object] = json.loads((TREE / "services/collector/demo/math.jsonl").read_text().splitlines()[0])
    return {**row, "episode_id": {"rollout_id": key, "attempt": 0}}


def test_the_demo_rows_are_run_from_outside_with_tools_and_both_rewards(mesh: ComposeProject, tmp_path: Path) -> None:
    paddock = Path(sys.executable).with_name("paddock")
    run(str(paddock), "run", *map(str, DEMO_ROWS), "--url", mesh.url, "-o", str(tmp_path / "out.jsonl"))
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(results) == sum(len(path.read_text(encoding="utf-8").splitlines()) for path in DEMO_ROWS)
    rewards = {result["task_id"]["task_id"]: result["reward"] for result in results}
    assert {task for task, reward in rewards.items() if reward == 0.0} == WRONG_ON_PURPOSE
    assert set(rewards.values()) == {0.0, 1.0}


def test_only_the_environments_address_is_published_by_the_balancer_and_to_this_machine(mesh: ComposeProject) -> None:
    everything = (*SERVICES, *BESIDE)
    bindings = {name: mesh.container(name)["HostConfig"]["PortBindings"] or {} for name in everything}
    assert bindings.pop("balancer") == {"8100/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(mesh.port)}]}
    assert list(bindings.values()) == [{}] * (len(everything) - 1)
    assert httpx.get(f"{mesh.url}/readyz", timeout=10).json()["service"] == "environment"


def test_the_services_share_a_token_that_no_container_shows_and_nobody_passes_without(mesh: ComposeProject) -> None:
    tokens = {mesh.inside(service, READ_TOKEN) for service in SERVICES}
    assert len(tokens) == 1
    token = tokens.pop()
    assert len(token) >= 32
    assert all(token not in json.dumps(mesh.container(name)) for name in (*SERVICES, *BESIDE))
    assert token not in mesh.compose("logs", "--no-color")
    assert mesh.inside("environment", CALL_WITHOUT_TOKEN) == "401"


def test_only_the_model_proxy_and_the_balancer_have_a_way_out_of_the_mesh(mesh: ComposeProject) -> None:
    assert {name: mesh.is_closed_in(name) for name in (*SERVICES, *BESIDE)} == {
        "environment": True,
        "agent": True,
        "model-proxy": False,  # it calls the upstream
        "resources": True,
        "balancer": False,  # its port is published
        "redis": True,
    }


def test_redis_is_reached_by_services_and_by_nobody_else(mesh: ComposeProject) -> None:
    (address,) = [network["IPAddress"] for network in mesh.container("redis")["NetworkSettings"]["Networks"].values()]
    assert {service: mesh.inside(service, CONNECT % ("redis", 6379)) for service in SERVICES} == dict.fromkeys(
        SERVICES, "open"
    )
    # By its address, too: neither from where the balancer's port is published, nor from the balancer's other network.
    networks = ("front", "mesh", "upstream")
    assert {network: mesh.beside(network, CONNECT % (address, 6379)) for network in networks} == dict.fromkeys(
        networks, "closed"
    )


def test_nothing_runs_as_root_or_without_an_init(mesh: ComposeProject) -> None:
    for service in SERVICES:
        assert mesh.inside(service, "import os; print(os.getuid())") == "10001"
    assert {name: mesh.container(name)["Config"]["User"] for name in BESIDE} == {
        "balancer": "haproxy",
        "redis": "redis",
    }
    for name in (*SERVICES, *BESIDE):
        assert mesh.container(name)["HostConfig"]["Init"] is True


def test_the_build_secret_is_not_in_the_image() -> None:
    look = "import os; print(os.path.exists('/run/secrets/build_ca'), any('PIP_CERT' in name for name in os.environ))"
    assert (
        run("docker", "run", "--rm", "--network", "none", "--entrypoint", "python3", IMAGE, "-c", look)
        == "False False\n"
    )
