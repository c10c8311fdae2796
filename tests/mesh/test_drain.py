"""How a service leaves: nothing is lost in the lead, open work is answered, and nobody holds up the end."""

import contextlib
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.mesh import rows
from tests.mesh.chat import ChatServer, hangs, says
from tests.mesh.processes import SERVICES, running, served
from tests.mesh.service import BOUND_S, TOKEN, Service, wait_until
from tests.serving import free_port

# What a busy machine may add to a time that a process keeps.
LATE_S = 3.0
TERM_AND_INT = [(signal.SIGTERM, 143), (signal.SIGINT, 130)]


def environment_of(**variables: str) -> dict[str, str]:
    return {"PADDOCK_MESH_TOKEN": TOKEN, **variables}


@contextlib.contextmanager
def service(
    name: str, cwd: Path, *, lead_s: float = 0.0, grace_s: float = 4.0, more: Mapping[str, Any] | None = None
) -> Iterator[Service]:
    serving = {"drain_lead_s": lead_s, "stop_grace_s": grace_s, "log_level": "warning"}
    config = cwd / "serving.json"
    config.write_bytes(orjson.dumps({"serving": serving, **(more or {})}))
    port = free_port()
    arguments = ("serve", name.replace("_", "-"), "--config", config, "--port", port)
    with running(*arguments, cwd=cwd, environ=environment_of(), name=name) as process:
        started = Service(process, f"http://127.0.0.1:{port}")
        wait_until(lambda: started.status("/readyz") == 200)
        yield started


@dataclass
class Told:
    """What came of requests that were sent again and again, and when the first of each kind came."""

    kinds: Counter[str] = field(default_factory=Counter)
    since: dict[str, float] = field(default_factory=dict)

    def add(self, kind: object) -> None:
        self.kinds[str(kind)] += 1
        self.since.setdefault(str(kind), time.monotonic())


def repeat(send: Callable[[], object], until: float, told: Told) -> Told:
    """Send again and again until that time, or until nobody listens."""
    while time.monotonic() < until:
        try:
            told.add(send())
        except httpx.ConnectError:
            told.add("refused")
            return told
        except httpx.TransportError as error:
            told.add(repr(error))
    return told


def test_through_the_lead_everything_is_served_and_readyz_says_503_from_its_first_moment(
    chat: ChatServer, tmp_path: Path
) -> None:
    lead_s = 4.0
    chat.on("<in the lead>", says(r"\boxed{12}"))
    environ = environment_of(PADDOCK_MODEL_BASE_URL=chat.url, PADDOCK_MODEL_NAME="m", PADDOCK_DRAIN_LEAD_S=str(lead_s))
    with served(cwd=tmp_path, environ=environ) as mesh, ThreadPoolExecutor() as pool:
        url = mesh.url("environment")

        def run_a_row() -> object:
            row = rows.math("<in the lead>", "12", environment="math")
            answer = httpx.post(f"{url}/run", json=row, timeout=BOUND_S, trust_env=False)
            return answer.json().get("reward", answer.text)

        def ask_readyz() -> object:
            return httpx.get(f"{url}/readyz", timeout=BOUND_S, trust_env=False).status_code

        asked_at = time.monotonic()
        mesh.services["environment"].send(signal.SIGTERM)
        lead_ends = asked_at + lead_s - 1.5  # the last row has to end in it, too
        posted = [pool.submit(repeat, run_a_row, lead_ends, Told()) for _ in range(2)]
        readiness = pool.submit(repeat, ask_readyz, lead_ends, Told()).result(BOUND_S)
        results = sum((one.result(BOUND_S).kinds for one in posted), Counter())
        assert set(results) == {"1.0"}, results
        assert results["1.0"] >= 3
        assert set(readiness.kinds) <= {"200", "503"}
        assert readiness.since["503"] - asked_at < 1.0
        assert readiness.kinds["200"] < readiness.kinds["503"]
        assert mesh.services["environment"].ended(BOUND_S) == 143
        assert _is_refused(url)


def _is_refused(url: str) -> bool:
    try:
        httpx.get(f"{url}/healthz", trust_env=False)
    except httpx.ConnectError:
        return True
    return False


@pytest.mark.parametrize("name", SERVICES)
def test_pooled_clients_lose_no_request_when_a_service_goes(name: str, tmp_path: Path) -> None:
    with service(name, tmp_path, lead_s=0.3) as started, ThreadPoolExecutor() as pool:

        def use_a_pool(told: Told) -> Told:
            with httpx.Client(trust_env=False, timeout=BOUND_S) as client:
                url = f"{started.url}/version"
                return repeat(lambda: client.get(url).status_code, time.monotonic() + BOUND_S, told)

        told = [Told() for _ in range(4)]
        clients = [pool.submit(use_a_pool, one) for one in told]
        wait_until(lambda: all(one.kinds["200"] >= 2 for one in told))
        started.process.send(signal.SIGTERM)
        for client in clients:
            kinds = client.result(BOUND_S).kinds
            assert set(kinds) == {"200", "refused"}, kinds
        assert started.process.ended(BOUND_S) == 143


def test_a_kept_connection_is_given_up_by_an_answer_that_says_so(tmp_path: Path) -> None:
    request = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    with service("resources", tmp_path, lead_s=1.0) as started, _connected(started) as connection:
        connection.sendall(request)
        assert b"connection: close" not in _head(connection)
        started.process.send(signal.SIGTERM)
        wait_until(lambda: started.status("/readyz") == 503)
        connection.sendall(request)
        head = _head(connection)
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" in head
        assert connection.recv(65_536) == b""


@contextlib.contextmanager
def _connected(started: Service) -> Iterator[socket.socket]:
    host, port = started.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=BOUND_S) as connection:
        yield connection


def _head(connection: socket.socket) -> bytes:
    """The head of an answer whose body is read, too."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65_536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    while len(body) < length:
        body += connection.recv(65_536)
    return head


@pytest.mark.parametrize("name", SERVICES)
def test_a_connection_that_says_nothing_and_one_that_stops_in_a_request_hold_nothing_up(
    name: str, tmp_path: Path
) -> None:
    with service(name, tmp_path, grace_s=3.0) as started, _connected(started) as idle, _connected(started) as half:
        half.sendall(b"POST /run HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
        wait_until(lambda: started.status("/readyz") == 200)
        started.process.send(signal.SIGTERM)
        assert started.process.ended(3.0 + LATE_S) == 143
        assert idle.recv(1) == b""


@pytest.mark.parametrize(("number", "status"), TERM_AND_INT)
def test_further_signals_neither_shorten_the_lead_nor_change_the_status(
    number: signal.Signals, status: int, tmp_path: Path
) -> None:
    with service("resources", tmp_path, lead_s=1.0) as started:
        asked_at = time.monotonic()
        started.process.send(number)
        wait_until(lambda: started.status("/readyz") == 503)  # signals that wait together have no order
        answers = Counter[int | None]()
        while time.monotonic() < asked_at + 0.8:
            for further in (signal.SIGINT, signal.SIGTERM):
                started.process.send(further)
            answers[started.status("/version")] += 1
        assert set(answers) == {200}
        while started.process.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                started.process.send(signal.SIGTERM)
            time.sleep(0.01)
        assert started.process.ended(0.0) == status


class Stream:
    """An SSE answer that is read in a thread; its client stays connected until the server ends it."""

    def __init__(self, pool: ThreadPoolExecutor, method: str, url: str, **options: Any) -> None:
        self.begun = threading.Event()
        self.lines: list[str] = []
        self._done: Future[None] = pool.submit(self._read, method, url, options)

    def _read(self, method: str, url: str, options: dict[str, Any]) -> None:
        with httpx.stream(method, url, timeout=BOUND_S, trust_env=False, **options) as answer:
            for line in answer.iter_lines():
                self.lines.append(line)
                self.begun.set()

    def last_event(self) -> str:
        """The name of the last event, once the stream has ended in good order."""
        self._done.result(BOUND_S)
        return [line.removeprefix("event: ") for line in self.lines if line.startswith("event: ")][-1]


def test_an_environment_with_an_open_stream_and_an_open_run_ends_in_time_and_answers_both(
    chat: ChatServer, tmp_path: Path
) -> None:
    scene = chat.on("<open>", hangs)
    environ = environment_of(PADDOCK_MODEL_BASE_URL=chat.url, PADDOCK_MODEL_NAME="m", PADDOCK_DRAIN_LEAD_S="0")
    with served(cwd=tmp_path, environ=environ) as mesh, ThreadPoolExecutor() as pool:
        url = mesh.url("environment")
        native = {
            "episode_id": {"rollout_id": "open", "attempt": 0},
            "task": {"task_id": {"taskset": "t", "task_id": "1"}, "task_input": _task("<open>")},
            "environment": "math",
        }
        run = pool.submit(httpx.post, f"{url}/run", json=native, timeout=BOUND_S, trust_env=False)
        asked = scene.wait_for_call()
        stream = Stream(pool, "GET", f"{url}/episodes/open/events")
        assert stream.begun.wait(BOUND_S)
        mesh.services["environment"].send(signal.SIGTERM)
        time.sleep(1.0)  # as the case has it: the second signal comes in the middle
        mesh.services["environment"].send(signal.SIGTERM)
        assert mesh.services["environment"].ended(10.0 + LATE_S) == 143
        assert stream.last_event() in {"draining", "end"}
        answer = run.result(BOUND_S)
        assert answer.status_code in {200, 202, 503}, answer.text
        assert "reward" not in answer.text
        if answer.status_code != 200:
            assert int(answer.headers["retry-after"]) >= 1
        asked.hang_up()


def _task(marker: str) -> dict[str, Any]:
    row = rows.math(marker, "12")
    return {"responses_create_params": row.pop("responses_create_params"), "task_data": row}


def test_any_other_request_that_is_open_when_the_grace_ends_is_told_to_come_again(tmp_path: Path) -> None:
    """A peer that never answers holds a route of the environment that knows nothing of draining."""
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor() as pool:
        services = {"resources": {"url": f"http://127.0.0.1:{silent.getsockname()[1]}"}}
        entries = {
            "services": services,
            "models": {"policy": {"upstream": "scripted"}},
            "agents": {"tool_loop": {"harness": "tool_loop"}},
            "resources": {"math": {"verifier": "math"}},
            "environments": {"math": {"resources": "math"}},
        }
        with service("environment", tmp_path, grace_s=3.0, more=entries) as started:
            url = f"{started.url}/aggregate_metrics"
            call = pool.submit(httpx.post, url, json={"responses": []}, timeout=BOUND_S, trust_env=False)
            peer, _ = silent.accept()
            with peer:
                started.process.send(signal.SIGTERM)
                answer = call.result(BOUND_S)
                assert (answer.status_code, answer.json()["failure"]["failure_kind"]) == (503, "shutdown")
                assert int(answer.headers["retry-after"]) >= 1
                assert started.process.ended(3.0 + LATE_S) == 143
