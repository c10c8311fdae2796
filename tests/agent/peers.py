"""The agent server's peers as real HTTP applications: a scripted model proxy with captures, and tool servers."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shared.contracts.capture import ModelCall
from shared.contracts.responses import Usage
from shared.tokens import Signer

Turn = Callable[[dict[str, Any]], Response]


def reply(body: Any, status: int = 200, set_cookie: str | None = None) -> Response:
    headers = {} if set_cookie is None else {"set-cookie": set_cookie}
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def response(*output: dict[str, Any], status: str = "completed", tokens: int | None = 5, **fields: Any) -> Turn:
    """A turn that answers these output items."""
    usage = None if tokens is None else {"input_tokens": 10, "output_tokens": tokens, "total_tokens": 10 + tokens}
    body = {"id": "resp_1", "object": "response", "status": status, "model": "served", "output": list(output)}
    return lambda _request: reply({**body, "usage": usage, **fields})


def message(text: str) -> dict[str, Any]:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }


def tool_call(name: str, arguments: str = "{}", call_id: str = "call_1") -> dict[str, Any]:
    return {"type": "function_call", "id": "fc_1", "call_id": call_id, "name": name, "arguments": arguments}


def refusal(status: int, code: str | None, text: str = "no") -> Turn:
    """A turn that fails as an upstream does."""
    return lambda _request: reply({"error": {"message": text, "type": "error", "param": None, "code": code}}, status)


@dataclass
class FakeProxy:
    """Plays `turns`, the last one for ever, after `gate` opens; keeps a capture per key."""

    turns: list[Turn] = field(default_factory=lambda: [response(message("4"))])
    requests: list[dict[str, Any]] = field(default_factory=list)
    captures: dict[str, list[ModelCall]] = field(default_factory=dict)
    sealed: list[str] = field(default_factory=list)
    seal_failures: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    mesh_token: str = ""
    claimed_models: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.gate.set()

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/responses", self._respond, methods=["POST"]),
                Route("/captures/{key}/seal", self._seal, methods=["POST"]),
            ]
        )

    async def _respond(self, request: Request) -> Response:
        token = request.headers["authorization"].removeprefix("Bearer ")
        claims = Signer(self.mesh_token, "session-token").read_session_token(token)
        self.claimed_models.add(claims.model)
        body = orjson.loads(await request.body())
        started_at = time.time()
        self.requests.append(body)
        self.asked.set()
        await self.gate.wait()
        answer = self.turns[min(len(self.requests), len(self.turns)) - 1](body)
        self._record(claims.key, started_at, answer)
        return answer

    def _record(self, key: str, started_at: float, answer: Response) -> None:
        calls = self.captures.setdefault(key, [])
        body = orjson.loads(bytes(answer.body))
        items = body.get("output", [])
        calls.append(
            ModelCall(
                call_id=f"model-call-{len(calls)}",
                phase="agent",
                dialect="responses",
                model="policy",
                stream=False,
                started_at=started_at,
                ended_at=time.time(),
                status=answer.status_code,
                response_id=body.get("id"),
                call_ids=tuple(item["call_id"] for item in items if item["type"] == "function_call"),
                usage=None if body.get("usage") is None else Usage.model_validate(body["usage"]),
            )
        )

    async def _seal(self, request: Request) -> Response:
        key = request.path_params["key"]
        self.sealed.append(key)
        if self.seal_failures:
            self.seal_failures -= 1
            return reply({"error": {"message": "the proxy fell over", "code": None}}, 500)
        calls = [call.model_dump(mode="json") for call in self.captures.get(key, [])]
        return reply({"key": key, "sealed": True, "calls": calls, "damaged": 0})


@dataclass
class FakeTools:
    """A tool server: `answers` by tool name; keeps what it was sent and by whom."""

    answers: dict[str, Callable[[dict[str, Any]], Response]] = field(default_factory=dict)
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/{tool}", self._call, methods=["POST"])])

    async def _call(self, request: Request) -> Response:
        name = request.path_params["tool"]
        arguments = orjson.loads(await request.body())
        self.calls.append((name, arguments))
        self.headers.append(dict(request.headers))
        return self.answers[name](arguments)


def spec(name: str) -> dict[str, Any]:
    """A lent function tool."""
    return {"type": "function", "name": name, "description": name, "parameters": {"type": "object"}, "strict": True}
