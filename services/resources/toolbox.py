"""Serve calls of lent tools: arguments checked, state read and stored around each call, every call logged.

The log in the session's record is the evidence of what was called; a verifier never has to believe the
agent's own account. What the model did wrong is told to it; a tool that fails by its own fault is noted in
the session, which is then not graded.
"""

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson
from pydantic import BaseModel, ValidationError

from services.resources.entries import Entry, LentTool
from services.resources.records import SessionRecord
from services.resources.sessions import Sessions, require_open, require_owner
from shared.contracts.failure import Stage
from shared.errors import (
    BadRowError,
    NotFoundError,
    PaddockError,
    SessionLostError,
    TooLargeError,
    VersionConflictError,
    unknown_name,
)
from shared.http.problems import bad_row
from shared.metrics import ToolOutcome
from shared.ports.toolset import ToolError
from shared.redaction import redact

_log = logging.getLogger(__name__)

# Arguments are kept in the session's record until it is graded.
ARGUMENTS_MAX_BYTES: Final = 262_144
CALL_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class _Served:
    """What came of a call: the record after it, and the output or the error to tell."""

    record: SessionRecord
    output: str = ""
    error: PaddockError | None = None

    @property
    def outcome(self) -> ToolOutcome:
        if self.error is None:
            return "ok"
        return "refused" if isinstance(self.error, BadRowError) else "failed"


def lent_tool(entry: Entry, name: str) -> LentTool:
    """The entry's tool of that name.

    Raises:
        NotFoundError: it lends none; the message gives the known names and the nearest.
    """
    tool = entry.tools.get(name)
    if tool is None:
        raise NotFoundError(unknown_name(f"tool of '{entry.name}'", name, entry.tools))
    return tool


async def call_tool(sessions: Sessions, entry: Entry, session_id: str | None, name: str, arguments: bytes) -> str:
    """Serve one call within a session; returns the output for the model.

    Raises:
        NotFoundError: there is no such tool.
        SessionLostError: the call names no live session.
        ConflictError: the session is closed or being graded.
        BadRowError: the arguments do not fit, or the tool cannot serve them; the message is for the model.
    """
    tool = lent_tool(entry, name)
    if session_id is None:
        raise SessionLostError(f"Tools of '{entry.name}' serve within a session, and this call names none.")
    if len(arguments) > ARGUMENTS_MAX_BYTES:
        raise TooLargeError(f"The arguments of '{name}' are larger than {ARGUMENTS_MAX_BYTES // 1024} KiB.")
    fresh = False
    async with sessions.lock(session_id):
        while True:
            found = await sessions.find(session_id, fresh=fresh)
            require_owner(found, entry)
            require_open(found)
            served = await _serve(tool, found.record, arguments)
            try:
                await sessions.change(entry, found, served.record)
            except VersionConflictError:
                # Another process served a call meanwhile: do it again upon the state that it left.
                fresh = True
                continue
            sessions.metrics.tool_calls.labels(entry.name, served.outcome).inc()
            if served.error is not None:
                raise served.error
            return served.output


async def _serve(tool: LentTool, record: SessionRecord, raw: bytes) -> _Served:
    """Call the tool; `record` is this call's own copy, so that its state may be changed in place."""
    name = tool.spec.name
    before = record.calls
    try:
        arguments = tool.spec.arguments.model_validate_json(raw or b"{}", strict=True)
    except ValidationError as error:
        return _Served(_logged(record, before, name, _shown(raw), ok=False), error=bad_row(error))
    plain = arguments.model_dump(mode="json", exclude_unset=True)
    state = orjson.loads(orjson.dumps(record.tools.get(tool.toolset_name, {})))
    try:
        output = await _call(tool, arguments, state)
        changed = replace(record, tools={**record.tools, tool.toolset_name: orjson.loads(orjson.dumps(state))})
    except ToolError as error:
        return _Served(_logged(record, before, name, plain, ok=False), error=BadRowError(str(error)))
    except Exception as error:  # noqa: BLE001 - a plug-in may raise anything; the session is then not graded
        _log.warning("tool failed", exc_info=error, extra={"tool": name})
        reason = f"'{name}' failed: {type(error).__name__}: {redact(str(error))[:500]}"
        broken = replace(_logged(record, before, name, plain, ok=False), broken=reason)
        return _Served(broken, error=_broken(reason))
    return _Served(_logged(changed, before, name, plain, ok=True), output)


async def _call(tool: LentTool, arguments: BaseModel, state: dict[str, Any]) -> str:
    async with asyncio.timeout(CALL_TIMEOUT_S):
        return await tool.toolset.call(tool.spec.name, arguments, state)


def _broken(reason: str) -> PaddockError:
    error = PaddockError(f"The tool {reason}.", stage=Stage.AGENT)
    error.terminal = False
    return error


def _logged(
    record: SessionRecord, before: list[dict[str, Any]], name: str, arguments: dict[str, Any], *, ok: bool
) -> SessionRecord:
    return replace(record, calls=[*before, {"name": name, "arguments": arguments, "ok": ok}])


def _shown(raw: bytes) -> dict[str, Any]:
    """Arguments that did not fit, as far as they are an object."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
