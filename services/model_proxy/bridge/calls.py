"""Tool calls out of the upstream's reply: which fragment belongs to which call, and what a finished call says.

Upstreams leave out ids, repeat or change them, and use an index twice; the rules here give every call one id.
"""

from collections.abc import Callable
from typing import Any

import orjson

from services.model_proxy.bridge.freeform import FreeformInput
from services.model_proxy.bridge.items import CALL_ID_PREFIXES
from services.model_proxy.bridge.names import NameMap, ToolName
from services.model_proxy.bridge.refusals import UpstreamReplyError


class CallDraft:
    """A call under way. `tool` is null until a name came."""

    __slots__ = ("call_id", "flat", "freeform", "item_id", "output_index", "pieces", "tool", "unsent", "upstream_ids")

    def __init__(self, call_id: str, upstream_id: str | None) -> None:
        self.call_id = call_id
        self.upstream_ids = {upstream_id} if upstream_id else set()
        self.flat = ""
        self.tool: ToolName | None = None
        self.item_id = ""
        self.output_index = -1
        self.pieces: list[str] = []
        self.unsent = ""
        self.freeform: FreeformInput | None = None

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)

    @property
    def blank(self) -> bool:
        return not self.arguments.strip()

    @property
    def whole(self) -> bool:
        """The arguments are one JSON object."""
        try:
            return isinstance(orjson.loads(self.arguments), dict)
        except orjson.JSONDecodeError:
            return False


class CallTable:
    """All calls of one answer, in the order in which they began."""

    __slots__ = ("_at", "_call_ids", "_last_index", "_names", "_new_id", "calls")

    def __init__(self, names: NameMap, new_id: Callable[[str], str]) -> None:
        self.calls: list[CallDraft] = []
        self._names = names
        self._new_id = new_id
        self._at: dict[Any, list[CallDraft]] = {}
        self._last_index: Any = 0
        self._call_ids: set[str] = set()

    def fragment(self, entry: dict[str, Any]) -> tuple[CallDraft, str]:
        """The call that an entry of `delta.tool_calls` belongs to, and its piece of the arguments."""
        function = entry.get("function") or {}
        upstream_id, flat = _name(entry.get("id")), _name(function.get("name"))
        piece = _argument_text(function.get("arguments"))
        index = entry.get("index")
        if index is None:
            index = self._last_index
        self._last_index = index
        there = self._at.setdefault(index, [])
        call = there[-1] if there else None
        if upstream_id or flat:
            call = _named(there, upstream_id, flat, piece)
        if call is None:
            call = self._open(upstream_id)
            there.append(call)
        if upstream_id:
            call.upstream_ids.add(upstream_id)
        if flat:
            self._name(call, flat)
        call.pieces.append(piece)
        return call, piece

    def entire(self, entry: dict[str, Any]) -> None:
        """A call that came whole, in `message.tool_calls`: never a part of another one."""
        function = entry.get("function") or {}
        call = self._open(_name(entry.get("id")))
        if flat := _name(function.get("name")):
            self._name(call, flat)
        call.pieces.append(_argument_text(function.get("arguments")))

    def named(self) -> list[CallDraft]:
        """The calls that are some.

        Raises:
            UpstreamReplyError: there are arguments for a call that has no name.
        """
        if any(call.tool is None and not call.blank for call in self.calls):
            raise UpstreamReplyError("The upstream sent a tool call without a name.", "invalid_tool_call")
        return [call for call in self.calls if call.tool is not None]

    def _open(self, upstream_id: str | None) -> CallDraft:
        call_id = upstream_id if upstream_id and upstream_id not in self._call_ids else self._new_id("call")
        call = CallDraft(call_id, upstream_id)
        self._call_ids.add(call.call_id)
        self.calls.append(call)
        return call

    def _name(self, call: CallDraft, flat: str) -> None:
        """The first name that comes is the call's: servers repeat it."""
        if call.tool is None:
            call.flat = flat
            call.tool = self._names.tool(flat)
            call.item_id = self._new_id(CALL_ID_PREFIXES[call.tool.kind])
            if call.tool.kind == "custom":
                call.freeform = FreeformInput()


def _named(there: list[CallDraft], upstream_id: str | None, flat: str | None, piece: str) -> CallDraft | None:
    """The call at an index that a fragment with an id or a name belongs to; null when it begins another one."""
    if not there:
        return None
    latest = there[-1]
    if upstream_id:
        for call in there:
            if upstream_id in call.upstream_ids:
                return call
        another = bool(flat and latest.upstream_ids)
    else:
        another = bool(flat and latest.flat and flat != latest.flat)
    # A whole call takes no more arguments, whatever the fragment repeats.
    another = another or (bool(piece.strip()) and latest.whole)
    return None if another else latest


def _name(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"a name or id of a tool call is {value!r}")
    return value or None


def _argument_text(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments
    return "" if arguments is None else orjson.dumps(arguments).decode()


def call_payload(call: CallDraft, truncated: bool) -> tuple[Any, str]:
    """What a finished call hands over, and the status of its item.

    `truncated`: the answer was cut by a limit, so a call that is not whole is incomplete. Otherwise
    arguments are passed on byte for byte, also when they are no JSON: the harness tells its model.

    Raises:
        UpstreamReplyError: a custom tool's input breaks off, which its raw text would not show.
    """
    arguments = call.arguments
    status = "incomplete" if truncated and not call.whole else "completed"
    kind = call.tool.kind if call.tool else "function"
    if kind == "custom":
        freeform = FreeformInput()
        payload = freeform.feed(arguments) + freeform.end()
        if freeform.cut and not truncated:
            raise UpstreamReplyError(
                f"The upstream's call of {call.flat!r} breaks off in the middle of its input.", "truncated_tool_call"
            )
        return payload, status
    if call.blank and status == "completed":
        arguments = "{}"
    if kind == "tool_search" and status == "completed":
        return _parsed(arguments), status
    return arguments, status


def _parsed(arguments: str) -> Any:
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
