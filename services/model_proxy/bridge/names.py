"""Tool names: the caller's (namespace, name, kind) ↔ one flat name per tool, as the upstream wants it.

Flat names match `[A-Za-z0-9_-]{1,64}`, are unique within a request, and depend on nothing but the tools,
so that every turn of a conversation sends the same ones.
"""

import re
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

ToolKind = Literal["function", "custom", "tool_search"]

FLAT_NAME_MAX_CHARS = 64
_HASH_CHARS = 8
_FORBIDDEN = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True, slots=True)
class ToolName:
    """A tool as the caller names it."""

    namespace: str | None
    name: str
    kind: ToolKind = "function"


class NameMap:
    """Filled while a request is translated, read while its answer is."""

    __slots__ = ("_flat", "_tools")

    def __init__(self) -> None:
        self._tools: dict[str, ToolName] = {}
        self._flat: dict[ToolName, str] = {}

    def add(self, tool: ToolName) -> str:
        """The tool's flat name, the same one each time."""
        flat = self._flat.get(tool)
        if flat is None:
            flat = self._flat[tool] = self._fresh(tool)
            self._tools[flat] = tool
        return flat

    def flat(self, tool: ToolName) -> str | None:
        """The flat name of a tool that was added."""
        return self._flat.get(tool)

    def tool(self, flat: str) -> ToolName:
        """The tool behind a flat name; a name that was never sent is a function's own."""
        return self._tools.get(flat) or ToolName(None, flat)

    def _fresh(self, tool: ToolName) -> str:
        plain = f"{tool.namespace}__{tool.name}" if tool.namespace else tool.name
        flat = _FORBIDDEN.sub("_", plain)
        if flat != plain or not 0 < len(flat) <= FLAT_NAME_MAX_CHARS or flat in self._tools:
            digest = sha256(f"{tool.kind}\0{tool.namespace}\0{tool.name}".encode()).hexdigest()[:_HASH_CHARS]
            flat = f"{flat[: FLAT_NAME_MAX_CHARS - _HASH_CHARS - 1]}_{digest}"
        return flat
