"""How an upstream's errors reach the real CLI: told once, with their cause, and never as an answer."""

import asyncio

import pytest

from shared.contracts.capture import ErrorCategory
from tests.codex.chat import (
    breaks_off,
    call_parts,
    calls,
    fails_inside,
    reasoning_parts,
    refuses,
    says,
    shell,
    tail,
    text_parts,
)
from tests.codex.rig import Rig
from tests.model_proxy.wire import END, SSE_HEAD, Asked, Handler, always, delta, event

pytestmark = pytest.mark.codex

MESSAGE = "the upstream's own words"
NO_ROOM = "Codex ran out of room in the model's context window."
QUOTA = "Quota exceeded. Check your plan and billing details."
VLLM_OVERFLOW = "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens."


def _error(code: str, message: str = MESSAGE) -> dict[str, str]:
    return {"message": message, "type": "some_error", "code": code}


@pytest.mark.behaviour("MS-15", "MS-19")
@pytest.mark.parametrize(
    ("status", "headers", "category", "told"),
    [
        (400, (), ErrorCategory.CLIENT_ERROR, MESSAGE),
        (401, (), ErrorCategory.AUTH, f"unexpected status 401 Unauthorized: {MESSAGE}"),
        (403, (), ErrorCategory.AUTH, f"unexpected status 403 Forbidden: {MESSAGE}"),
        (413, (), ErrorCategory.CLIENT_ERROR, f"unexpected status 413 Payload Too Large: {MESSAGE}"),
        (429, (), ErrorCategory.RATE_LIMIT, "exceeded retry limit, last status: 429 Too Many Requests"),
        # Longer than the proxy waits in the CLI's stead.
        (429, (("Retry-After", "60"),), ErrorCategory.RATE_LIMIT, "exceeded retry limit, last status: 429"),
        (503, (("Retry-After", "60"),), ErrorCategory.UPSTREAM_ERROR, "unexpected status 503 Service Unavailable"),
        (500, (), ErrorCategory.UPSTREAM_ERROR, "currently experiencing high demand"),
    ],
)
async def test_an_error_status_is_passed_on_and_recorded(
    codex: Rig, status: int, headers: tuple[tuple[str, str], ...], category: ErrorCategory, told: str
) -> None:
    run = (await codex.run(refuses(status, _error("some_code"), *headers))).failed()
    assert told in run.printed.failure
    (call,) = run.calls
    assert (call.status, call.upstream_status, call.attempts) == (status, status, 1)
    assert (call.error_category, call.error_code) == (category, "some_code")
    assert MESSAGE in (call.error_excerpt or "")


@pytest.mark.parametrize("status", [429, 503])
async def test_what_the_upstream_asks_to_be_repeated_is_repeated_in_the_clis_stead(codex: Rig, status: int) -> None:
    run = await codex.run(refuses(status, _error("some_code"), ("Retry-After", "1")), says("Now."))
    assert (run.printed.exit_code, run.printed.errors, run.printed.messages) == (0, [], ["Now."])
    assert run.asked[0] == run.asked[1]
    (call,) = run.calls
    assert (call.status, call.attempts, call.error_category) == (200, 2, None)


@pytest.mark.behaviour("MS-15")
@pytest.mark.parametrize(
    "answer",
    [
        refuses(400, _error("context_length_exceeded")),
        always(SSE_HEAD, event({"error": _error("context_length_exceeded")}), END),
        refuses(400, {"message": VLLM_OVERFLOW, "type": "BadRequestError", "code": 400}),
    ],
    ids=["by its code", "as the first event", "in vLLM's words"],
)
async def test_a_full_context_window_is_the_upstreams_400(codex: Rig, answer: Handler) -> None:
    run = (await codex.run(answer)).failed()
    assert any(told in run.printed.failure for told in (NO_ROOM, MESSAGE, VLLM_OVERFLOW))
    (call,) = run.calls
    assert (call.status, call.error_code) == (400, "context_length_exceeded")


@pytest.mark.behaviour("MS-19")
@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("context_length_exceeded", NO_ROOM),
        ("insufficient_quota", QUOTA),
        ("invalid_prompt", MESSAGE),
        ("server_is_overloaded", "Selected model is at capacity."),
        ("rate_limit_exceeded", MESSAGE),
        ("server_error", f"stream disconnected before completion: {MESSAGE}"),
    ],
)
async def test_an_error_inside_a_stream_keeps_its_code(codex: Rig, code: str, told: str) -> None:
    run = (await codex.run(fails_inside(_error(code)))).failed()
    assert told in run.printed.failure
    (call,) = run.calls
    assert (call.status, call.response_status, call.error_code) == (200, "failed", code)
    assert call.error_category not in (None, ErrorCategory.INCOMPLETE)


@pytest.mark.parametrize(
    "first",
    [
        fails_inside(_error("server_error")),
        fails_inside(_error("rate_limit_exceeded", "Rate limit reached. Please try again in 1s.")),
        breaks_off(*reasoning_parts("I think"), *text_parts("half a sent")),
    ],
    ids=["server error", "rate limit", "cut"],
)
async def test_the_cli_asks_again_after_a_failure_inside_a_stream(codex: Rig, first: Handler) -> None:
    run = (await codex.run(first, says("Now."), retries=True)).completed(recovered=True)
    assert run.printed.messages == ["Now."]
    assert [call.error_category is None for call in run.calls] == [False, True]
    assert run.asked[0] == run.asked[1]


@pytest.mark.behaviour("MS-19")
async def test_a_stream_that_is_cut_is_a_failure_and_no_answer(codex: Rig) -> None:
    run = (await codex.run(breaks_off(*text_parts("half a sent")))).failed()
    assert run.printed.failure.startswith("stream disconnected before completion")
    assert run.printed.messages == []
    (call,) = run.calls
    assert (call.status, call.error_category) == (200, ErrorCategory.TRUNCATED_STREAM)


async def test_a_call_in_a_stream_that_is_cut_is_not_run(codex: Rig) -> None:
    name, arguments = shell("echo once >> ran.txt")
    cut = breaks_off(*call_parts(0, name, arguments))
    run = (await codex.run(cut, calls((name, arguments)), says("Done."), retries=True)).completed(recovered=True)
    assert (run.work / "ran.txt").read_text() == "once\n"
    assert [call.error_category for call in run.calls] == [ErrorCategory.TRUNCATED_STREAM, None, None]


@pytest.mark.behaviour("MS-10", "MS-19")
@pytest.mark.parametrize(("finish", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")])
async def test_an_answer_that_was_ended_early_is_incomplete(codex: Rig, finish: str, reason: str) -> None:
    run = (await codex.run(says("half a sentence", finish=finish))).failed()
    assert run.printed.failure.endswith(f"Incomplete response returned, reason: {reason}")
    assert run.printed.messages == ["half a sentence"]
    (call,) = run.calls
    assert (call.response_status, call.error_category, call.status) == ("incomplete", ErrorCategory.INCOMPLETE, 200)
    assert call.usage is not None


async def test_a_call_that_the_output_limit_cut_is_not_run(codex: Rig) -> None:
    cut = call_parts(0, "exec_command", '{"cmd":"echo ran > ran.txt"}')[:-1]
    run = (await codex.run(always(SSE_HEAD, *(event(delta(part)) for part in cut), tail("length")))).failed()
    assert not (run.work / "ran.txt").exists()


@pytest.mark.parametrize(("heartbeat_s", "completes"), [(0.2, True), (15.0, False)])
async def test_heartbeats_keep_the_cli_waiting_for_a_silent_model(
    codex: Rig, heartbeat_s: float, completes: bool
) -> None:
    async def thinks_long(asked: Asked) -> None:
        first, second = (event(delta({"content": part})) for part in ("slow", "ly"))
        await asked.write(SSE_HEAD + first)
        # The silence itself is what is tested: longer than the CLI bears once an answer has begun.
        await asyncio.sleep(2)
        await asked.write(second + tail("stop"))

    run = await codex.run(thinks_long, idle_ms=1000, heartbeat_s=heartbeat_s)
    if completes:
        assert run.completed().printed.messages == ["slowly"]
    else:
        assert "idle timeout" in run.failed().printed.failure
        assert [call.error_category for call in run.calls] == [ErrorCategory.CANCELLED]
