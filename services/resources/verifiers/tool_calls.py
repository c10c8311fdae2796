"""Grades which tools were called, by what the resources server served; the agent's own account proves nothing.

A row's `expected_calls` name the calls that must have been served well: each by name and, where the row
gives them, by arguments that are equal as JSON. With `order: any` they may come in any order among others,
with `order: exact` they are all that was served, in that order.

A row without expected calls would pass whatever happened, so it is refused; unless the option
`without_expected_calls: offered_tool` is set, for rows that only offer tools. Then all of this must hold:
an offered tool was called (`called`), the arguments of every such call fit the schema that the row declares
(`arguments_fit`), every one was served well (`served`), and a final message followed (`answered`).
"""

from collections import Counter
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from services.resources.strict_schema import canonical, fits
from shared.contracts.resources import ReverifyMode, Verdict
from shared.contracts.responses import output_text
from shared.errors import BadRowError, FieldProblem
from shared.ports.verifier import Answer, Judge, ToolCallRecord

_CALL_TYPES: Final = frozenset({"function_call", "mcp_call"})


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    without_expected_calls: Literal["reject", "offered_tool"] = "reject"
    """What is done with a row that names no expected call."""
    order: Literal["any", "exact"] = "any"
    """Whether the expected calls may come in any order among others, or are all there may be, in their order."""


class ExpectedCall(BaseModel):
    """Without `arguments` any will do."""

    name: Annotated[str, Field(min_length=1)]
    arguments: dict[str, Any] | None = None


class ExpectingTask(BaseModel):
    """A row that names what must be called."""

    expected_calls: Annotated[list[ExpectedCall], Field(min_length=1)]


class OfferingTask(BaseModel):
    """A row that may leave it at offering tools."""

    expected_calls: Annotated[list[ExpectedCall], Field(min_length=1)] | None = None


class ToolCalls:
    """Implements `shared.ports.verifier.Verifier`."""

    reverify_mode: ReverifyMode = "unsupported"
    needs_session = True

    def __init__(self, options: Options) -> None:
        self._order = options.order
        self.task_data: type[BaseModel] = OfferingTask if options.without_expected_calls != "reject" else ExpectingTask

    async def verify(self, task: ExpectingTask | OfferingTask, answer: Answer, judge: Judge | None) -> Verdict:
        if task.expected_calls is None:
            components = _offered(answer)
        elif self._order == "exact":
            components = {"expected_calls": float(_in_order(task.expected_calls, answer.tool_calls))}
        else:
            components = {"expected_calls": float(_among(task.expected_calls, answer.tool_calls))}
        served = [{"name": call.name, "arguments": call.arguments, "ok": call.ok} for call in answer.tool_calls]
        fields = {"reward": min(components.values()), "reward_components": components, "served_calls": served}
        return Verdict.model_validate(fields)

    async def close(self) -> None:
        return


def create(options: Options) -> ToolCalls:
    return ToolCalls(options)


def _meets(call: ToolCallRecord, expected: ExpectedCall) -> bool:
    if call.name != expected.name:
        return False
    return expected.arguments is None or canonical(call.arguments) == canonical(expected.arguments)


def _in_order(expected: list[ExpectedCall], calls: tuple[ToolCallRecord, ...]) -> bool:
    return len(calls) == len(expected) and all(
        call.ok and _meets(call, one) for call, one in zip(calls, expected, strict=True)
    )


def _among(expected: list[ExpectedCall], calls: tuple[ToolCallRecord, ...]) -> bool:
    """Whether each expected call has a served one of its own; those that ask for most choose first."""
    left = [call for call in calls if call.ok]
    for one in sorted(expected, key=lambda call: call.arguments is None):
        match = next((index for index, call in enumerate(left) if _meets(call, one)), None)
        if match is None:
            return False
        del left[match]
    return True


def _offered(answer: Answer) -> dict[str, float]:
    schemas = _declared_schemas(answer.params)
    served = [call for call in answer.tool_calls if call.name in schemas]
    reported = [item for item in _call_items(answer.response) if item.get("name") in schemas]
    arguments = [(str(item["name"]), _arguments_of(item)) for item in reported]
    arguments += [(call.name, call.arguments) for call in served]
    well_served = Counter((call.name, canonical(call.arguments)) for call in served if call.ok)
    claimed = Counter((str(item["name"]), canonical(_arguments_of(item))) for item in reported)
    return {
        "called": float(bool(served)),
        "arguments_fit": float(all(fits(given, schemas[name]) for name, given in arguments)),
        "served": float(all(call.ok for call in served) and claimed <= well_served),
        "answered": float(_answered(answer.response)),
    }


def _declared_schemas(params: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The schema of each tool that the row offers.

    Raises:
        BadRowError: it offers none, so that there is nothing to grade.
    """
    tools = [tool for tool in params.get("tools") or [] if tool.get("type") == "function" and tool.get("name")]
    if not tools:
        message = "the row names no expected call and offers no function tool: there is nothing to grade"
        raise BadRowError.of([FieldProblem(("responses_create_params", "tools"), message, "missing")])
    return {tool["name"]: tool.get("parameters") or {"type": "object"} for tool in tools}


def _call_items(response: dict[str, Any]) -> list[dict[str, Any]]:
    return [item for item in response.get("output") or [] if item.get("type") in _CALL_TYPES]


def _arguments_of(item: dict[str, Any]) -> Any:
    """The arguments of a call in a response; what is no sound JSON stays text, which fits no schema of an object."""
    arguments = item.get("arguments")
    try:
        value = orjson.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        canonical(value)
    except (orjson.JSONDecodeError, TypeError, RecursionError):
        return str(arguments)
    return value


def _answered(response: dict[str, Any]) -> bool:
    """Whether the last message says something and no call comes after it."""
    for item in reversed(response.get("output") or []):
        if item.get("type") in _CALL_TYPES:
            return False
        if item.get("type", "message") == "message" and item.get("role", "assistant") == "assistant":
            return bool(output_text(response).strip())
    return False
