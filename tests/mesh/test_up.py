"""`paddock up` and `paddock run` as process trees: how they begin, how they end, and that nothing is left."""

import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import orjson
import psutil
import pytest

from tests.mesh import rows
from tests.mesh.chat import ChatServer, Gate, hangs, says
from tests.mesh.processes import (
    FREE_PORTS,
    MARK,
    SERVICES,
    UpMesh,
    new_mark,
    running,
    tree_of,
    up,
    wait_until_none,
)

STOP_S = 5.0
BOUND_S = 45.0
# No judge: the algebra library has to compare, in child processes of the resources server.
NEEDS_ALGEBRA = r"\boxed{\frac{24}{2}}"


def model(chat: ChatServer) -> dict[str, str]:
    return {"PADDOCK_MODEL_BASE_URL": chat.url, "PADDOCK_MODEL_NAME": "m"}


def post(mesh: UpMesh, marker: str) -> httpx.Response:
    row = rows.math(marker, "12", environment="math")
    return httpx.post(f"{mesh.url}/run", json=row, timeout=BOUND_S, trust_env=False)


def children(mesh: UpMesh) -> dict[str, psutil.Process]:
    """The services' processes by name."""
    found = {}
    for name, url in mesh.urls.items():
        port = int(url.rpartition(":")[2])
        for process in psutil.Process(mesh.running.pid).children():
            told = [
                connection.laddr.port for connection in process.net_connections("tcp") if connection.status == "LISTEN"
            ]
            if port in told:
                found[name] = process
    return found


@pytest.mark.behaviour("LA-4", "LA-5")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_up_prints_addresses_and_leaves_nothing_after_a_signal_in_the_middle_of_work(
    number: signal.Signals, status: int, chat: ChatServer, tmp_path: Path
) -> None:
    chat.on("<algebra>", says(NEEDS_ALGEBRA))
    scene = chat.on("<in the middle>", hangs)
    with up(cwd=tmp_path, environ=model(chat)) as mesh, ThreadPoolExecutor() as pool:
        assert mesh.urls.keys() == set(SERVICES)
        assert post(mesh, "<algebra>").json()["reward"] == 1.0
        tree = tree_of(mesh.running.pid)
        assert len(tree) > len(SERVICES), "there are grading children, too"
        waiting = pool.submit(post, mesh, "<in the middle>")
        asked = scene.wait_for_call()
        mesh.running.send(number)
        assert mesh.running.ended(STOP_S) == status
        assert wait_until_none(mesh.running.mark, 1.0, tree) == []
        chat.wait_until_gone(asked, 1.0)
        assert_no_grade(waiting.result)
        assert "Traceback" not in mesh.told
        assert "did not end within" not in mesh.told, "nothing had to be killed"


@pytest.mark.behaviour("LA-4")
@pytest.mark.parametrize("times", [1, 5])
def test_an_episode_under_way_is_closed_at_its_peers_before_those_stop(
    times: int, chat: ChatServer, tmp_path: Path
) -> None:
    scene = chat.on("<closed first>", hangs)
    with up(cwd=tmp_path, environ=model(chat)) as mesh, ThreadPoolExecutor() as pool:
        waiting = pool.submit(post, mesh, "<closed first>")
        scene.wait_for_call()
        for _ in range(times):
            mesh.running.send(signal.SIGTERM)
        assert mesh.running.ended(STOP_S) == 143
        assert_no_grade(waiting.result)
        logged = [orjson.loads(line) for line in mesh.told.splitlines() if line.startswith("{")]
        told = {line["message"]: line for line in logged}
        assert told["agent session closed"]["error"] is None
        assert told["episode failure"]["failure_kind"] == "shutdown"
        assert not [message for message in told if message.startswith("cleanup ")], "no peer was missed"
        assert "did not end within" not in mesh.told


def assert_no_grade(answer: Callable[[float], httpx.Response]) -> None:
    """What a client gets whose mesh is stopped: a failure to try again, or the end of its connection."""
    try:
        answered = answer(10.0)
    except httpx.TransportError:
        return
    if answered.status_code == 200:
        assert answered.json()["failure"]["terminal"] is False
        assert "reward" not in answered.json()
    else:
        assert answered.status_code in {202, 503}, answered.text


def test_a_service_that_is_killed_is_named_started_again_and_works(chat: ChatServer, tmp_path: Path) -> None:
    chat.on("<again>", says(r"\boxed{12}"))
    with up(cwd=tmp_path, environ=model(chat)) as mesh:
        killed = children(mesh)
        assert killed.keys() == set(SERVICES)
        for name in ("agent", "resources", "environment"):
            killed[name].kill()
            line = mesh.running.wait_for_line(rf"^{name} \(pid {killed[name].pid}\) was ended by SIGKILL.*$")
            assert "started again" in line.group()
            _wait_ready(mesh.urls[name])
            assert post(mesh, "<again>").json()["reward"] == 1.0
        now = children(mesh)
        assert now["model_proxy"].pid == killed["model_proxy"].pid
        assert now["agent"].pid != killed["agent"].pid


def _wait_ready(url: str) -> None:
    deadline = time.monotonic() + BOUND_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/readyz", timeout=BOUND_S, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise TimeoutError(f"{url} is not ready")


@pytest.mark.behaviour("LA-4")
def test_a_launcher_that_is_killed_takes_everything_with_it(chat: ChatServer, tmp_path: Path) -> None:
    chat.on("<algebra>", says(NEEDS_ALGEBRA))
    with up(cwd=tmp_path, environ=model(chat)) as mesh:
        assert post(mesh, "<algebra>").json()["reward"] == 1.0
        tree = tree_of(mesh.running.pid)
        mesh.running.kill()
        assert wait_until_none(mesh.running.mark, STOP_S, tree) == []


@pytest.mark.behaviour("LA-4", "LA-5")
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_run_with_services_of_its_own_leaves_none_of_them(
    number: signal.Signals, status: int, chat: ChatServer, tmp_path: Path
) -> None:
    gate = Gate()
    scene = chat.on("<own>", gate.before(says(NEEDS_ALGEBRA)))
    chat.on("<own first>", says(NEEDS_ALGEBRA))
    file = rows.write(tmp_path / "rows.jsonl", [rows.math("<own first>", "12"), rows.math("<own>", "12")])
    out = tmp_path / "out.jsonl"
    mark = new_mark()
    environ = {**model(chat), **FREE_PORTS, MARK: mark}
    del environ["PADDOCK_ENVIRONMENT_URL"]
    with running("run", file, "--environment", "math", "-o", out, cwd=tmp_path, environ=environ) as run:
        scene.wait_for_call()
        _wait_for_lines(out, 1)
        tree = tree_of(run.pid)
        run.send(number)
        assert run.ended(3 * STOP_S) == status
        assert wait_until_none(mark, STOP_S, tree) == []
        gate.open()
    assert [result["reward"] for result in rows.read(out)] == [1.0]


def _wait_for_lines(path: Path, count: int) -> None:
    deadline = time.monotonic() + BOUND_S
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline, "no result was written"
        time.sleep(0.05)
