"""Tools that a resources entry lends to an agent: a module in `services/resources/tools/` with `create`."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import CoreSchema


class _Untitled(GenerateJsonSchema):
    """Field titles repeat the names and would only cost the model tokens."""

    def field_title_should_be_set(self, schema: CoreSchema | Any) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool's name, description and arguments; `arguments` gives the JSON schema and checks calls."""

    name: str
    description: str
    arguments: type[BaseModel]

    def as_function_tool(self) -> dict[str, Any]:
        """The tool in the Responses API's form."""
        schema = self.arguments.model_json_schema(schema_generator=_Untitled)
        schema.pop("title", None)
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": schema,
            "strict": True,
        }


class Toolset(Protocol):
    """Tools over one state per session. State is JSON; it is read before and stored after every call."""

    tools: tuple[ToolSpec, ...]

    def initial_state(self, task_data: dict[str, Any]) -> dict[str, Any]:
        """The state of a fresh session."""

    async def call(self, name: str, arguments: Any, state: dict[str, Any]) -> str:
        """Serve one call; changes `state` in place; returns the output text.

        Raises:
            ToolError: the call cannot be served; its message is given to the model.
        """


@runtime_checkable
class Releasing(Protocol):
    """A toolset whose sessions hold something besides their state implements this, too."""

    async def release(self, state: dict[str, Any]) -> None:
        """Give back what the session with this state holds; idempotent. Raises when that fails."""


class ToolError(Exception):
    """What the model is told when its call cannot be served."""
