"""The Open Responses compliance suite, run as its own program against the proxy before a Chat Completions server."""

import asyncio
import sys
from typing import Any

import orjson

from shared.settings import LoadedSettings, Settings
from tests.model_proxy.wire import (
    COMPLETION,
    DONE,
    END,
    SSE_HEAD,
    Asked,
    delta,
    event,
    json_body,
    piece,
    proxy_of,
    raw_upstream,
)

SUITE_S = 60.0
MESH = "mesh-token-of-these-tests"
# Reasoning is only asked of models whose names the suite takes for such.
MODEL = "gpt-5-served"
USAGE = {
    **COMPLETION["usage"],
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 1},
}


async def _serve(asked: Asked) -> None:
    """A model that calls the first tool that it is given, and else talks.

    It streams no reasoning: for those events the suite knows other names than OpenAI's, which clients follow.
    """
    request = asked.json
    message: dict[str, Any] = {"content": "Red."} if request.get("stream") else {"reasoning": "Hm.", "content": "Red."}
    finish = "stop"
    if request.get("tools"):
        function = {"name": request["tools"][0]["function"]["name"], "arguments": '{"location":"Paris"}'}
        message = {"content": None, "tool_calls": [{"index": 0, "id": "call_1", "function": function}]}
        finish = "tool_calls"
    if not request.get("stream"):
        choice = {"index": 0, "message": message, "finish_reason": finish}
        await asked.write(json_body({**COMPLETION, "choices": [choice], "usage": USAGE}))
        return
    usage = {**delta({}), "choices": [], "usage": USAGE}
    await asked.write(SSE_HEAD + event(delta(message)) + event(delta({}, finish)) + event(usage) + piece(DONE) + END)


async def _suite(base_url: str) -> dict[str, Any]:
    arguments = ["--json", "--base-url", base_url, "--api-key", MESH, "--model", MODEL]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from llm_comply.cli import main; raise SystemExit(main())", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        env={"NO_PROXY": "*"},
    )
    try:
        async with asyncio.timeout(SUITE_S):
            printed, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    result: dict[str, Any] = orjson.loads(printed)
    return result


async def test_the_compliance_suite_of_open_responses_passes() -> None:
    async with raw_upstream(_serve) as upstream:
        served = {"upstream": "chat_completions", "base_url": upstream.url, "model": MODEL}
        # Two models, so that leaving the name out is the error that the suite expects.
        settings = Settings.model_validate(
            {"models": {MODEL: served, "other": served}, "security": {"mesh_token": MESH}}
        )
        async with proxy_of(LoadedSettings(settings, {})) as proxy:
            result = await _suite(f"{proxy.url}/rollouts/episode-1/v1")
    problems = {test["id"]: test.get("errors") for test in result["results"] if test["status"] != "passed"}
    assert problems == {}
    assert result["summary"] == {"total": 13, "passed": 13, "failed": 0, "skipped": 0}
