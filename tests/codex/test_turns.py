"""Whole turns of the real CLI: text, reasoning, and the tools of its own."""

import json
from typing import Any

import pytest

from tests.codex.chat import calls, reasoning_parts, says, shell, tail, text_parts
from tests.codex.cli import Task
from tests.codex.rig import CODE_MODE_MODEL, FREEFORM_MODEL, UNKNOWN_MODEL, Rig
from tests.model_proxy.wire import SSE_HEAD, always, delta, event

pytestmark = pytest.mark.codex

RENAMING_HEAD = SSE_HEAD.replace(b"\r\n\r\n", b"\r\nopenai-model: another-model\r\n\r\n")


def _answer_of(messages: list[dict[str, Any]], at: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The assistant message at `at`, and the tool outputs behind it."""
    outputs = [message for message in messages[at + 1 :] if message["role"] == "tool"]
    assert messages[at]["role"] == "assistant"
    return messages[at], outputs


@pytest.mark.behaviour("MS-11", "MS-18", "CX-27")
async def test_a_plain_answer_is_told_and_counted(codex: Rig) -> None:
    parts = [event(delta(part)) for part in text_parts("Hello there.")]
    run = (await codex.run(always(RENAMING_HEAD, *parts, tail("stop")), task=Task(prompt="Greet me."))).completed()
    assert run.printed.messages == ["Hello there."]
    (asked,), (call,) = run.asked, run.calls
    assert [message["role"] for message in asked["messages"]] == ["system", "user", "user"]
    assert asked["messages"][-1]["content"] == "Greet me."
    assert (asked["model"], asked["stream"], asked["tool_choice"]) == (UNKNOWN_MODEL, True, "auto")
    assert {"exec_command", "multi_agent_v1__spawn_agent"} <= {tool["function"]["name"] for tool in asked["tools"]}
    assert (call.phase, call.dialect, call.upstream_status, call.attempts) == ("agent", "responses", 200, 1)
    assert {"client_metadata", "include", "prompt_cache_key", "store", "tools.web_search"} <= set(call.dropped_fields)
    assert run.printed.usage["cached_input_tokens"] == 600


@pytest.mark.behaviour("MS-12")
async def test_a_shell_call_is_run_and_its_output_reaches_the_model(codex: Rig) -> None:
    command = "printf 'one\\ntwo\\n' > made.txt; cat made.txt; exit 3"
    run = (await codex.run(calls(shell(command)), says("Done."))).completed()
    assert (run.work / "made.txt").read_text() == "one\ntwo\n"
    (executed,) = run.printed.items("command_execution")
    assert (executed["aggregated_output"], executed["exit_code"]) == ("one\ntwo\n", 3)
    answer, (output,) = _answer_of(run.asked[1]["messages"], -2)
    assert answer["tool_calls"][0]["function"] == {
        "name": "exec_command",
        "arguments": f'{{"cmd":{json.dumps(command)}}}',
    }
    assert output["tool_call_id"] == answer["tool_calls"][0]["id"] == run.calls[0].call_ids[0]
    assert "exited with code 3" in output["content"]
    assert output["content"].endswith("one\ntwo\n")


@pytest.mark.behaviour("MS-9", "MS-12")
async def test_reasoning_comes_back_with_the_call_that_it_led_to(codex: Rig) -> None:
    thought = "The file has to be listed first.\nThen I answer."
    run = (await codex.run(calls(shell("ls"), before=reasoning_parts(thought)), says("Empty."))).completed()
    answer, _ = _answer_of(run.asked[1]["messages"], -2)
    assert answer["reasoning"] == thought
    assert answer["content"] is None
    assert len(answer["tool_calls"]) == 1


@pytest.mark.behaviour("MS-9", "MS-12")
async def test_text_beside_a_call_stays_in_the_same_answer(codex: Rig) -> None:
    before = [*reasoning_parts("Hm."), *text_parts("I look first.")]
    run = (await codex.run(calls(shell("ls"), before=before), says("Empty."))).completed()
    assert run.printed.messages == ["I look first.", "Empty."]
    answer, _ = _answer_of(run.asked[1]["messages"], -2)
    assert (answer["reasoning"], answer["content"], len(answer["tool_calls"])) == ("Hm.", "I look first.", 1)


@pytest.mark.behaviour("MS-11", "MS-12")
@pytest.mark.parametrize("model", [UNKNOWN_MODEL, FREEFORM_MODEL])
async def test_parallel_calls_are_all_run_and_answered_in_order(codex: Rig, model: str) -> None:
    commands = [
        "sleep 0.3; echo one > 1.txt; cat 1.txt",
        "echo two > 2.txt; cat 2.txt",
        "echo three > 3.txt; cat 3.txt",
    ]
    run = (await codex.run(calls(*map(shell, commands)), says("Done."), model=model)).completed()
    assert [(run.work / f"{n}.txt").read_text() for n in (1, 2, 3)] == ["one\n", "two\n", "three\n"]
    answer, outputs = _answer_of(run.asked[1]["messages"], -4)
    assert [output["tool_call_id"] for output in outputs] == [call["id"] for call in answer["tool_calls"]]
    assert [output["content"].split("\n")[-2] for output in outputs] == ["one", "two", "three"]
    # The old version does not trust a model that it does not know with them.
    assert run.asked[0]["parallel_tool_calls"] is ((codex.version, model) != ("0.144.4", UNKNOWN_MODEL))


@pytest.mark.behaviour("MS-11", "MS-12")
async def test_a_patch_in_raw_text_is_applied(codex: Rig) -> None:
    lines = ['say "hi" \\ \\n \\u0041', "Zeile\u2028 ü 😀\t|"]
    added = "".join(f"+{line}\n" for line in lines)
    patch = f"*** Begin Patch\n*** Add File: notes/new.txt\n{added}*** End Patch\n"
    escaped = json.dumps({"input": patch})
    run = (await codex.run(calls(("apply_patch", escaped)), says("Patched."), model=FREEFORM_MODEL)).completed()
    assert (run.work / "notes" / "new.txt").read_text() == "".join(f"{line}\n" for line in lines)
    (change,) = run.printed.items("file_change")
    assert change["status"] == "completed"
    (declared,) = [tool for tool in run.asked[0]["tools"] if tool["function"]["name"] == "apply_patch"]
    assert declared["function"]["parameters"]["required"] == ["input"]
    assert "begin_patch" in declared["function"]["parameters"]["properties"]["input"]["description"]
    answer, (output,) = _answer_of(run.asked[1]["messages"], -2)
    assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == {"input": patch}
    assert "A notes/new.txt" in output["content"]


async def test_a_patch_that_does_not_fit_is_told_to_the_model(codex: Rig) -> None:
    patch = "*** Begin Patch\n*** Update File: none.txt\n@@\n-a\n+b\n*** End Patch\n"
    run = await codex.run(calls(("apply_patch", {"input": patch})), says("No such file."), model=FREEFORM_MODEL)
    # The CLI logs this one on standard error.
    run.completed(recovered=True)
    assert "none.txt" in run.asked[1]["messages"][-1]["content"]
    assert run.printed.messages == ["No such file."]


async def test_a_call_of_an_unknown_tool_is_told_to_the_model(codex: Rig) -> None:
    run = (await codex.run(calls(("no_such_tool", {})), says("I see."))).completed(recovered=True)
    assert run.asked[1]["messages"][-1]["content"] == "unsupported call: no_such_tool"


async def test_arguments_that_are_no_json_are_told_to_the_model(codex: Rig) -> None:
    run = (await codex.run(calls(("exec_command", '{"cmd": "ls')), says("I see."))).completed(recovered=True)
    answer, (output,) = _answer_of(run.asked[1]["messages"], -2)
    assert answer["tool_calls"][0]["function"]["arguments"] == '{"cmd": "ls'
    assert "parse" in output["content"]


async def test_a_full_context_is_compacted_through_the_proxy(codex: Rig) -> None:
    task = Task(settings={"model_auto_compact_token_limit": 500})
    run = (await codex.run(calls(shell("echo one")), says("So far: one."), says("Done."), task=task)).completed()
    assert run.printed.messages == ["Done."]
    assert [bool(asked.get("tools")) for asked in run.asked] == [True, False, True]
    assert "So far: one." in run.asked[2]["messages"][-1]["content"]


@pytest.mark.behaviour("MS-11", "MS-12")
async def test_a_script_of_code_mode_is_run_with_its_tools_declared_among_the_input(codex: Rig) -> None:
    script = 'const done = await tools.exec_command({cmd: "echo one > made.txt; cat made.txt"});\ntext(done.output);'
    name = "exec" if codex.version == "0.144.4" else "functions__exec"
    run = (await codex.run(calls((name, {"input": script})), says("Done."), model=CODE_MODE_MODEL)).completed()
    assert (run.work / "made.txt").read_text() == "one\n"
    assert run.calls[0].request is not None
    assert "tools" not in run.calls[0].request
    assert name in {tool["function"]["name"] for tool in run.asked[0]["tools"]}
    answer, (output,) = _answer_of(run.asked[1]["messages"], -2)
    assert answer["tool_calls"][0]["function"] == {
        "name": name,
        "arguments": json.dumps({"input": script}, separators=(",", ":")),
    }
    assert output["content"].endswith("one\n")
