"""A capture played back gives ids, arguments, envelopes and order as they were recorded."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from services.model_proxy.upstreams.replay import load_calls
from tests.model_proxy.wire import COMPLETION, KEY, Proxy, always, json_body, proxied, proxy_of, settings_of

CALL = {"id": "call_A", "type": "function", "function": {"name": "add", "arguments": '{"a": 1,  "b":2}'}}
TOOLS = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]
QUESTION = {"role": "user", "content": "1 + 2?"}
SUM = {"type": "function_call_output", "call_id": "call_A", "output": "3"}


async def recorded(folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """Two turns through a real proxy: a tool call, then an answer; the exported capture and both responses."""
    choice = {"index": 0, "message": {"role": "assistant", "tool_calls": [CALL]}, "finish_reason": "tool_calls"}
    async with proxied(always(json_body({**COMPLETION, "choices": [choice]}))) as (proxy, _):
        first = (await proxy.call("responses", input=[QUESTION], tools=TOOLS)).json()
        second = (await proxy.call("responses", input=[QUESTION, *first["output"], SUM], tools=TOOLS)).json()
        await proxy.call("responses", input=[])
        path = folder / "capture.jsonl"
        path.write_bytes((await proxy.http.get(f"/captures/{KEY}?format=jsonl")).content)
    return path, [first, second]


def replaying(path: Path) -> Any:
    return proxy_of(settings_of({"upstream": "replay", "capture": str(path)}))


async def play(proxy: Proxy, first: dict[str, Any]) -> list[dict[str, Any]]:
    one = (await proxy.call("responses", input=[QUESTION], tools=TOOLS)).json()
    two = (await proxy.call("responses", input=[QUESTION, *first["output"], SUM], tools=TOOLS)).json()
    return [one, two]


@pytest.mark.behaviour("MS-12")
async def test_two_turns_are_played_back_as_they_were_recorded(tmp_path: Path) -> None:
    path, responses = await recorded(tmp_path)
    async with replaying(path) as proxy:
        assert await play(proxy, responses[0]) == responses
        assert await play(proxy, responses[0]) == responses
        calls = (await proxy.capture()).calls
    assert [call.response_id for call in calls] == [response["id"] for response in responses] * 2
    assert calls[0].call_ids == ("call_A",)
    assert responses[0]["output"][0]["arguments"] == CALL["function"]["arguments"]  # type: ignore[index]


async def test_a_streaming_caller_gets_the_same_items(tmp_path: Path) -> None:
    path, responses = await recorded(tmp_path)
    async with replaying(path) as proxy:
        answer = await proxy.call("responses", stream=True, input=[QUESTION], tools=TOOLS)
    events = [orjson.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == responses[0]["output"]
    assert events[-1] == {"type": "response.completed", "response": responses[0], "sequence_number": len(events) - 1}


async def test_a_request_that_was_never_recorded_is_refused(tmp_path: Path) -> None:
    path, _ = await recorded(tmp_path)
    async with replaying(path) as proxy:
        answer = await proxy.call("responses", input="something else")
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "not_recorded"


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot be read"), (b"{}\n", "line 1"), (b"", "holds no call"), (b"no json\n", "line 1")],
)
def test_a_file_that_cannot_be_played_back_is_told_at_once(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "capture.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        load_calls(path)
