"""Who may call by the Messages API, with which header, and in which shape a caller is refused."""

import time

import pytest

from shared.settings import LoadedSettings
from shared.tokens import SessionClaims, Signer
from tests.model_proxy.wire import SCRIPTED, proxy_of, settings_of

MESH = "mesh-token-of-these-tests"


def _guarded() -> LoadedSettings:
    return settings_of(SCRIPTED | {"model": "up"}, security={"mesh_token": MESH})


def _session_token(key: str = "k") -> str:
    claims = SessionClaims(key=key, model="policy", expires_at=time.time() + 3600)
    return Signer(MESH, "session-token").session_token(claims)


ASKED = {"max_tokens": 9, "messages": [{"role": "user", "content": "go"}]}


async def test_a_token_may_come_as_an_api_key() -> None:
    async with proxy_of(_guarded()) as proxy:
        for path, token in (
            ("/v1/messages", _session_token()),
            ("/rollouts/k/v1/messages", _session_token()),
            ("/rollouts/k/v1/messages", MESH),
        ):
            answer = await proxy.http.post(path, json=ASKED, headers={"X-Api-Key": token})
            assert answer.status_code == 200, answer.text
        read = await proxy.http.get("/captures/k", headers={"Authorization": f"Bearer {MESH}"})
    assert [call["phase"] for call in read.json()["calls"]] == ["agent", "agent", "verify"]


@pytest.mark.parametrize(
    ("path", "token", "status", "kind"),
    [
        ("/v1/messages", None, 401, "authentication_error"),
        ("/v1/messages", "wrong", 401, "authentication_error"),
        ("/v1/messages", MESH, 401, "authentication_error"),
        ("/v1/messages", _session_token()[:-4] + "AAAA", 401, "authentication_error"),
        ("/v1/messages/count_tokens", None, 401, "authentication_error"),
        ("/rollouts/other/v1/messages", _session_token(), 403, "permission_error"),
    ],
)
async def test_a_wrong_token_is_refused_in_the_apis_shape(path: str, token: str | None, status: int, kind: str) -> None:
    headers = {} if token is None else {"X-Api-Key": token}
    async with proxy_of(_guarded()) as proxy:
        answer = await proxy.http.post(path, json=ASKED, headers=headers)
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)


async def test_a_bearer_token_goes_before_an_api_key() -> None:
    headers = {"X-Api-Key": _session_token(), "Authorization": "Bearer wrong"}
    async with proxy_of(_guarded()) as proxy:
        answer = await proxy.http.post("/v1/messages", json=ASKED, headers=headers)
    assert answer.status_code == 401


async def test_a_sealed_episode_is_a_409_in_the_apis_shape() -> None:
    async with proxy_of(_guarded()) as proxy:
        await proxy.http.post("/captures/k/seal", headers={"Authorization": f"Bearer {MESH}"})
        answer = await proxy.http.post("/v1/messages", json=ASKED, headers={"X-Api-Key": _session_token()})
    assert (answer.status_code, answer.json()["error"]["type"]) == (409, "conflict_error")
