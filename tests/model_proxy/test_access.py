"""Who may call models, and which; OpenAI's error shape for everything that is refused here."""

import time
from typing import Any

import httpx
import pytest

from shared.settings import LoadedSettings
from shared.tokens import SessionClaims, Signer
from tests.model_proxy.wire import (
    COMPLETION,
    SCRIPTED,
    Asked,
    Proxy,
    always,
    json_body,
    proxied,
    proxy_of,
    reply,
    settings_of,
)

MESH = "mesh-token-of-these-tests"
SIGNER = Signer(MESH, "session-token")


def _loaded() -> LoadedSettings:
    return settings_of(SCRIPTED | {"model": "up"}, security={"mesh_token": MESH})


def _token(key: str = "k", model: str = "policy", left_s: float = 60.0, **claims: Any) -> str:
    return SIGNER.session_token(SessionClaims(key=key, model=model, expires_at=time.time() + left_s, **claims))


async def _ask(proxy: Proxy, token: str | None, path: str = "/v1/responses", **fields: Any) -> httpx.Response:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return await proxy.http.post(path, json={"input": "go"} | fields, headers=headers)


async def _capture(proxy: Proxy, key: str = "k") -> dict[str, Any]:
    answer = await proxy.http.get(f"/captures/{key}", headers={"Authorization": f"Bearer {MESH}"})
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def _error(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    return error


async def test_a_session_token_names_its_episode_and_its_model() -> None:
    async with proxy_of(_loaded()) as proxy:
        for fields in ({}, {"model": "policy"}, {"model": "up"}):
            assert (await _ask(proxy, _token(), **fields)).status_code == 200
        assert (await _ask(proxy, _token(), "/rollouts/k/v1/responses")).status_code == 200
        captured = await _capture(proxy)
    assert [(call["phase"], call["model"]) for call in captured["calls"]] == [("agent", "policy")] * 4


async def test_the_mesh_token_calls_under_a_prefix_and_in_the_phase_verify() -> None:
    async with proxy_of(_loaded()) as proxy:
        answer = await _ask(proxy, MESH, "/rollouts/k/v1/responses", model="policy")
        assert answer.status_code == 200
        assert [call["phase"] for call in (await _capture(proxy))["calls"]] == ["verify"]
        bare = await _ask(proxy, MESH, model="policy")
    assert bare.status_code == 401
    assert "/rollouts/KEY/v1" in _error(bare)["message"]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions", "/rollouts/k/v1/responses"])
async def test_a_forged_an_expired_and_a_missing_token_are_401(path: str) -> None:
    forged = _token()[:-4] + "AAAA"
    other = Signer("another mesh", "session-token").session_token(
        SessionClaims(key="k", model="policy", expires_at=time.time() + 60)
    )
    async with proxy_of(_loaded()) as proxy:
        for token in (forged, other, _token(left_s=-1), "pdk1.x", "pdk1.x.y", "wrong", None):
            answer = await _ask(proxy, token, path)
            assert answer.status_code == 401, token
            assert _error(answer)["code"] == "unauthorized"
        assert (await _capture(proxy))["calls"] == []


async def test_a_session_token_opens_nothing_but_models() -> None:
    async with proxy_of(_loaded()) as proxy:
        headers = {"Authorization": f"Bearer {_token()}"}
        assert (await proxy.http.get("/captures/k", headers=headers)).status_code == 403
        assert (await proxy.http.post("/captures/k/seal", headers=headers)).status_code == 403
        assert (await proxy.http.get("/nothing", headers=headers)).status_code == 403
        assert (await _ask(proxy, _token(), "/rollouts/other/v1/responses")).status_code == 403


async def test_captures_need_the_mesh_token() -> None:
    async with proxy_of(_loaded()) as proxy:
        assert (await proxy.http.get("/captures/k")).status_code == 401
        assert (await proxy.http.post("/captures/k/seal")).status_code == 401


async def test_a_session_token_for_a_sealed_key_is_409_and_the_meshs_calls_go_on() -> None:
    async with proxy_of(_loaded()) as proxy:
        mesh = {"Authorization": f"Bearer {MESH}"}
        assert (await _ask(proxy, _token())).status_code == 200
        for _ in range(2):
            sealed = await proxy.http.post("/captures/k/seal", headers=mesh)
            assert (sealed.status_code, sealed.json()["sealed"], len(sealed.json()["calls"])) == (200, True, 1)
        refused = await _ask(proxy, _token())
        assert (refused.status_code, _error(refused)["code"]) == (409, "capture_sealed")
        models = await proxy.http.get("/v1/models", headers={"Authorization": f"Bearer {_token()}"})
        assert models.status_code == 409
        assert (await _ask(proxy, MESH, "/rollouts/k/v1/responses")).status_code == 200
        assert (await _ask(proxy, _token("k2"))).status_code == 200
        captured = await _capture(proxy)
    assert [call["phase"] for call in captured["calls"]] == ["agent", "verify"]


async def test_a_session_token_allows_one_model() -> None:
    loaded = settings_of(SCRIPTED, security={"mesh_token": MESH})
    both = {**loaded.settings.models, "judge": loaded.settings.models["policy"]}
    loaded = LoadedSettings(loaded.settings.model_copy(update={"models": both}), {})
    async with proxy_of(loaded) as proxy:
        other = await _ask(proxy, _token(), model="judge")
        unknown = await _ask(proxy, _token(), model="polcy")
        nameless = await _ask(proxy, MESH, "/rollouts/k/v1/responses")
        listed = await proxy.http.get("/v1/models", headers={"Authorization": f"Bearer {_token()}"})
        all_listed = await proxy.http.get("/rollouts/k/v1/models", headers={"Authorization": f"Bearer {MESH}"})
    assert other.status_code == 403
    assert (unknown.status_code, _error(unknown)["code"]) == (404, "model_not_found")
    assert (nameless.status_code, _error(nameless)["param"]) == (400, "model")
    assert [model["id"] for model in listed.json()["data"]] == ["policy"]
    assert [model["id"] for model in all_listed.json()["data"]] == ["judge", "policy"]


async def test_an_unknown_model_is_told_with_the_nearest_and_recorded() -> None:
    async with proxy_of(settings_of(SCRIPTED)) as proxy:
        answer = await proxy.call("responses", model="polcy")
        call = await proxy.last_call()
    assert (answer.status_code, _error(answer)["code"], _error(answer)["param"]) == (404, "model_not_found", "model")
    assert "Did you mean 'policy'?" in _error(answer)["message"]
    assert (call.status, call.error_category, call.model) == (404, "not_found", "polcy")


@pytest.mark.behaviour("MS-1")
async def test_a_mesh_without_a_token_takes_any_bearer_under_a_prefix() -> None:
    async with proxy_of(settings_of(SCRIPTED)) as proxy:
        for token in (None, "anything"):
            for dialect in ("responses", "chat/completions"):
                fields: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in dialect else {}
                assert (await _ask(proxy, token, f"/rollouts/k/v1/{dialect}", **fields)).status_code == 200
            assert (await _ask(proxy, token)).status_code == 401


@pytest.mark.behaviour("MS-1")
@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b""])
async def test_a_body_that_is_no_json_object_is_422(body: bytes) -> None:
    async with proxy_of(settings_of(SCRIPTED)) as proxy:
        answer = await proxy.http.post("/rollouts/k/v1/responses", content=body)
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["body"]


async def test_a_field_without_a_form_upstream_is_400_and_recorded() -> None:
    async with proxied(always(json_body(COMPLETION))) as (proxy, upstream):
        answer = await proxy.call("responses", previous_response_id="resp_1")
        call = await proxy.last_call()
    assert (answer.status_code, _error(answer)["param"]) == (400, "previous_response_id")
    assert (call.status, call.error_category, call.attempts) == (400, "client_error", 0)
    assert upstream.asked == []


async def test_the_claimed_profile_decides_what_is_dropped() -> None:
    fields: dict[str, Any] = {"tools": [{"type": "web_search"}], "prompt_cache_key": "x", "store": False}
    async with proxy_of(_loaded()) as proxy:
        codex = await _ask(proxy, _token(profile="codex"), **fields)
        strict = await _ask(proxy, _token(profile="strict"), prompt_cache_key="x")
        calls = (await _capture(proxy))["calls"]
    assert (codex.status_code, strict.status_code) == (200, 400)
    assert "prompt_cache_key" in calls[0]["dropped_fields"]


async def test_what_a_server_wants_repeated_is_repeated_for_codex_only() -> None:
    async def handler(asked: Asked) -> None:
        if asked.nth_on_connection % 2:
            await asked.write(reply(429, b"busy", ("Retry-After", "0")))
        else:
            await asked.write(json_body(COMPLETION))

    async with proxied(handler) as (proxy, upstream):
        plain = await proxy.call("responses")
        assert plain.status_code == 429
        token = Signer("", "session-token").session_token(
            SessionClaims(key="k", model="policy", expires_at=time.time() + 60, profile="codex")
        )
        upstream.asked.clear()
        await proxy.call("responses")
        repeated = await _ask(proxy, token)
        call = await proxy.last_call("k")
    assert repeated.status_code == 200
    assert (call.attempts, call.status, call.upstream_status) == (2, 200, 200)


async def test_a_wait_longer_than_the_budget_is_passed_on_at_once() -> None:
    async with proxied(always(reply(503, b"busy", ("Retry-After", "31")))) as (proxy, upstream):
        token = Signer("", "session-token").session_token(
            SessionClaims(key="k", model="policy", expires_at=time.time() + 60, profile="codex")
        )
        answer = await _ask(proxy, token)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "31")
    assert len(upstream.asked) == 1


async def test_a_key_that_no_episode_can_have_is_404() -> None:
    async with proxy_of(settings_of(SCRIPTED)) as proxy:
        assert (await _ask(proxy, None, "/rollouts/a:seal/v1/responses")).status_code == 404
        assert (await proxy.http.get("/captures/a:seal")).status_code == 404
        assert (await proxy.http.post(f"/captures/{'a' * 300}/seal")).status_code == 404


async def test_a_token_with_bounds_allows_that_many_calls_and_tokens() -> None:
    async with proxy_of(_loaded()) as proxy:
        for n in range(3):
            answer = await _ask(proxy, _token("calls", max_calls=2))
            assert answer.status_code == (200 if n < 2 else 403)
        assert _error(answer)["code"] == "session_limit_reached"
        assert (await _ask(proxy, _token("tokens", max_output_tokens=1))).status_code == 200
        refused = await _ask(proxy, _token("tokens", max_output_tokens=1))
        assert (refused.status_code, _error(refused)["code"]) == (403, "session_limit_reached")
        judged = await _ask(proxy, MESH, "/rollouts/calls/v1/responses", model="policy")
        assert judged.status_code == 200


async def test_while_the_mesh_token_changes_the_previous_one_still_opens() -> None:
    security = {"mesh_token": "the new one", "previous_mesh_token": MESH}
    async with proxy_of(settings_of(SCRIPTED, security=security)) as proxy:
        assert (await _ask(proxy, _token())).status_code == 200
        assert (await _ask(proxy, MESH, "/rollouts/k/v1/responses", model="policy")).status_code == 200
        assert len((await _capture(proxy))["calls"]) == 2
    async with proxy_of(settings_of(SCRIPTED, security={"mesh_token": "the new one"})) as proxy:
        assert (await _ask(proxy, _token())).status_code == 401


async def test_the_mesh_token_lists_all_models_without_naming_an_episode() -> None:
    async with proxy_of(_loaded()) as proxy:
        listed = await proxy.http.get("/v1/models", headers={"Authorization": f"Bearer {MESH}"})
        assert [model["id"] for model in listed.json()["data"]] == ["policy"]
        assert (await proxy.http.get("/v1/models")).status_code == 401
