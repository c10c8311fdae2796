"""Tokens, deadlines, plug-ins, preferences, contracts: what each promises."""

import itertools
import math
import time
from typing import Any

import pytest
from starlette.datastructures import Headers

from shared.contracts.capture import Capture, of_session, summed_usage
from shared.contracts.episode import EpisodeId, EpisodeReply, TaskId
from shared.contracts.failure import Failure, FailureKind, Stage
from shared.contracts.responses import output_text
from shared.deadline import Deadline
from shared.errors import UnauthorizedError
from shared.http.prefer import Prefer, read_prefer
from shared.plugins import PluginFolder
from shared.tokens import SessionClaims, Signer, looks_like_session_token


def claims(seconds: float = 60.0) -> SessionClaims:
    return SessionClaims(key="r1", model="policy", expires_at=time.time() + seconds)


def test_a_session_token_gives_back_its_claims() -> None:
    signer, wanted = Signer("mesh", "session-token"), claims()
    token = signer.session_token(wanted)
    assert looks_like_session_token(token)
    assert Signer("mesh", "session-token").read_session_token(token) == wanted


@pytest.mark.behaviour("AG-34")
def test_a_token_of_another_mesh_purpose_or_content_is_refused() -> None:
    token = Signer("mesh", "session-token").session_token(claims())
    head, body, signature = token.split(".")
    other = Signer("mesh", "session-token").session_token(claims(30)).split(".")[1]
    forged = [
        "",
        "x",
        "pdk1..",
        f"{head}.{other}.{signature}",
        f"{head}.{body}.",
        f"{head}.{body}",
        token[:-2],
        "é.é.é",
    ]
    for refused in forged:
        with pytest.raises(UnauthorizedError):
            Signer("mesh", "session-token").read_session_token(refused)
    for signer in (Signer("other", "session-token"), Signer("mesh", "cookie")):
        with pytest.raises(UnauthorizedError):
            signer.read_session_token(token)


def test_an_expired_token_is_refused() -> None:
    signer = Signer("mesh", "session-token")
    with pytest.raises(UnauthorizedError, match="expired"):
        signer.read_session_token(signer.session_token(claims(-1)))


@pytest.mark.behaviour("AG-34")
def test_a_cookie_names_a_session_only_when_it_is_ours() -> None:
    signer = Signer("mesh", "agent-session")
    assert signer.read_cookie(signer.cookie("agent-session-1")) == "agent-session-1"
    for forged in ("agent-session-1", "agent-session-1~", "", "~", signer.cookie("a").replace("a~", "b~")):
        assert signer.read_cookie(forged) is None
    assert Signer("other", "agent-session").read_cookie(signer.cookie("x")) is None


def test_a_deadline_bounds_what_stands_below_it() -> None:
    assert Deadline.after(None).within(5.0) == 5.0
    assert not Deadline.after(None).passed
    soon = Deadline.after(0.5)
    assert 0 < soon.within(5.0) <= 0.5
    assert Deadline.after(-1.0).within(5.0) == 0.0
    assert Deadline.after(-1.0).passed


@pytest.mark.parametrize(
    ("value", "expected", "longest"),
    [
        ("", Prefer(False, None), math.inf),
        ("respond-async", Prefer(True, None), 0.0),
        ("wait=10", Prefer(False, 10.0), 10.0),
        ("respond-async, wait=30", Prefer(True, 30.0), 30.0),
        ("Wait=5; x, Respond-Async", Prefer(True, 5.0), 5.0),
        ("await=5, no-respond-asynchronous", Prefer(False, None), math.inf),
    ],
)
def test_preferences_are_read_as_rfc_7240_writes_them(value: str, expected: Prefer, longest: float) -> None:
    read = read_prefer(Headers({"prefer": value}))
    assert read == expected
    assert read.longest_wait_s == longest


def test_an_unknown_plugin_is_answered_with_the_known_ones() -> None:
    folder = PluginFolder("services.resources.verifiers", "verifier")
    assert {"math", "mcqa", "string_match", "tool_calls"} <= set(folder.names())
    with pytest.raises(LookupError, match=r"no verifier 'mat'\. Did you mean 'math'\?"):
        folder.module("mat")
    problems = folder.check("math", {"unknown": 1}, source="a.yaml", key="resources.m")
    assert [(problem.source, problem.key) for problem in problems] == [("a.yaml", "resources.m.unknown")]
    assert folder.check("math", {}, source="a.yaml", key="resources.m") == []


@pytest.mark.behaviour("ES-39")
def test_a_reply_has_exactly_one_of_result_and_failure() -> None:
    ids: dict[str, Any] = {"episode_id": EpisodeId(rollout_id="r"), "task_id": TaskId(taskset="s", task_id="t")}
    failure = Failure(failure_reason="x" * 5000, terminal=True, failure_kind=FailureKind.BAD_ROW, stage=Stage.SEED)
    assert len(failure.failure_reason) == 2000
    assert EpisodeReply(**ids, result={"reward": 1}).failure is None
    for both in ({}, {"result": {}, "failure": failure}):
        with pytest.raises(ValueError, match="exactly one"):
            EpisodeReply(**ids, **both)


@pytest.mark.behaviour("ES-42")
def test_the_kind_of_a_failure_does_not_decide_about_a_retry() -> None:
    for kind, terminal in itertools.product(FailureKind, (True, False)):
        failure = Failure(failure_reason="", terminal=terminal, failure_kind=kind, stage=Stage.AGENT)
        assert failure.terminal is terminal


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ([], ""),
        ([{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}], "a"),
        ([{"role": "assistant", "content": "b"}], "b"),
        ([{"type": "message", "role": "user", "content": "no"}, {"type": "reasoning"}], ""),
        (
            [
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "first"}]},
                {"type": "function_call", "name": "f"},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "la"},
                 {"type": "refusal", "refusal": "x"}, {"type": "output_text", "text": "st"}]},
                {"type": "reasoning", "summary": []},
            ],
            "last",
        ),
    ],
)  # fmt: skip
def test_the_answer_is_the_text_of_the_last_assistant_message(output: list[dict[str, Any]], text: str) -> None:
    assert output_text({"output": output}) == text


def usage(given: int, produced: int, cached: int | None = None) -> dict[str, Any]:
    return {
        "input_tokens": given,
        "output_tokens": produced,
        "total_tokens": given + produced,
        "input_tokens_details": {"cached_tokens": cached},
    }


def capture(*calls: dict[str, Any], damaged: int = 0) -> Capture:
    common = {"call_id": "c", "dialect": "responses", "model": "m", "stream": False, "started_at": 0, "ended_at": 1}
    return Capture.model_validate(
        {
            "key": "r",
            "sealed": True,
            "damaged": damaged,
            "calls": [{"phase": "agent", **common, **call} for call in calls],
        }
    )


@pytest.mark.behaviour("ES-52", "ME-3")
def test_usage_is_summed_over_the_agents_calls_and_null_when_one_is_not_known() -> None:
    total = summed_usage(capture({"usage": usage(10, 5, 2)}, {"usage": usage(10, 3, 4)}))
    assert total is not None
    assert (total.input_tokens, total.output_tokens, total.total_tokens) == (20, 8, 28)
    assert total.input_tokens_details is not None
    assert total.input_tokens_details.cached_tokens == 6
    assert total.output_tokens_details is not None
    assert total.output_tokens_details.reasoning_tokens is None
    judged = summed_usage(capture({"usage": usage(1, 1)}, {"usage": usage(9, 9), "phase": "verify"}))
    assert judged is not None
    assert judged.total_tokens == 2
    assert summed_usage(capture({"usage": usage(1, 1)}, {"usage": None})) is None
    assert summed_usage(capture({"usage": usage(1, 1)}, damaged=1)) is None
    assert summed_usage(capture()) is None


def test_calls_that_an_earlier_session_left_under_the_same_key_are_not_counted() -> None:
    whole = capture(
        {"usage": usage(10, 5), "session": "first"},
        {"usage": usage(10, 3), "session": "second"},
        {"usage": usage(9, 9), "phase": "verify"},
    )
    total = summed_usage(of_session(whole, "second"))
    assert total is not None
    assert total.total_tokens == 13
    assert len(of_session(whole, "second").calls) == 2
