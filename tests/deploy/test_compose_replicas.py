"""Several replicas of every service under Compose: scaled, and replaced one by one under load."""

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.deploy.compose_project import IMAGE, SERVICES, ComposeProject, compose_project, run
from tests.deploy.test_compose import READ_TOKEN, row_of

pytestmark = [pytest.mark.compose, pytest.mark.timeout(900)]

REPLICAS = {"environment": 2, "agent": 3, "model-proxy": 1, "resources": 1}
CLIENTS = 3
BOUND_S = 60.0
REPLACED_S = 500.0
CLIENT_TOKEN = "a-client-token-of-the-test"
CLIENT = {"authorization": f"Bearer {CLIENT_TOKEN}"}
SHOW_READY = """
import csv, http.client
connection = http.client.HTTPConnection("balancer", 8500, timeout=10)
connection.request("GET", "/;csv")
rows = csv.DictReader(connection.getresponse().read().decode().removeprefix("# ").splitlines())
print(*sorted(row["pxname"] for row in rows if row["svname"] != "BACKEND" and row["status"].startswith("UP")))
"""
# A client of the models inside the mesh: plain answers and streams in turn, each call tried once, until TERM.
CALL_MODELS = """
import collections, http.client, itertools, json, signal, time
token = open("/run/paddock/mesh-token").read()
asked_to_stop = []
signal.signal(signal.SIGTERM, lambda *_: asked_to_stop.append(True))
ends = collections.Counter()
for number in itertools.count():
    if asked_to_stop:
        break
    stream = bool(number % 2)
    body = json.dumps({"model": "policy", "input": "What is 17 * 23?", "stream": stream})
    headers = {"authorization": "Bearer " + token, "content-type": "application/json"}
    connection = http.client.HTTPConnection("balancer", 8300, timeout=60)
    try:
        connection.request("POST", f"/rollouts/calls-{number}/v1/responses", body, headers)
        answered = connection.getresponse()
        text = answered.read().decode()
        whole = '"type":"response.completed"' in text if stream else json.loads(text)["status"] == "completed"
        ends[f"{'stream' if stream else 'plain'} {answered.status} {whole}"] += 1
    except Exception as error:
        ends[repr(error)] += 1
    connection.close()
    time.sleep(0.02)
print(json.dumps(ends))
"""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeProject]:
    token = tmp_path_factory.mktemp("secrets") / "client-token"
    token.write_text(f"{CLIENT_TOKEN}\n", encoding="ascii")
    with compose_project(PADDOCK_CLIENT_TOKEN_FILE=str(token)) as project:
        scales = itertools.chain.from_iterable(("--scale", f"{name}={count}") for name, count in REPLICAS.items())
        project.up(*scales)
        yield project


def test_every_replica_gets_requests_as_soon_as_it_is_ready(mesh: ComposeProject) -> None:
    expected = sorted(name.replace("-", "_") for name, count in REPLICAS.items() for _ in range(count))
    deadline = time.monotonic() + BOUND_S
    while (ready := mesh.beside("mesh", SHOW_READY).split()) != expected:
        assert time.monotonic() < deadline, ready
    instances = {httpx.get(f"{mesh.url}/readyz", timeout=10).json()["instance"] for _ in range(20)}
    assert len(instances) == REPLICAS["environment"]


def test_a_token_of_clients_from_a_file_is_asked_for_and_shown_nowhere(mesh: ComposeProject) -> None:
    assert httpx.post(f"{mesh.url}/run", json=row_of("nobody"), timeout=BOUND_S).status_code == 401
    assert httpx.post(f"{mesh.url}/run", json=row_of("client"), headers=CLIENT, timeout=BOUND_S).json()["reward"] == 1.0
    assert CLIENT_TOKEN not in json.dumps(mesh.containers("environment"))
    assert CLIENT_TOKEN not in mesh.compose("logs", "--no-color")


async def test_replacing_every_container_of_every_service_under_load_fails_no_request(mesh: ComposeProject) -> None:
    before = {service: _identities(mesh, service) for service in SERVICES}
    stop = asyncio.Event()
    with _model_calls(mesh) as ended_calls:
        clients = [asyncio.create_task(_run_episodes(mesh.url, f"client-{number}", stop)) for number in range(CLIENTS)]
        try:
            await asyncio.to_thread(mesh.run, "deploy/rolling_restart.sh", timeout_s=REPLACED_S)
        finally:
            stop.set()
        ends = Counter(end for ends in await asyncio.gather(*clients) for end in ends)
        calls = ended_calls()
    after = {service: _identities(mesh, service) for service in SERVICES}
    assert {service: len(found) for service, found in after.items()} == REPLICAS
    assert all(not before[service] & after[service] for service in SERVICES)
    assert set(ends) == {"1.0"}, ends
    assert set(calls) == {"plain 200 True", "stream 200 True"}, calls
    assert min(ends.total(), calls.total()) > 200


def test_stop_is_obeyed_outcome_and_token_outlive_it_and_down_leaves_nothing(mesh: ComposeProject) -> None:
    outcome = httpx.post(f"{mesh.url}/run", json=row_of("outlives"), headers=CLIENT, timeout=BOUND_S)
    assert outcome.json()["reward"] == 1.0
    token = mesh.inside("agent", READ_TOKEN)
    mesh.compose("stop")
    ends = {container["State"]["ExitCode"] for service in SERVICES for container in mesh.containers(service)}
    assert ends == {143}
    mesh.up()
    replayed = httpx.post(f"{mesh.url}/run", json=row_of("outlives"), headers=CLIENT, timeout=BOUND_S)
    assert replayed.content == outcome.content
    assert mesh.inside("agent", READ_TOKEN) == token
    assert mesh.left() != []
    mesh.compose("down", "--volumes")
    assert mesh.left() == []


def _identities(mesh: ComposeProject, service: str) -> set[str]:
    return {container["Id"] for container in mesh.containers(service)}


async def _run_episodes(url: str, name: str, stop: asyncio.Event) -> list[str]:
    """Episodes one by one, as a collector runs them, but no request is repeated: the reward or the trouble of each."""
    ends: list[str] = []
    async with httpx.AsyncClient(base_url=url, headers=CLIENT, timeout=BOUND_S) as client:
        while not stop.is_set():
            key = f"{name}-{len(ends)}"
            try:
                answered = await client.post("/run", json=row_of(key), headers={"prefer": "respond-async"})
                while answered.status_code == 202:
                    answered = await client.get(f"/episodes/{key}", headers={"prefer": "wait=30"})
            except httpx.TransportError as error:
                ends.append(repr(error))
            else:
                ends.append(str(answered.json().get("reward", answered.text)))
    return ends


@contextmanager
def _model_calls(mesh: ComposeProject) -> Iterator[Callable[[], Counter[str]]]:
    """A client inside the mesh; calling what is given ends it and tells how its calls ended."""
    place = ("--network", f"{mesh.name}_mesh", "--volume", f"{mesh.name}_mesh-token:/run/paddock:ro")
    container = run("docker", "run", "--detach", *place, "--entrypoint", "python3", IMAGE, "-c", CALL_MODELS).strip()

    def ended() -> Counter[str]:
        run("docker", "stop", "--time", "60", container, timeout_s=90)
        return Counter(json.loads(run("docker", "logs", container)))

    try:
        yield ended
    finally:
        run("docker", "rm", "--force", container)
