"""`paddock run` on several environment servers over one Redis behind a balancer, while these come and go."""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import pytest

from tests.collector.fault_proxy import FaultProxy
from tests.mesh.background import Background
from tests.mesh.chat import ChatServer, Gate, says
from tests.mesh.processes import Running, ServedMesh, running, served, wait_ready
from tests.mesh.run_rig import BOUND_S, RIGHT, RunRig, answers_late
from tests.serving import free_port
from tests.store.redis_server import RedisServer

pytestmark = pytest.mark.redis
ROWS = 6
LEASE_S = 1.0


@dataclass
class Replicas:
    """The mesh's own environment server and one more."""

    mesh: ServedMesh
    stack: ExitStack
    port: int = field(default_factory=free_port)

    def start_second(self) -> Running:
        arguments = ("serve", "environment", "--port", self.port)
        second = self.stack.enter_context(
            running(*arguments, cwd=self.mesh.cwd, environ=self.mesh.environ, name="second")
        )
        wait_ready(self.second_url, second)
        return second

    @property
    def second_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def _configuration(chat_url: str) -> bytes:
    return orjson.dumps(
        {
            "store": {"lease_s": LEASE_S},
            "models": {"policy": {"upstream": "chat_completions", "base_url": chat_url, "model": "m"}},
            "agents": {"tool_loop": {"harness": "tool_loop", "model": "policy"}},
            "resources": {"math": {"verifier": "math"}},
            "environments": {"math": {"resources": "math", "agent": "tool_loop"}},
        }
    )


@pytest.fixture
def replicas(tmp_path_factory: pytest.TempPathFactory, chat: ChatServer) -> Iterator[Replicas]:
    folder: Path = tmp_path_factory.mktemp("mesh")
    config = folder / "paddock.json"
    config.write_bytes(_configuration(chat.url))
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(folder))
        environ = {"PADDOCK_CONFIG": str(config), "PADDOCK_STORE_URL": redis.url, "PADDOCK_DRAIN_LEAD_S": "0"}
        mesh = stack.enter_context(served(cwd=folder, environ=environ))
        yield Replicas(mesh, stack)


@pytest.fixture
def rig(tmp_path: Path, replicas: Replicas, chat: ChatServer, background: Background) -> RunRig:
    proxy = background.enter(FaultProxy(replicas.mesh.url("environment"), replicas.second_url))
    return RunRig(tmp_path, replicas.mesh, proxy, chat)


@pytest.mark.behaviour("CO-3", "CO-5")
def test_a_replica_that_is_killed_costs_a_run_nothing(rig: RunRig, replicas: Replicas) -> None:
    second = replicas.start_second()
    gate = Gate()
    file = rig.rows(*[[gate.before(says(RIGHT))]] * ROWS)
    with rig.begun(file) as run:
        rig.wait_for_calls()
        second.kill()
        time.sleep(3 * LEASE_S)  # the other one takes the episodes over
        gate.open()
        assert run.ended(BOUND_S) == 0, run.err
    rig.assert_each_ran_once()
    assert rig.failures == []


@pytest.mark.behaviour("CO-3", "CO-5")
def test_a_run_and_a_replica_that_are_killed_at_once_cost_nothing_either(rig: RunRig, replicas: Replicas) -> None:
    second = replicas.start_second()
    gate = Gate()
    file = rig.rows(*[[gate.before(says(RIGHT))]] * ROWS)
    with rig.begun(file) as run:
        rig.wait_for_calls()
        second.kill()
        run.kill()
    with rig.resumed() as again:
        gate.open()
        assert again.ended(BOUND_S) == 0, again.err
    rig.assert_each_ran_once()
    assert rig.failures == []


@pytest.mark.behaviour("CO-3", "CO-5")
def test_replicas_that_are_restarted_one_after_the_other_cost_nothing(rig: RunRig, replicas: Replicas) -> None:
    second = replicas.start_second()
    file = rig.rows(*[[answers_late(0.3, says(RIGHT))]] * 150)
    with rig.begun(file, "--concurrency", 6) as run:
        rig.scenes[0].wait_for_call()
        for _ in range(2):
            second.send(signal.SIGTERM)
            second.ended(BOUND_S)
            second = replicas.start_second()
            replicas.mesh.services["environment"].send(signal.SIGTERM)
            replicas.mesh.services["environment"].ended(BOUND_S)
            replicas.mesh.start("environment")
        assert run.ended(2 * BOUND_S) == 0, run.err
    rig.assert_each_ran_once()
    assert rig.failures == []
