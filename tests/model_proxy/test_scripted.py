"""The scripted upstream: the embedded default, and a double with every fault."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from services.model_proxy.app import check
from shared.settings import LoadedSettings, Settings
from tests.model_proxy.wire import Proxy, events_of, proxy_of, settings_of

RULES = """
- match: capital of Norway
  text: It is Oslo.
  reasoning: Think.
- match: weather
  turns:
    - tool_calls: [{name: get_weather, arguments: {city: Oslo}}, {name: get_weather, arguments: {city: Bergen}}]
    - {text: It rains., usage: {prompt_tokens: 9, completion_tokens: 3, total_tokens: 12}}
- match: overloaded
  error: {status: 429, headers: {Retry-After: "7"}, body: {error: {message: slow down, code: rate}}}
- {match: plain, error: {status: 500, body: oops}}
- {match: cut, text: "one two three four five six", cut_after_chunks: 2}
- {match: short, text: late, delay_s: 0.01, finish_reason: length}
"""
TOOLS = [{"type": "function", "name": "get_weather", "parameters": {"type": "object"}}]


def _scripted(folder: Path, text: str = RULES, name: str = "script.yaml") -> LoadedSettings:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return settings_of({"upstream": "scripted", "script": str(path)})


async def _text(proxy: Proxy, prompt: str, **fields: Any) -> str:
    answer = await proxy.call("responses", input=prompt, **fields)
    assert answer.status_code == 200, answer.text
    return "".join(part["text"] for item in answer.json()["output"] for part in item["content"])


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (r"What is 17 * 23? Put the answer in \boxed{}.", r"\boxed{391}"),
        (r"Simplify \frac{6}{8}. Put the answer in \boxed{}.", r"\boxed{\frac{3}{4}}"),
        ("What is the sum of the first 100 positive integers? Box it.", r"\boxed{5000}"),
        ("Which planet is known as the Red Planet?\nA: Venus\nB: Mars", r"\boxed{B}"),
        ("Which gas do plants take up for photosynthesis?", r"\boxed{C}"),
        ("Which particle mediates the electromagnetic force?", "Answer: A"),
        ("What is the capital of France?", r"\boxed{Paris}"),
        ("Name the largest ocean on Earth.", "Pacific Ocean"),
        ("should I take an umbrella in London?", "London"),
    ],
)
async def test_the_built_in_script_answers_the_demonstration_rows(prompt: str, expected: str) -> None:
    async with proxy_of(settings_of({"upstream": "scripted"})) as proxy:
        assert expected in await _text(proxy, prompt)


async def test_the_built_in_script_refuses_what_it_has_no_answer_to() -> None:
    async with proxy_of(settings_of({"upstream": "scripted"})) as proxy:
        answer = await proxy.call("responses", input="Something else entirely")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_scripted")
    assert "PADDOCK_MODEL_BASE_URL" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
async def test_the_built_in_script_uses_the_weather_tool(stream: bool) -> None:
    asked: list[dict[str, Any]] = [{"role": "user", "content": "what's it like in sf?"}]
    async with proxy_of(settings_of({"upstream": "scripted"})) as proxy:
        answer = await proxy.call("responses", stream=stream, input=asked, tools=TOOLS)
        response = events_of(answer.text)[-1]["response"] if stream else answer.json()
        (call,) = response["output"]
        assert (call["name"], orjson.loads(call["arguments"])) == ("get_weather", {"city": "San Francisco"})
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
        answer = await proxy.call("responses", input=[*asked, call, result], tools=TOOLS)
    assert answer.json()["output"][0]["type"] == "message"


async def test_turns_follow_the_conversation_and_are_the_same_each_time(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather?"}]
    async with proxy_of(_scripted(tmp_path)) as proxy:
        first, again = [(await proxy.call("responses", input=asked, tools=TOOLS)).json() for _ in range(2)]
        calls = first["output"]
        assert [call["arguments"] for call in calls] == ['{"city":"Oslo"}', '{"city":"Bergen"}']
        assert [call["call_id"] for call in calls] == [call["call_id"] for call in again["output"]]
        assert len({call["call_id"] for call in calls}) == 2
        results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "x"} for call in calls]
        later = (await proxy.call("responses", input=[*asked, *calls, *results], tools=TOOLS)).json()
        without = await _text(proxy, "What is the weather?")
    assert later["output"][0]["content"][0]["text"] == "It rains."
    assert later["usage"]["total_tokens"] == 12
    assert without == "It rains."


async def test_a_stream_says_the_same_as_a_whole_answer(tmp_path: Path) -> None:
    async with proxy_of(_scripted(tmp_path)) as proxy:
        whole = await _text(proxy, "the capital of Norway")
        events = events_of((await proxy.call("responses", input="the capital of Norway", stream=True)).text)
    said = "".join(one["delta"] for one in events if one["type"] == "response.output_text.delta")
    assert whole == "Think." + said
    assert events[-1]["response"]["usage"]["total_tokens"] > 0


async def test_errors_are_scripted_with_status_headers_and_body(tmp_path: Path) -> None:
    async with proxy_of(_scripted(tmp_path)) as proxy:
        busy = await proxy.call("responses", input="overloaded")
        broken = await proxy.call("responses", input="plain", stream=True)
    assert (busy.status_code, busy.headers["retry-after"]) == (429, "7")
    assert busy.json() == {"error": {"message": "slow down", "code": "rate"}}
    assert (broken.status_code, broken.text, broken.headers["content-type"]) == (500, "oops", "text/plain")


async def test_an_answer_can_be_cut_off(tmp_path: Path) -> None:
    async with proxy_of(_scripted(tmp_path)) as proxy:
        stream = await proxy.call("responses", input="cut", stream=True)
        whole = await proxy.call("responses", input="cut")
    assert events_of(stream.text)[-1]["type"] == "response.failed"
    assert whole.status_code == 502


async def test_an_answer_can_be_late_and_incomplete(tmp_path: Path) -> None:
    async with proxy_of(_scripted(tmp_path)) as proxy:
        answer = (await proxy.call("responses", input="short")).json()
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


async def test_a_script_may_be_json_lines(tmp_path: Path) -> None:
    lines = "\n".join(orjson.dumps({"match": word, "text": word * 2}).decode() for word in ("ab", "cd"))
    async with proxy_of(_scripted(tmp_path, lines, "script.jsonl")) as proxy:
        assert await _text(proxy, "say cd") == "cdcd"


def _problems(model: dict[str, Any]) -> list[str]:
    loaded = LoadedSettings(Settings.model_validate({"models": {"policy": model}}), {"models.policy": "a.yaml"})
    return [str(problem) for problem in check(loaded)]


@pytest.mark.behaviour("CF-1")
def test_wrong_models_are_told_with_their_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    bad = tmp_path / "bad.yaml"
    bad.write_text("- {match: x, tekst: y}", encoding="utf-8")
    url = "http://127.0.0.1:1/v1"
    empty = tmp_path / "empty"
    empty.write_text("\n", encoding="utf-8")
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"upstream": "scriptd"}, "models.policy", "Did you mean 'scripted'?"),
        ({"upstream": "scripted", "script": str(bad)}, "models.policy", "tekst"),
        ({"upstream": "scripted", "script": "nowhere.yaml"}, "models.policy", "cannot be read"),
        ({"upstream": "scripted", "base_url": url}, "models.policy.base_url", "Extra inputs"),
        ({"upstream": "chat_completions"}, "models.policy.base_url", "Field required"),
        ({"upstream": "responses", "base_url": "127.0.0.1:1"}, "models.policy.base_url", "is no http://"),
        (
            {"upstream": "chat_completions", "base_url": f"{url}/chat/completions"},
            "models.policy.base_url",
            "already ends in /chat/completions",
        ),
        (
            {"upstream": "chat_completions", "base_url": url, "api_key_env": "NO_SUCH_KEY"},
            "models.policy.api_key_env",
            "NO_SUCH_KEY is not set",
        ),
        (
            {"upstream": "chat_completions", "base_url": url, "api_key_file": str(empty)},
            "models.policy.api_key_file",
            "is empty",
        ),
        (
            {"upstream": "scripted", "capabilities": {"reasoning_fields": 1}},
            "models.policy.capabilities.reasoning_fields",
            "Extra inputs",
        ),
    ]
    for model, key, message in cases:
        problems = _problems(model)
        assert any(f"a.yaml: {key}" in problem and message in problem for problem in problems), problems
    assert _problems({"upstream": "scripted"}) == []
