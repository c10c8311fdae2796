"""What an upstream answers in place of an answer reaches the caller as it came."""

import copy
import itertools
from typing import Any

import httpx
import orjson
import pytest

from tests.model_proxy.wire import (
    COMPLETION,
    DONE,
    END,
    SSE_HEAD,
    Asked,
    Proxy,
    always,
    delta,
    event,
    events_of,
    json_body,
    path_of,
    piece,
    proxied,
    proxy_of,
    reply,
    request_of,
    settings_of,
)
from tests.serving import free_port

JSON = ("Content-Type", "application/json")
TEXT = ("Content-Type", "text/plain")
HTML = ("Content-Type", "text/html")
# Spaces in the bodies, so that a body that was parsed and written anew would differ.
ROWS: list[tuple[int, bytes, list[tuple[str, str]], str]] = [
    (
        400,
        b'{"error": {"message": "prompt too long", "code": "context_length_exceeded"}}',
        [JSON],
        "client_error",
    ),
    (401, b'{"error": {"message": "who are you"}}', [JSON], "auth"),
    (403, b'{"error":  {"message": "not yours"}}', [JSON], "auth"),
    (404, b'{"detail": "no such model"}', [JSON], "not_found"),
    (413, b"<html>413 Request Entity Too Large</html>", [HTML], "client_error"),
    (422, b'{"detail": [{"loc": ["body", "x"], "msg": "bad"}]}', [JSON], "client_error"),
    (429, b'{"error": {"message": "slow down", "code": "rate"}}', [JSON, ("Retry-After", "17")], "rate_limit"),
    (429, b"slow down", [TEXT, ("Retry-After", "Wed, 21 Oct 2026 07:28:00 GMT")], "rate_limit"),
    (500, b"a traceback, perhaps", [TEXT], "upstream_error"),
    (503, b'{"error": {"message": "overloaded"}}', [JSON, ("Retry-After", "3")], "upstream_error"),
    (529, b'{"type": "error"}', [JSON], "upstream_error"),
]
# upstream kind, caller's dialect
PATHS = [
    ("chat_completions", "responses"),
    ("chat_completions", "chat_completions"),
    ("responses", "responses"),
    ("chat_completions", "messages"),
    ("responses", "messages"),
]


async def _asked_unchanged(proxy: Proxy, dialect: str, stream: bool) -> httpx.Response:
    asked = request_of(dialect, stream=stream)
    before = copy.deepcopy(asked)
    answer = await proxy.http.post(path_of(dialect), json=asked)
    assert asked == before
    assert (await proxy.last_call()).request == before
    return answer


@pytest.mark.behaviour("MS-2", "MS-3", "MS-5", "MS-7", "MS-19")
@pytest.mark.parametrize(("path", "stream"), [*itertools.product(PATHS, [False, True])])
async def test_an_upstream_error_arrives_as_it_came(path: tuple[str, str], stream: bool) -> None:
    more = [("X-Request-Id", "up-1"), ("Set-Cookie", "a=b"), ("OpenAI-Model", "other"), ("Connection", "keep-alive")]
    async with proxied(always(), path[0]) as (proxy, upstream):
        for count, (status, body, headers, category) in enumerate(ROWS, start=1):
            upstream.handler = always(reply(status, body, *headers, *more))
            answer = await _asked_unchanged(proxy, path[1], stream)
            call = await proxy.last_call()
            assert (answer.status_code, answer.content) == (status, body)
            for name, value in [*headers, ("X-Request-Id", "up-1")]:
                assert answer.headers[name] == value
            assert not {"set-cookie", "openai-model", "connection"} & set(answer.headers)
            assert (call.status, call.upstream_status, call.error_category) == (status, status, category)
            assert call.attempts == 1
            assert len(upstream.asked) == count


@pytest.mark.behaviour("MS-2", "MS-19")
@pytest.mark.parametrize(("path", "stream"), [*itertools.product(PATHS, [False, True])])
async def test_a_refused_connection_is_a_502(path: tuple[str, str], stream: bool) -> None:
    loaded = settings_of({"upstream": path[0], "base_url": f"http://127.0.0.1:{free_port()}/v1"})
    async with proxy_of(loaded) as proxy:
        answer = await _asked_unchanged(proxy, path[1], stream)
        call = await proxy.last_call()
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_unreachable")
    assert answer.json()["failure"]["failure_kind"] == "model_error"
    assert (call.status, call.upstream_status, call.error_category, call.attempts) == (502, None, "connection", 2)


@pytest.mark.behaviour("MS-2", "MS-19")
@pytest.mark.parametrize(("path", "stream"), [*itertools.product(PATHS, [False, True])])
async def test_a_connection_dropped_without_an_answer_is_a_502_and_not_tried_again(
    path: tuple[str, str], stream: bool
) -> None:
    async def drop(asked: Asked) -> None:
        asked.hang_up()

    async with proxied(drop, path[0]) as (proxy, upstream):
        answer = await _asked_unchanged(proxy, path[1], stream)
        call = await proxy.last_call()
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_disconnected")
    assert (call.status, call.error_category) == (502, "connection")
    assert len(upstream.asked) == 1


@pytest.mark.behaviour("MS-2", "MS-19")
@pytest.mark.parametrize(("path", "stream"), [*itertools.product(PATHS, [False, True])])
async def test_silence_is_a_504(path: tuple[str, str], stream: bool) -> None:
    async def hang(asked: Asked) -> None:
        await asked.gone.wait()

    async with proxied(hang, path[0], timeout_s=0.2) as (proxy, _):
        answer = await _asked_unchanged(proxy, path[1], stream)
        call = await proxy.last_call()
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "upstream_timeout")
    assert (call.status, call.error_category) == (504, "timeout")


@pytest.mark.behaviour("MS-2")
@pytest.mark.parametrize(("path", "stream"), [*itertools.product(PATHS, [False, True])])
async def test_an_error_object_under_status_200_is_a_502(path: tuple[str, str], stream: bool) -> None:
    body = {"error": {"message": "ResourceExhausted", "code": 502}}
    async with proxied(always(json_body(body)), path[0]) as (proxy, _):
        answer = await proxy.call(path[1], stream=stream)
        call = await proxy.last_call()
    assert answer.status_code == 502
    assert "ResourceExhausted" in answer.json()["error"]["message"]
    assert (call.status, call.upstream_status, call.error_category) == (502, 200, "upstream_error")


@pytest.mark.parametrize("path", PATHS)
async def test_something_else_than_json_under_status_200_is_a_502(path: tuple[str, str]) -> None:
    async with proxied(always(reply(200, b"<html>Welcome to nginx</html>", HTML)), path[0]) as (proxy, _):
        answer = await proxy.call(path[1])
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "invalid_reply")


async def test_something_else_than_http_is_a_502() -> None:
    async with proxied(always(b"SSH-2.0-OpenSSH_9.6\r\n\r\n", then_close=True)) as (proxy, _):
        answer = await proxy.call("responses")
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_disconnected")


async def test_a_body_that_ends_too_early_is_a_502() -> None:
    whole = json_body(COMPLETION)
    async with proxied(always(whole[:-5], then_close=True)) as (proxy, _):
        answer = await proxy.call("responses")
        call = await proxy.last_call()
    assert (answer.status_code, call.upstream_status, call.error_category) == (502, 200, "connection")


@pytest.mark.behaviour("MS-3")
@pytest.mark.parametrize(
    ("path", "first"),
    [
        (PATHS[0], {"error": {"message": "boom", "code": 500}}),
        (PATHS[1], {"error": {"message": "boom", "code": 500}}),
        (PATHS[2], {"type": "error", "code": "server_error", "message": "boom"}),
    ],
)
async def test_a_first_frame_that_is_an_error_becomes_an_http_error(
    path: tuple[str, str], first: dict[str, Any]
) -> None:
    async with proxied(always(SSE_HEAD, event(first), END), path[0]) as (proxy, _):
        answer = await proxy.call(path[1], stream=True)
        call = await proxy.last_call()
    assert answer.status_code == 502
    assert answer.json()["error"]["message"] == "boom"
    assert (call.status, call.error_category) == (502, "upstream_error")


@pytest.mark.behaviour("MS-4")
async def test_a_late_error_ends_a_responses_stream_with_one_failed_event() -> None:
    error = {"error": {"message": "boom", "code": 429}}
    parts = [event(delta({"role": "assistant"})), event(delta({"content": "half"})), event(error), piece(DONE)]
    async with proxied(always(SSE_HEAD, *parts, END)) as (proxy, _):
        answer = await proxy.call("responses", stream=True)
        call = await proxy.last_call()
    events = events_of(answer.text)
    assert answer.status_code == 200
    assert [one["type"] for one in events if one["type"].split(".")[-1] in {"completed", "failed", "incomplete"}] == [
        "response.failed"
    ]
    assert events[-1]["response"]["error"] == {"code": "429", "message": "boom"}
    assert (call.status, call.error_category, call.error_code) == (200, "rate_limit", "429")


@pytest.mark.behaviour("MS-4")
async def test_a_late_error_of_a_chat_stream_reaches_a_chat_caller_as_its_last_event() -> None:
    error = {"error": {"message": "boom", "code": 500}}
    parts = [event(delta({"content": "half"})), event(error), piece(DONE)]
    async with proxied(always(SSE_HEAD, *parts, END)) as (proxy, _):
        answer = await proxy.call("chat_completions", stream=True)
        call = await proxy.last_call()
    assert events_of(answer.text)[-1] == error
    assert "[DONE]" not in answer.text
    assert (call.status, call.error_category) == (200, "upstream_error")


async def test_our_own_key_is_blanked_out_where_a_server_echoes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "sk-test-0123456789abcdef"
    monkeypatch.setenv("UPSTREAM_KEY_OF_A_TEST", key)
    body = b'{"error": {"message": "Incorrect API key provided: %b."}}' % key.encode()
    async with proxied(always(reply(401, body, JSON)), api_key_env="UPSTREAM_KEY_OF_A_TEST") as (proxy, upstream):
        answer = await proxy.call("responses")
        call = await proxy.last_call()
    assert upstream.asked[0].headers["authorization"] == f"Bearer {key}"
    assert answer.content == body.replace(key.encode(), b"[credential]")
    assert key not in call.model_dump_json()


async def test_headers_of_many_kilobytes_are_read() -> None:
    body = orjson.dumps(COMPLETION)
    async with proxied(always(reply(200, body, JSON, ("X-Long", "x" * 40_000)))) as (proxy, _):
        answer = await proxy.call("chat_completions")
    assert (answer.status_code, answer.content) == (200, body)
    assert "x-long" not in answer.headers


async def test_the_upstream_is_asked_for_plain_bytes() -> None:
    async with proxied(always(json_body(COMPLETION))) as (proxy, upstream):
        await proxy.call("responses")
    assert upstream.asked[0].headers["accept-encoding"] == "identity"


@pytest.mark.parametrize(("status", "known"), [(400, True), (500, False)])
async def test_the_capture_knows_a_full_context_window_by_any_servers_words(status: int, known: bool) -> None:
    told = {"message": "This model's maximum context length is 9 tokens.", "type": "BadRequestError", "code": 400}
    async with proxied(always(json_body({"error": told}, status))) as (proxy, _):
        answer = await proxy.call("responses")
        call = await proxy.last_call()
    assert (answer.status_code, answer.json()) == (status, {"error": told})
    assert call.error_code == ("context_length_exceeded" if known else "400")
