"""Plays a capture back: the same requests get the same responses, with their ids, arguments and order.

An answer is found by what was asked (`input`, or `messages`), so nothing is remembered and any replica
answers alike. Who asks something that was never recorded is told so with a 400. Failed calls are not
played back. A file is what `GET /captures/{key}?format=jsonl` gives; several files may be joined.
"""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from shared.contracts.capture import ModelCall
from shared.ports.upstream import UpstreamCall, UpstreamDialect

JSON_HEADERS: Final = {"content-type": "application/json"}
SSE_HEADERS: Final = {"content-type": "text/event-stream"}
_FINAL: Final = {"completed": "response.completed", "incomplete": "response.incomplete", "failed": "response.failed"}


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    capture: Path
    """File of calls as JSON lines, from `GET /captures/{key}?format=jsonl`."""

    @field_validator("capture")
    @classmethod
    def _can_be_read(cls, path: Path) -> Path:
        load_calls(path)
        return path


def create(options: Options) -> "ReplayUpstream":
    return ReplayUpstream(load_calls(options.capture))


def load_calls(path: Path) -> list[ModelCall]:
    """The calls that ended well and were recorded whole.

    Raises:
        ValueError: it cannot be read, a line is no call, or no call can be played back; the message says where.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    calls = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            calls.append(ModelCall.model_validate_json(line))
        except ValidationError as error:
            raise ValueError(f"{path}, line {number}: no recorded call: {error.errors()[0]['msg']}") from error
    whole = [call for call in calls if call.dialect == "responses" and call.status == 200 and _is_whole(call)]
    if not whole:
        raise ValueError(f"{path} holds no call of the Responses API with both its request and its response")
    return whole


def _is_whole(call: ModelCall) -> bool:
    return call.request is not None and call.response is not None


class ReplayUpstream:
    """Implements `shared.ports.upstream.Upstream` in this process."""

    dialect: UpstreamDialect = "responses"

    def __init__(self, calls: list[ModelCall]) -> None:
        self._answers: dict[str, dict[str, Any]] = {}
        for call in calls:
            if call.request is not None and call.response is not None:
                # A request that was sent again got its answer the first time.
                self._answers.setdefault(_asked(call.request), call.response)

    async def send(self, call: UpstreamCall) -> "ReplayReply":
        answer = self._answers.get(_asked(call.body))
        if answer is None:
            return ReplayReply(400, JSON_HEADERS, [_unknown(call.body)])
        if call.stream:
            return ReplayReply(200, SSE_HEADERS, _events(answer))
        return ReplayReply(200, JSON_HEADERS, [orjson.dumps(answer)])

    async def close(self) -> None:
        return


class ReplayReply:
    """Implements `shared.ports.upstream.UpstreamReply`."""

    attempts = 1

    def __init__(self, status: int, headers: dict[str, str], pieces: list[bytes]) -> None:
        self.status = status
        self.headers = headers
        self._pieces = pieces

    async def read(self) -> bytes:
        return b"".join(self._pieces)

    async def chunks(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece

    async def close(self) -> None:
        return


def _asked(request: dict[str, Any]) -> str:
    asked = [request.get("instructions"), request.get("input")]
    return hashlib.sha256(orjson.dumps(asked, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _unknown(request: dict[str, Any]) -> bytes:
    given = request.get("input")
    turns = len(given) if isinstance(given, list) else 1
    message = f"The capture that is played back holds no answer to this request of {turns} input items."
    return orjson.dumps(
        {"error": {"message": message, "type": "invalid_request_error", "param": "input", "code": "not_recorded"}}
    )


def _events(response: dict[str, Any]) -> list[bytes]:
    """The least that a stream needs: every item whole, then the response as it ended."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    events: list[dict[str, Any]] = [{"type": "response.created", "response": begun}]
    for index, item in enumerate(response.get("output") or []):
        events.append({"type": "response.output_item.added", "output_index": index, "item": item})
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": _FINAL.get(response.get("status", ""), "response.completed"), "response": response})
    return [
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps({**event, "sequence_number": number}))
        for number, event in enumerate(events)
    ]
