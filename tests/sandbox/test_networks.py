"""What a sandbox reaches in a running mesh: the model with its own token, and nothing else."""

import asyncio
import json
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from services.launcher.embedded import EmbeddedMesh, embedded_mesh
from shared.configuration import load_settings
from shared.errors import SandboxRefusedError
from shared.http.service import mesh_token_of
from shared.ports.sandbox import Sandbox
from shared.sandbox.context import ProviderContext, check_socket_folder
from shared.sandbox.open import open_provider
from shared.settings import SERVICE_NAMES, SandboxSettings, Settings
from shared.tokens import SessionClaims, Signer
from tests.sandbox.docker_rig import IMAGE, docker, new_spec
from tests.serving import free_port

WAIT_MS = 700
ANYTHING = Path(__file__).parents[1] / "model_proxy" / "anything.yaml"
SOON_S = 20.0
PROVIDERS = [
    pytest.param({"provider": "local", "isolation": "bubblewrap"}, id="bubblewrap", marks=pytest.mark.bubblewrap),
    pytest.param({"provider": "docker", "image": IMAGE}, id="docker", marks=pytest.mark.docker),
]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedMesh]:
    """All four services; the model proxy also on a socket in a folder of its own that any user may pass."""
    folder = tmp_path_factory.mktemp("mesh")
    config = folder / "mesh.yaml"
    config.write_text(
        f"models: {{policy: {{upstream: scripted, script: {ANYTHING}}}}}\n"
        f"services: {{model_proxy: {{url: 'http://127.0.0.1:0', socket_path: {folder}/models/models.sock}}}}\n"
        "serving: {drain_lead_s: 0}\n"
    )
    with embedded_mesh(load_settings([config], {}), log_path=folder / "mesh.log") as running:
        yield running


@contextmanager
def _redis() -> Iterator[int]:
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "0.0.0.0", "--save", "", "--protected-mode", "no"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + SOON_S
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < end
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait(SOON_S)


@asynccontextmanager
async def _sandbox(settings: Settings, entry: dict[str, Any], network: str, state_dir: Path) -> AsyncIterator[Sandbox]:
    configured = settings.model_copy(
        update={"sandboxes": {"box": SandboxSettings.model_validate(entry)}, "state_dir": state_dir}
    )
    provider = open_provider("box", configured)
    try:
        box = await provider.create(new_spec(network=network))
        try:
            yield box
        finally:
            await box.stop()
    finally:
        await provider.close()


async def _ask(box: Sandbox, address: str, port: int, request: bytes = b"GET / HTTP/1.0\r\n\r\n") -> bytes | None:
    """What an address answers from inside; None when it is not reached."""
    command = [box.place.supervisor, "reach", address, str(port), str(WAIT_MS)]
    result = await box.exec(command, stdin=request, timeout_s=30)
    return result.stdout.data if result.ok else None


async def _call_model(box: Sandbox, path: str, token: str) -> tuple[int, bytes]:
    """POST over the address that the sandbox is told; waits until its relay listens."""
    url = urlsplit(box.place.model_base_url or "")
    body = json.dumps({"model": "policy", "input": "What is 1 + 1? Put it in \\boxed{}."}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: model\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    end = time.monotonic() + SOON_S
    while (answer := await _ask(box, url.hostname or "", url.port or 80, head.encode() + body)) is None:
        assert time.monotonic() < end, "the relay does not listen"
        await asyncio.sleep(0.05)
    return int(answer.split(b" ", 2)[1]), answer


def _token(settings: Settings, key: str) -> str:
    claims = SessionClaims(key=key, model="policy", expires_at=time.time() + 60)
    return Signer(mesh_token_of(settings) or "", "session-token").session_token(claims)


def _addresses() -> list[str]:
    """This machine's own addresses, those of its bridges among them."""
    told = json.loads(subprocess.check_output(["ip", "-json", "-4", "address"]))
    return [address["local"] for interface in told for address in interface["addr_info"]]


@pytest.mark.parametrize("entry", PROVIDERS)
async def test_over_the_proxy_network_the_model_answers_with_the_episodes_own_token(
    mesh: EmbeddedMesh, entry: dict[str, Any], state_dir: Path
) -> None:
    settings = mesh.loaded.settings
    async with _sandbox(settings, entry, "proxy", state_dir) as box:
        status, answer = await _call_model(box, "/v1/responses", _token(settings, "own"))
        assert status == 200, answer
        assert b'"completed"' in answer


@pytest.mark.parametrize("entry", PROVIDERS)
async def test_another_episodes_key_and_the_mesh_token_are_of_no_use_inside(
    mesh: EmbeddedMesh, entry: dict[str, Any], state_dir: Path
) -> None:
    settings = mesh.loaded.settings
    async with _sandbox(settings, entry, "proxy", state_dir) as box:
        for path in ("/rollouts/other/v1/responses", "/captures/other/seal", "/captures/own", "/metrics"):
            status, answer = await _call_model(box, path, _token(settings, "own"))
            assert status == 403, (path, answer)
        for token in (mesh_token_of(settings) or "", _token(settings, "own") + "x", ""):
            status, answer = await _call_model(box, "/v1/responses", token)
            assert status == 401, answer


@pytest.mark.parametrize("entry", PROVIDERS)
async def test_over_the_proxy_network_no_service_and_no_address_of_the_machine_is_reached(
    mesh: EmbeddedMesh, entry: dict[str, Any], state_dir: Path
) -> None:
    settings = mesh.loaded.settings
    ports = [urlsplit(settings.services.url_of(name)).port or 80 for name in SERVICE_NAMES]
    async with _sandbox(settings, entry, "proxy", state_dir) as box:
        model_port = urlsplit(box.place.model_base_url or "").port
        reached = [
            (address, port)
            for address in [*_addresses(), "127.0.0.1"]
            for port in ports
            if not (address == "127.0.0.1" and port == model_port) and await _ask(box, address, port) is not None
        ]
        assert reached == []


@pytest.mark.redis
@pytest.mark.parametrize("entry", PROVIDERS)
async def test_over_the_proxy_network_redis_is_not_reached(
    mesh: EmbeddedMesh, entry: dict[str, Any], state_dir: Path
) -> None:
    with _redis() as port:
        async with _sandbox(mesh.loaded.settings, entry, "proxy", state_dir) as box:
            for address in [*_addresses(), "127.0.0.1"]:
                assert await _ask(box, address, port, b"PING\r\n") is None, address


@pytest.mark.parametrize("entry", PROVIDERS)
async def test_no_socket_of_the_engine_is_inside(mesh: EmbeddedMesh, entry: dict[str, Any], state_dir: Path) -> None:
    async with _sandbox(mesh.loaded.settings, entry, "proxy", state_dir) as box:
        script = "find / -xdev -type s 2>/dev/null; find /run/paddock-model -type s; ls -A /run/paddock-model"
        found = (await box.exec(["sh", "-c", script])).stdout.text().split()
        assert set(found) <= {"/run/paddock-model/models.sock", "models.sock"}, found


@pytest.mark.docker
async def test_over_an_open_network_only_the_model_of_all_services_is_reached(
    mesh: EmbeddedMesh, state_dir: Path
) -> None:
    settings = mesh.loaded.settings
    ports = [urlsplit(settings.services.url_of(name)).port or 80 for name in SERVICE_NAMES]
    async with _sandbox(settings, {"provider": "docker", "image": IMAGE}, "open", state_dir) as box:
        status, answer = await _call_model(box, "/v1/responses", _token(settings, "own"))
        assert status == 200, answer
        # Nothing of the mesh listens on the gateway: the model comes over the socket here, too.
        gateway = docker("network", "inspect", "paddock-open", "--format", "{{(index .IPAM.Config 0).Gateway}}").strip()
        for address in {*_addresses(), gateway} - {"127.0.0.1"}:
            for port in ports:
                assert await _ask(box, address, port) is None, (address, port)


def test_a_socket_in_a_folder_with_other_files_is_not_mounted(tmp_path: Path) -> None:
    (tmp_path / "models.sock").touch()
    check_socket_folder(tmp_path / "models.sock")
    (tmp_path / "key.txt").touch()
    with pytest.raises(SandboxRefusedError, match=r"key\.txt.*folder of its own"):
        check_socket_folder(tmp_path / "models.sock")


def test_the_context_takes_the_socket_from_the_configuration(tmp_path: Path) -> None:
    settings = Settings.model_validate(
        {"services": {"model_proxy": {"url": "http://127.0.0.1:1", "socket_path": str(tmp_path / "s" / "m.sock")}}}
    )
    assert ProviderContext.of("box", settings).model_socket == tmp_path / "s" / "m.sock"
