"""Callers that speak the upstream's own dialect: what is changed on the way, and what is not."""

from typing import Any

import orjson
import pytest

from tests.model_proxy.wire import (
    COMPLETION,
    DONE,
    END,
    KEY,
    RESPONSE,
    SSE_HEAD,
    always,
    delta,
    event,
    json_body,
    path_of,
    piece,
    proxied,
    reply,
)

ODD = b'{"model":"policy",  "input": "go", "new_field": [1e3, 1.0, null], "stream": false}'


@pytest.mark.behaviour("MS-1")
async def test_a_request_in_which_nothing_changes_keeps_its_bytes() -> None:
    body = orjson.dumps(RESPONSE, option=orjson.OPT_INDENT_2)
    head = ("Content-Type", "application/json; charset=utf-8")
    async with proxied(always(reply(200, body, head, ("X-Request-Id", "r1"))), "responses", model="policy") as (
        proxy,
        upstream,
    ):
        answer = await proxy.http.post(path_of("responses"), content=ODD)
    assert upstream.asked[0].body == ODD
    assert upstream.asked[0].path == "/v1/responses"
    assert (answer.content, answer.headers["content-type"], answer.headers["x-request-id"]) == (body, head[1], "r1")


async def test_only_the_models_name_changes() -> None:
    async with proxied(always(json_body(RESPONSE)), "responses") as (proxy, upstream):
        await proxy.http.post(path_of("responses"), content=ODD)
    assert upstream.asked[0].json == {**orjson.loads(ODD), "model": "up"}


@pytest.mark.behaviour("MS-16")
async def test_defaults_fill_and_overrides_win() -> None:
    model: dict[str, Any] = {
        "defaults": {"temperature": 0.1, "max_tokens": 50, "chat_template_kwargs": {"a": 1, "b": 1}},
        "overrides": {"top_p": 0.9, "seed": None, "chat_template_kwargs": {"c": 3}},
    }
    async with proxied(always(json_body(COMPLETION)), **model) as (proxy, upstream):
        await proxy.call("chat_completions", temperature=None, top_p=0.2, seed=4, chat_template_kwargs={"b": 2})
        await proxy.call("chat_completions", temperature=1.5, max_completion_tokens=7)
        calls = (await proxy.capture()).calls
    first, second = (asked.json for asked in upstream.asked)
    assert (first["temperature"], first["top_p"], first["max_tokens"]) == (0.1, 0.9, 50)
    assert first["chat_template_kwargs"] == {"a": 1, "b": 2, "c": 3}
    assert "seed" not in first
    assert (second["temperature"], second["max_completion_tokens"]) == (1.5, 7)
    assert "max_tokens" not in second
    assert calls[0].effective["temperature"] == 0.1
    assert calls[0].request is not None
    assert calls[0].request["temperature"] is None


@pytest.mark.parametrize(
    ("kind", "dialect", "name"),
    [("responses", "responses", "max_output_tokens"), ("chat_completions",) * 2 + ("max_tokens",)],
)
async def test_an_override_of_the_output_limit_wins_under_the_dialects_name(kind: str, dialect: str, name: str) -> None:
    whole = RESPONSE if kind == "responses" else COMPLETION
    async with proxied(always(json_body(whole)), kind, overrides={"max_tokens": 5}) as (proxy, upstream):
        await proxy.call(dialect, max_completion_tokens=100)
    asked = upstream.asked[0].json
    assert {key: value for key, value in asked.items() if key.startswith("max_")} == {name: 5}


@pytest.mark.behaviour("MS-14")
async def test_usage_is_asked_for_the_capture_and_shown_only_to_who_asked() -> None:
    usage = event({**delta({}), "choices": [], "usage": COMPLETION["usage"]})
    parts = [event(delta({"content": "x"})), event(delta({}, "stop")), usage, piece(DONE), END]
    async with proxied(always(SSE_HEAD, *parts)) as (proxy, upstream):
        quiet = await proxy.call("chat_completions", stream=True)
        loud = await proxy.call("chat_completions", stream=True, stream_options={"include_usage": True})
        calls = (await proxy.capture()).calls
    assert [asked.json["stream_options"] for asked in upstream.asked] == [{"include_usage": True}] * 2
    assert "total_tokens" not in quiet.text
    assert "total_tokens" in loud.text
    assert [call.usage.total_tokens for call in calls if call.usage] == [9, 9]


async def test_an_upstream_that_takes_no_stream_options_gets_none() -> None:
    parts = [event(delta({}, "stop")), piece(DONE), END]
    async with proxied(always(SSE_HEAD, *parts), capabilities={"stream_usage": False}) as (proxy, upstream):
        await proxy.call("chat_completions", stream=True)
        await proxy.call("responses", stream=True)
    assert ["stream_options" in asked.json for asked in upstream.asked] == [False, False]


@pytest.mark.behaviour("MS-14")
async def test_only_true_asks_for_a_stream() -> None:
    async with proxied(always(json_body(COMPLETION))) as (proxy, _):
        answer = await proxy.http.post(
            path_of("chat_completions"), json={"messages": [{"role": "user", "content": "x"}], "stream": 1}
        )
    assert answer.headers["content-type"] == "application/json"


async def test_a_chat_caller_before_a_responses_upstream_is_told_what_is_possible() -> None:
    async with proxied(always(json_body(RESPONSE)), "responses") as (proxy, upstream):
        answer = await proxy.call("chat_completions")
        call = await proxy.last_call()
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_dialect")
    assert "/v1/responses" in answer.json()["error"]["message"]
    assert (upstream.asked, call.status, call.error_category) == ([], 400, "client_error")


async def test_a_failed_response_of_a_responses_upstream_passes_and_is_recorded() -> None:
    failed = {**RESPONSE, "status": "failed", "error": {"code": "server_error", "message": "boom"}}
    final = event({"type": "response.failed", "sequence_number": 0, "response": failed})
    async with proxied(always(json_body(failed)), "responses") as (proxy, upstream):
        whole = await proxy.call("responses")
        upstream.handler = always(SSE_HEAD, final, END)
        stream = await proxy.call("responses", stream=True)
        calls = (await proxy.capture(KEY)).calls
    assert (whole.status_code, whole.json()) == (200, failed)
    assert (
        stream.content
        == b"data: " + orjson.dumps({"type": "response.failed", "sequence_number": 0, "response": failed}) + b"\n\n"
    )
    assert [(call.response_status, call.error_category, call.error_code) for call in calls] == [
        ("failed", "upstream_error", "server_error")
    ] * 2
