"""What the real CLI carries to its model and back: pictures, schemas, long output, odd characters."""

import json

import pytest

from tests.codex.chat import calls, says, shell, streamed
from tests.codex.cli import Task
from tests.codex.rig import PICTURE, PICTURE_URL, Rig

pytestmark = pytest.mark.codex

ODD = "line\u2028 paragraph\u2029 😀 👩‍👩‍👧 e\u0301 \ufeff \\ud83d \\u0000 \\n \"quoted\" 'single' \x7f end"
"""Line separators that JSON leaves as they are, characters beyond 16 bits, and text that looks like escapes."""
MEGABYTE = 2**20


@pytest.mark.behaviour("MS-11")
async def test_an_image_reaches_the_model_as_it_is(codex: Rig) -> None:
    picture = codex.work / "picture.png"
    picture.write_bytes(PICTURE)
    run = (await codex.run(says("A dot."), task=Task(arguments=["--image", str(picture)]))).completed()
    parts = run.asked[0]["messages"][-1]["content"]
    (image,) = [part["image_url"] for part in parts if part["type"] == "image_url"]
    assert image["url"] == PICTURE_URL
    assert parts[-1] == {"type": "text", "text": "Do the task."}


async def test_an_image_that_the_model_asks_for_follows_in_a_user_message(codex: Rig) -> None:
    (codex.work / "picture.png").write_bytes(PICTURE)
    asking = calls(("view_image", {"path": "picture.png"}))
    run = (await codex.run(asking, says("A dot."))).completed()
    _, output, image = run.asked[1]["messages"][-3:]
    assert (output["role"], image["role"]) == ("tool", "user")
    assert [part["image_url"]["url"] for part in image["content"] if part["type"] == "image_url"] == [PICTURE_URL]


@pytest.mark.behaviour("MS-8")
async def test_an_output_schema_reaches_the_model(codex: Rig) -> None:
    schema = {
        "type": "object",
        "properties": {"answer": {"type": "string"}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    file = codex.work / "schema.json"
    file.write_text(json.dumps(schema), encoding="utf-8")
    run = (await codex.run(says('{"answer":"x"}'), task=Task(arguments=["--output-schema", str(file)]))).completed()
    wanted = run.asked[0]["response_format"]
    assert (wanted["type"], wanted["json_schema"]["schema"], wanted["json_schema"]["strict"]) == (
        "json_schema",
        schema,
        True,
    )
    assert run.printed.messages == ['{"answer":"x"}']


async def test_an_output_of_300_000_lines_is_borne(codex: Rig) -> None:
    run = (await codex.run(calls(shell("seq 300000")), says("Long."))).completed()
    (executed,) = run.printed.items("command_execution")
    assert executed["aggregated_output"].endswith("299999\n300000\n")
    assert len(executed["aggregated_output"]) > MEGABYTE / 2
    # The CLI shortens it for its model, so the call is recorded with both bodies.
    assert run.asked[1]["messages"][-1]["content"].endswith("299999\n300000\n")
    assert [call.left_out for call in run.calls] == [(), ()]


@pytest.mark.behaviour("MS-18")
async def test_a_long_answer_arrives_whole_and_is_borne_by_the_capture(codex: Rig) -> None:
    lines = [f"{number}\n" for number in range(60_000)]
    parts = [{"content": "".join(lines[at : at + 500])} for at in range(0, len(lines), 500)]
    text = "".join(lines)
    run = (await codex.run(streamed(*parts, finish="stop"))).completed()
    assert run.printed.messages == [text]
    assert run.calls[0].response is not None
    assert run.calls[0].response["output"][0]["content"][0]["text"] == text


@pytest.mark.behaviour("MS-12")
async def test_odd_characters_survive_in_both_directions(codex: Rig) -> None:
    # Escaped as Python's servers do, so that the pieces of the stream cut escapes, too.
    arguments = json.dumps({"cmd": f"cat > odd.txt <<'END'\n{ODD}\nEND\ncat odd.txt"})
    run = await codex.run(calls(("exec_command", arguments)), says(ODD), task=Task(prompt=ODD))
    run.completed()
    assert (run.work / "odd.txt").read_text() == f"{ODD}\n"
    assert run.printed.messages == [ODD]
    assert run.asked[0]["messages"][-1]["content"] == ODD
    answer, output = run.asked[1]["messages"][-2:]
    assert answer["tool_calls"][0]["function"]["arguments"] == arguments
    assert output["content"].endswith(f"{ODD}\n")


async def test_output_that_is_no_text_is_borne(codex: Rig) -> None:
    run = (
        await codex.run(calls(shell(r"printf '\377\376 \355\240\200 \000 \033[31m \303\251\n'")), says("Odd."))
    ).completed()
    assert "é" in run.asked[1]["messages"][-1]["content"]
