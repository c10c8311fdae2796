"""The real four services under the launcher: `paddock up`, and a mesh for the length of a block."""

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from services.launcher.embedded import EmbeddedMeshError, embedded_mesh
from services.launcher.mesh import run_mesh, with_urls
from shared.configuration import load_settings
from shared.errors import ConfigurationError
from shared.settings import SERVICE_NAMES, LoadedSettings, SecuritySettings, StoreSettings
from tests.launcher.rig import Launched, children_of, gone, memory_kib, tree_of

FREE_PORTS = {f"PADDOCK_{name.upper()}_URL": "http://127.0.0.1:0" for name in SERVICE_NAMES}
STARTED = "All services are ready."
ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "Which planet is known as the Red Planet?"}]},
    "options": [{"A": "Venus"}, {"B": "Mars"}],
    "expected_answer": "B",
}


@contextmanager
def paddock_up(*arguments: str, environ: Mapping[str, str] = FREE_PORTS) -> Iterator[Launched]:
    with Launched(["-m", "services.cli", "up", *arguments], environ) as launched:
        launched.read_until(STARTED)
        yield launched


def urls_of(launched: Launched) -> dict[str, str]:
    lines = [line.split() for line in launched.lines if " http://" in line]
    return {name: url for name, url in lines}


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedSettings:
    return load_settings([], {"PADDOCK_STATE_DIR": str(tmp_path)})


@pytest.mark.behaviour("LA-4", "LA-5")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_paddock_up_serves_until_a_signal_and_leaves_nothing(number: signal.Signals, status: int) -> None:
    with paddock_up() as launched:
        for name, url in urls_of(launched).items():
            assert httpx.get(f"{url}/readyz").json()["service"] == name
        assert len(urls_of(launched)) == 4
        services = children_of(launched.pid)
        os.kill(launched.pid, number)
        assert launched.read_to_the_end(5.0) == status
        assert all(gone(service, 1.0) for service in services)


@pytest.mark.behaviour("LA-4")
def test_an_open_request_does_not_hold_up_the_stop() -> None:
    with paddock_up() as launched:
        address = urls_of(launched)["environment"].removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1]))) as connection:
            connection.sendall(b"POST /run HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
            os.kill(launched.pid, signal.SIGTERM)
            assert launched.read_to_the_end(5.0) == 143


def test_the_mesh_is_five_small_processes() -> None:
    with paddock_up() as launched:
        processes = tree_of(launched.pid)
        assert len(processes) <= 6
        assert sum(memory_kib(pid, "Rss") for pid in processes) <= 450 * 2**10
        assert sum(memory_kib(pid, "Pss") for pid in processes) <= 200 * 2**10


def test_preloading_starts_no_thread_and_no_event_loop() -> None:
    script = (
        "import asyncio, os, sys\n"
        "from services.launcher.workers import preload\n"
        "from shared.settings import SERVICE_NAMES\n"
        "preload(SERVICE_NAMES)\n"
        "assert asyncio._get_running_loop() is None\n"
        "os.write(1, b'threads %d.\\n' % len(os.listdir('/proc/self/task')))\n"
    )
    with Launched(["-c", script]) as launched:
        launched.read_until("threads 1.")


def test_a_service_that_is_killed_is_started_again_on_its_port() -> None:
    with paddock_up("--on-death", "restart") as launched:
        url = urls_of(launched)["model_proxy"]
        killed = children_of(launched.pid)[SERVICE_NAMES.index("model_proxy")]
        first = httpx.get(f"{url}/readyz").json()["instance"]
        os.kill(killed, signal.SIGKILL)
        said = launched.read_until("model_proxy (pid", bound_s=1.0)
        assert said == (f"model_proxy (pid {killed}) was ended by SIGKILL. It is started again (1 of 3 within 60 s).")
        assert httpx.get(f"{url}/readyz", timeout=10.0).json()["instance"] != first


@pytest.mark.behaviour("LA-6")
def test_a_service_that_is_killed_ends_the_mesh_when_asked_to() -> None:
    with paddock_up("--on-death", "end") as launched:
        os.kill(children_of(launched.pid)[1], signal.SIGKILL)
        assert launched.read_to_the_end(6.0) == 1
        assert "The others are stopped." in launched.lines[-1]


def test_the_mesh_goes_on_when_nobody_reads_its_output() -> None:
    with paddock_up("--on-death", "restart") as launched:
        assert launched.process.stdout is not None
        launched.process.stdout.close()
        killed = children_of(launched.pid)[SERVICE_NAMES.index("agent")]
        os.kill(killed, signal.SIGKILL)
        assert gone(killed, 5.0)
        assert httpx.get(f"{urls_of(launched)['agent']}/readyz", timeout=10.0).status_code == 200
        os.kill(launched.pid, signal.SIGTERM)
        assert launched.process.wait(5.0) == 143


def test_the_services_end_when_the_launcher_is_killed() -> None:
    with paddock_up() as launched:
        os.kill(launched.pid, signal.SIGKILL)
        launched.read_to_the_end(2.0)


def test_ports_that_are_taken_are_all_told_with_service_port_and_remedy(loaded: LoadedSettings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        ports = [one.getsockname()[1] for one in (first, second)]
        elsewhere = with_urls(
            loaded,
            {
                "environment": "http://127.0.0.1:0",
                "agent": f"http://127.0.0.1:{ports[0]}",
                "model_proxy": "http://127.0.0.1:0",
                "resources": f"http://127.0.0.1:{ports[1]}",
            },
        )
        with pytest.raises(ConfigurationError) as caught:
            run_mesh(elsewhere, on_death="end", announce=lambda sentence: None)
    assert [problem.key for problem in caught.value.problems] == ["services.agent.url", "services.resources.url"]
    message = caught.value.problems[0].message
    assert f"port {ports[0]} on 127.0.0.1 is taken, so the agent service cannot listen there" in message
    assert f"PADDOCK_AGENT_URL=http://127.0.0.1:{ports[0] + 1}" in message


def test_an_embedded_mesh_answers_a_row_and_is_gone_afterwards(loaded: LoadedSettings) -> None:
    with embedded_mesh(loaded) as mesh:
        processes = tree_of(os.getpid())[1:]
        answer = httpx.post(f"{mesh.environment_url}/run", json={**ROW, "environment": "mcqa"}, timeout=30.0)
        assert answer.status_code == 200
        assert "reward" in answer.json()
    assert len(processes) >= 5
    assert all(gone(process, 1.0) for process in processes)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_embedded_mesh_is_gone_after_an_exception(loaded: LoadedSettings, error: type[BaseException]) -> None:
    processes: list[int] = []

    def fail_inside() -> None:
        with embedded_mesh(loaded):
            processes.extend(tree_of(os.getpid())[1:])
            raise error

    with pytest.raises(error):
        fail_inside()
    assert len(processes) >= 5
    assert all(gone(process, 1.0) for process in processes)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """INT interrupts, also where the tests were started in a shell's background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.behaviour("LA-6")
@pytest.mark.usefixtures("interruptible")
def test_an_embedded_mesh_that_ends_by_itself_ends_its_block_with_a_failure(loaded: LoadedSettings) -> None:
    waiting = threading.Event()

    def use_it() -> None:
        with embedded_mesh(loaded):
            (launcher,) = children_of(os.getpid())
            os.kill(launcher, signal.SIGTERM)
            waiting.wait(20.0)
            raise AssertionError("the block was not interrupted")

    with pytest.raises(EmbeddedMeshError, match="ended by itself"):
        use_it()
    assert children_of(os.getpid()) == []


def test_an_embedded_mesh_ends_with_a_caller_that_is_killed() -> None:
    script = (
        "import os, time\n"
        "from services.launcher.embedded import embedded_mesh\n"
        "from shared.configuration import load_settings\n"
        "with embedded_mesh(load_settings([])):\n"
        "    os.write(1, b'ready\\n')\n"
        "    time.sleep(60)\n"
    )
    with Launched(["-c", script]) as launched:
        launched.read_until("ready")
        processes = tree_of(launched.pid)[1:]
        assert len(processes) >= 5
        os.kill(launched.pid, signal.SIGKILL)
        assert all(gone(process, 5.0) for process in processes)


def test_an_embedded_mesh_that_cannot_start_says_why(loaded: LoadedSettings) -> None:
    broken = LoadedSettings(
        loaded.settings.model_copy(update={"store": StoreSettings(url="nowhere://x")}), loaded.sources
    )
    told = r"The mesh did not start\. \w+ \(pid \d+\) ended with exit status 1 before it was ready: .*store.*nowhere"
    with pytest.raises(EmbeddedMeshError, match=told), embedded_mesh(broken):
        raise AssertionError("it started")
    assert children_of(os.getpid()) == []


def test_an_embedded_mesh_logs_to_a_file_when_given_one(loaded: LoadedSettings, tmp_path: Path) -> None:
    log_path = tmp_path / "logs" / "mesh.log"
    with embedded_mesh(loaded, log_path=log_path) as mesh:
        httpx.post(f"{mesh.environment_url}/run", json={**ROW, "environment": "mcqa"}, timeout=30.0)
    lines = [json.loads(line) for line in log_path.read_text().splitlines()]
    assert {"environment"} <= {line["service"] for line in lines}


def test_no_secret_stands_on_a_command_line_or_in_an_environment(loaded: LoadedSettings) -> None:
    secret = "a-mesh-token-that-nobody-guesses"
    security = SecuritySettings(mesh_token=SecretStr(secret))
    private = LoadedSettings(loaded.settings.model_copy(update={"security": security}), loaded.sources)
    with embedded_mesh(private) as mesh:
        assert mesh.loaded.settings.security.mesh_token == SecretStr(secret)
        for process in tree_of(os.getpid())[1:]:
            for told in ("cmdline", "environ"):
                assert secret.encode() not in Path(f"/proc/{process}/{told}").read_bytes()


def test_an_embedded_mesh_makes_a_token_where_none_is_configured(loaded: LoadedSettings) -> None:
    assert loaded.settings.security.mesh_token is None
    with embedded_mesh(loaded) as mesh:
        token = mesh.loaded.settings.security.mesh_token
        assert token is not None
        url = f"{mesh.loaded.settings.services.url_of('resources')}/mcqa/reverify_mode"
        assert httpx.get(url).status_code == 401
        answer = httpx.get(url, headers={"Authorization": f"Bearer {token.get_secret_value()}"})
        assert answer.status_code == 200
