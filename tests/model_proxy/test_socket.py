"""The Unix socket: models with a session token, and nothing else."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from shared.tokens import SessionClaims, Signer
from tests.serving import free_port

MESH = "mesh-token-of-these-tests"
SOON_S = 30.0


@contextlib.asynccontextmanager
async def socket_client(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A proxy in a process of its own with the scripted model, and a client on its socket."""
    path = folder / "run" / "models.sock"
    config = folder / "mesh.yaml"
    config.write_text(
        f"models: {{policy: {{upstream: scripted, script: {Path(__file__).with_name('anything.yaml')}}}}}\n"
        f"security: {{mesh_token: {MESH}}}\n"
        f"serving: {{drain_lead_s: 0}}\n"
        f"services: {{model_proxy: {{url: 'http://127.0.0.1:{free_port()}', socket_path: {path}}}}}\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.cli", "serve", "model-proxy", "--config", str(config)
    )
    try:
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://models", timeout=SOON_S) as client:
            async with asyncio.timeout(SOON_S):
                while True:
                    with contextlib.suppress(httpx.TransportError):
                        await client.get("/healthz")
                        break
                    await asyncio.sleep(0.05)
            yield client
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), SOON_S)
    assert not path.exists()


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def test_a_session_token_reaches_its_model_and_nothing_else_is_there(tmp_path: Path) -> None:
    claims = SessionClaims(key="k", model="policy", expires_at=time.time() + 60)
    token = Signer(MESH, "session-token").session_token(claims)
    async with socket_client(tmp_path) as client:
        answer = await client.post("/v1/responses", json={"input": "go"}, headers=bearer(token))
        assert answer.json()["status"] == "completed"
        for path in ("/captures/k", "/captures/k/seal", "/rollouts/k/v1/responses", "/metrics", "/docs", "/healthz"):
            assert (await client.post(path, headers=bearer(token))).status_code == 403
        for refused in (MESH, "nonsense", f"{token}x"):
            answer = await client.post("/v1/responses", json={"input": "go"}, headers=bearer(refused))
            assert answer.status_code == 401
        assert (await client.post("/v1/responses", json={"input": "go"})).status_code == 401


@pytest.mark.parametrize("header", ["x-api-key"])
async def test_a_token_may_come_in_the_messages_apis_own_header(tmp_path: Path, header: str) -> None:
    claims = SessionClaims(key="k", model="policy", expires_at=time.time() + 60)
    token = Signer(MESH, "session-token").session_token(claims)
    async with socket_client(tmp_path) as client:
        answer = await client.post("/v1/responses", json={"input": "go"}, headers={header: token})
        assert answer.status_code == 200
