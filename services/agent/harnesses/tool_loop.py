"""The plain loop: ask the model, run the tools it calls, give it their outputs, until it answers or a limit is met.

Tools run one after the other, in the model's order, so that a run with stateful tools can be repeated.
Only tools that were lent are run; a call of any other gets an error as its output. A forced tool choice
holds until a tool was called, else such a run could never end.
"""

import time
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from services.agent.hosting import HarnessContext
from services.agent.model import Model, end_of_error, end_of_response
from services.agent.tools import ToolBox, opened_tools
from shared.contracts.agent import ToolAccess
from shared.errors import BadRowError, FieldProblem, ServiceError
from shared.http.client import HttpClient
from shared.ports.harness import Activation, HarnessEnd, Progress
from shared.settings import Seconds

# The loop waits for whole answers and keeps the conversation itself.
_NOT_FOR_THE_MODEL: Final = frozenset({"stream", "stream_options", "background"})


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    max_steps: Annotated[int, Field(gt=0)] = 64
    """Model calls in one run; then the response is incomplete with reason `max_steps`."""
    max_output_tokens_total: Annotated[int, Field(gt=0)] | None = None
    """Output tokens over all calls of one run; then incomplete with reason `max_output_tokens`."""
    tool_timeout_s: Seconds = 60.0
    """Bound of one tool call."""
    model_timeout_s: Seconds = 600.0
    """Bound of one model call."""
    model_context_codes: tuple[str, ...] = ("context_length_exceeded",)
    """Error codes by which the model says that its context window is full."""
    tool_accesses: tuple[ToolAccess, ...] = ()
    """Tools of every session of this agent; what an episode lends under the same name takes their place."""


class ToolLoop:
    def __init__(self, options: Options, context: HarnessContext) -> None:
        self.model = context.entry.model
        self._options = options
        self._context = context
        self._foreign = HttpClient()

    def validate(self, request: dict[str, Any]) -> None:
        problems = [
            FieldProblem((name,), f"the tool loop cannot serve it: {why}", "unsupported")
            for name, why in (
                ("background", "it waits for the answer itself"),
                ("conversation", "it sends the whole conversation with each call"),
            )
            if request.get(name)
        ]
        if problems:
            raise BadRowError.of(problems)

    async def run(self, activation: Activation) -> HarnessEnd:
        options, progress = self._options, activation.progress
        by_name = {access.name: access for access in (*options.tool_accesses, *activation.tools)}
        async with opened_tools(
            list(by_name.values()),
            self._context,
            self._foreign,
            timeout_s=options.tool_timeout_s,
            set_cookies=progress.resources_cookies,
        ) as tools:
            progress.tools[:] = _offered(activation.request, tools)
            model = Model(self._context.client, activation.model, options.model_timeout_s)
            request = {name: value for name, value in activation.request.items() if name not in _NOT_FOR_THE_MODEL}
            request["model"] = activation.model.model
            if progress.tools:
                request["tools"] = progress.tools
            return await self._loop(request, model, tools, progress)

    async def _loop(self, request: dict[str, Any], model: Model, tools: ToolBox, progress: Progress) -> HarnessEnd:
        given = request["input"]
        for step in range(self._options.max_steps):
            if step:
                request |= _with_history(request, given, progress)
            if not self._within_token_limit(request, progress):
                return HarnessEnd(status="incomplete", incomplete_reason="max_output_tokens")
            try:
                response = await model.respond(request)
            except ServiceError as error:
                progress.usages.append(None)
                return end_of_error(error, self._options.model_context_codes)
            end = end_of_response(response, self._options.model_context_codes)
            _take(response, progress)
            if end is not None:
                return end
            calls = [item for item in response["output"] if item.get("type") == "function_call"]
            if not calls:
                return HarnessEnd(status="completed")
            for call in calls:
                await _run_tool(call, tools, progress)
        return HarnessEnd(status="incomplete", incomplete_reason="max_steps")

    def _within_token_limit(self, request: dict[str, Any], progress: Progress) -> bool:
        """Lower the request's own limit to what is left of the run's; calls without counts use up nothing."""
        limit = self._options.max_output_tokens_total
        if limit is None:
            return True
        left = limit - sum((usage or {}).get("output_tokens") or 0 for usage in progress.usages)
        request["max_output_tokens"] = min(left, request.get("max_output_tokens") or left)
        return left > 0

    async def close(self) -> None:
        await self._foreign.close()


def create(options: Options, context: HarnessContext) -> ToolLoop:
    return ToolLoop(options, context)


def _offered(request: dict[str, Any], tools: ToolBox) -> list[dict[str, Any]]:
    """The request's own tools first, then the lent ones that it does not name."""
    own = request.get("tools") or []
    named = {tool.get("name") for tool in own}
    return [*own, *(spec for spec in tools.specs if spec["name"] not in named)]


def _with_history(request: dict[str, Any], given: Any, progress: Progress) -> dict[str, Any]:
    """What changes in the request after the first turn."""
    first = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given
    changed: dict[str, Any] = {"input": [*first, *progress.output]}
    choice = request.get("tool_choice")
    if choice == "required" or isinstance(choice, dict):
        changed["tool_choice"] = "auto"
    return changed


def _take(response: dict[str, Any], progress: Progress) -> None:
    usage = response.get("usage")
    progress.usages.append(usage if isinstance(usage, dict) else None)
    progress.output.extend(response["output"])
    if isinstance(response.get("model"), str):
        progress.model = response["model"]


async def _run_tool(call: dict[str, Any], tools: ToolBox, progress: Progress) -> None:
    name, call_id = str(call.get("name")), str(call.get("call_id"))
    observed: dict[str, Any] = {
        "name": name,
        "call_id": call_id,
        "started_at": time.time(),
        "ended_at": None,
        "ok": None,
    }
    progress.tool_observations.append(observed)
    output = await tools.call(name, str(call.get("arguments") or ""))
    observed |= {"ended_at": time.time(), "ok": output.ok}
    progress.output.append(
        {"type": "function_call_output", "call_id": call_id, "output": output.text, "status": "completed"}
    )
