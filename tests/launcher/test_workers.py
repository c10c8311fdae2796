"""Several workers per service: one port, one set of metrics, an identity each, and one end for all."""

import contextlib
import re
import signal
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from shared.tokens import SessionClaims, Signer
from tests.launcher.rig import gone
from tests.launcher.test_mesh import ROW
from tests.mesh.processes import SERVICES, paddock, running, tree_of, up, wait_until_none
from tests.mesh.service import BOUND_S, TOKEN, Service, wait_until
from tests.serving import free_port
from tests.store.redis_server import RedisServer

ANYTHING = Path(__file__).parents[1] / "model_proxy" / "anything.yaml"
WORKERS = 3
REQUESTS = re.compile(r'^paddock_requests_total\{route="/version",status="200"\} (\S+)$', re.M)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


class Workers(Service):
    """`paddock serve` with several workers, all of them ready; any of them may answer a request."""

    @property
    def workers(self) -> list[psutil.Process]:
        found: list[psutil.Process] = psutil.Process(self.process.pid).children()
        return found

    def instances(self, count: int) -> set[str]:
        """Those that answer, once there are so many of them."""
        found: set[str] = set()

        def all_found() -> bool:
            found.add(self.get("/readyz").json()["instance"])
            return len(found) >= count

        wait_until(all_found)
        return found

    def requests_counted(self) -> float:
        told = REQUESTS.search(self.get("/metrics").text)
        return float(told[1]) if told else 0.0


@contextlib.contextmanager
def served(name: str, folder: Path, redis: RedisServer, more: str = "", *, lead_s: float = 0.0) -> Iterator[Workers]:
    config = folder / "workers.yaml"
    config.write_text(f"serving: {{drain_lead_s: {lead_s}, stop_grace_s: 4}}\n{more}")
    environ = {"PADDOCK_STORE_URL": redis.url, "PADDOCK_MESH_TOKEN": TOKEN}
    port = free_port()
    arguments = ("serve", name, "--config", config, "--port", port, "--workers", WORKERS)
    with running(*arguments, cwd=folder, environ=environ) as process:
        wait_until(lambda: f"all {WORKERS} workers are ready" in process.err or process.process.poll() is not None)
        assert process.process.poll() is None, process.err
        yield Workers(process, f"http://127.0.0.1:{port}")


@pytest.mark.redis
@pytest.mark.behaviour("AG-10")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_workers_share_a_port_have_an_identity_each_and_all_leave_at_a_signal(
    number: signal.Signals, status: int, tmp_path: Path, redis: RedisServer
) -> None:
    with served("resources", tmp_path, redis) as service:
        assert len(service.workers) == WORKERS
        assert len(service.instances(WORKERS)) == WORKERS
        tree = tree_of(service.process.pid)
        service.process.send(number)
        assert service.process.ended(6.0) == status
        assert wait_until_none(service.process.mark, 1.0, tree) == []
        assert "did not end within" not in service.process.err


@pytest.mark.redis
def test_every_scrape_tells_the_sum_over_all_workers_also_after_one_was_started_again(
    tmp_path: Path, redis: RedisServer
) -> None:
    with served("resources", tmp_path, redis) as service:
        instances = service.instances(WORKERS)
        for _ in range(40):
            assert service.get("/version").status_code == 200
        wait_until(lambda: service.requests_counted() == 40.0)  # a request is counted after its answer
        assert {service.requests_counted() for _ in range(20)} == {40.0}
        for worker in service.workers:
            worker.kill()
            assert gone(worker.pid, 5.0)
            wait_until(lambda: len(service.workers) == WORKERS)
        assert not service.instances(WORKERS) & instances
        assert {service.requests_counted() for _ in range(20)} == {40.0}, "counters do not fall"
        service.get("/version")
        wait_until(lambda: service.requests_counted() == 41.0)


@pytest.mark.redis
def test_a_gauge_does_not_count_what_a_dead_worker_had_under_way(tmp_path: Path, redis: RedisServer) -> None:
    in_flight = re.compile(r"^paddock_requests_in_flight (\S+)$", re.M)
    with served("resources", tmp_path, redis, "resources: {mcqa: {verifier: mcqa}}") as service:

        def counted() -> float:
            told = in_flight.search(service.get("/metrics").text)
            assert told is not None
            return float(told[1]) - 1.0  # the scrape itself

        host, port = service.url.removeprefix("http://").split(":")
        with contextlib.ExitStack() as stack:
            for _ in range(6):
                client = stack.enter_context(socket.create_connection((host, int(port))))
                client.sendall(b"POST /mcqa/verify HTTP/1.1\r\nhost: x\r\nauthorization: Bearer ")
                client.sendall(TOKEN.encode() + b"\r\ncontent-length: 10\r\n\r\n{")
            wait_until(lambda: counted() == 6.0)
            for worker in service.workers:
                worker.kill()
            wait_until(lambda: len(service.workers) == WORKERS and counted() == 0.0)


@pytest.mark.redis
def test_a_worker_that_dies_is_named_and_started_again_and_no_later_client_is_refused(
    tmp_path: Path, redis: RedisServer
) -> None:
    with served("resources", tmp_path, redis) as service:
        first = service.workers[0]
        first.kill()
        assert gone(first.pid, 5.0)
        assert [service.get("/version").status_code for _ in range(50)] == [200] * 50
        wait_until(lambda: "It is started again (1 of 3 within 60 s)." in service.process.err)
        assert f"resources worker 1 (pid {first.pid}) was ended by SIGKILL" in service.process.err
        wait_until(lambda: len(service.workers) == WORKERS)


@pytest.mark.redis
def test_all_workers_serve_through_the_lead_and_say_that_they_are_leaving(tmp_path: Path, redis: RedisServer) -> None:
    with served("resources", tmp_path, redis, lead_s=2.0) as service:
        asked_at = time.monotonic()
        service.process.send(signal.SIGTERM)
        wait_until(lambda: service.get("/readyz").status_code == 503)
        time.sleep(0.3)  # the last worker gets its signal
        readiness, served_statuses = set(), set()
        while time.monotonic() < asked_at + 1.7:
            readiness.add(service.get("/readyz").status_code)
            served_statuses.add(service.get("/version").status_code)
        assert (readiness, served_statuses) == ({503}, {200})
        assert service.process.ended(6.0) == 143


@pytest.mark.redis
def test_the_model_proxys_unix_socket_is_served_by_all_workers_and_goes_with_them(
    tmp_path: Path, redis: RedisServer
) -> None:
    path = tmp_path / "run" / "models.sock"
    url = f"http://127.0.0.1:{free_port()}"
    more = f"models: {{policy: {{upstream: scripted, script: {ANYTHING}}}}}\n"
    more += f"services: {{model_proxy: {{socket_path: {path}, url: '{url}'}}}}"
    claims = SessionClaims(key="k", model="policy", expires_at=time.time() + 60)
    token = Signer(TOKEN, "session-token").session_token(claims)
    with served("model-proxy", tmp_path, redis, more) as service:
        assert stat.S_ISSOCK(path.stat().st_mode)

        def call() -> int:
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=BOUND_S) as client:
                answer = client.post(
                    "http://models/v1/responses",
                    json={"input": "go"},
                    headers={"Authorization": f"Bearer {token}"},
                )
                return answer.status_code

        for worker in service.workers:
            others = [one for one in service.workers if one.pid != worker.pid]
            for other in others:
                other.suspend()
            assert call() == 200
            for other in others:
                other.resume()
        service.workers[0].kill()
        assert {call() for _ in range(10)} == {200}
        wait_until(lambda: len(service.workers) == WORKERS)
        service.process.send(signal.SIGTERM)
        assert service.process.ended(6.0) == 143
        assert not path.exists()


@pytest.mark.redis
@pytest.mark.behaviour("LA-4", "LA-5")
def test_a_mesh_of_two_workers_each_answers_rows_and_is_gone_after_a_signal(tmp_path: Path, redis: RedisServer) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    environ = {"PADDOCK_STORE_URL": redis.url, "TMPDIR": str(folder)}
    with up("--workers", 2, cwd=tmp_path, environ=environ) as mesh:
        assert len(list(folder.iterdir())) == 1, "where workers share their metrics"
        tree = tree_of(mesh.running.pid)
        assert len(psutil.Process(mesh.running.pid).children()) == 2 * len(SERVICES)
        for _ in range(8):
            row = {**ROW, "environment": "mcqa"}
            answer = httpx.post(f"{mesh.url}/run", json=row, timeout=BOUND_S, trust_env=False)
            assert "reward" in answer.json(), answer.text
        mesh.running.send(signal.SIGTERM)
        assert mesh.running.ended(5.0) == 143
        assert wait_until_none(mesh.running.mark, 1.0, tree) == []
        assert "did not end within" not in mesh.told
        assert list(folder.iterdir()) == []


@pytest.mark.behaviour("AG-8", "AG-10")
@pytest.mark.parametrize("command", [("serve", "agent"), ("up",)], ids=lambda command: command[0])
def test_several_workers_on_the_memory_store_are_refused_at_start_up(command: tuple[str, ...], tmp_path: Path) -> None:
    done = paddock(*command, "--workers", 2, cwd=tmp_path, environ={"PADDOCK_AGENT_URL": "http://127.0.0.1:0"})
    assert done.status == 2
    assert "--workers: serving.workers: 2 workers need a store that they share" in done.err
    assert "PADDOCK_STORE_URL" in done.err


def test_doctor_tells_of_several_workers_on_the_memory_store(tmp_path: Path) -> None:
    config = tmp_path / "workers.yaml"
    config.write_text("serving: {workers: 2}")
    done = paddock("doctor", "--config", config, cwd=tmp_path)
    assert done.status == 1
    assert re.search(r"^WRONG +configuration +\S+: serving\.workers: 2 workers need a store", done.out, re.M)


@pytest.mark.parametrize("count", ["0", "-1", "many"])
def test_a_number_of_workers_that_is_none_is_refused(count: str, tmp_path: Path) -> None:
    done = paddock("serve", "agent", f"--workers={count}", cwd=tmp_path)
    assert done.status == 2
    assert "workers" in done.err
