"""A real agent and resources server for episodes, whose every step can be held, failed or answered otherwise."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.environment.app import create_app
from shared.settings import LoadedSettings, Settings
from tests.serving import serving

Hook = Callable[[Any], Awaitable[Response | None]]

PARAMS = {"input": [{"role": "user", "content": "6 x 7?"}]}


def answer(text: str = "42", **fields: Any) -> dict[str, Any]:
    """A Responses object with one message."""
    message = {
        "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }  # fmt: skip
    return {"id": "resp_1", "object": "response", "status": "completed", "output": [message], "usage": None, **fields}


def failed(kind: str, status: int | None = None) -> dict[str, Any]:
    """A failed response with a classified cause."""
    origin = {"service": "upstream", "status": status, "body_excerpt": "why"} if status is not None else None
    cause = {"failure_kind": kind, "reason": "the model said no"} | ({"origin": origin} if origin else {})
    return answer(status="failed", failure_cause=cause)


@dataclass
class Parties:
    """Agent and resources in one application. `order` lists the steps as they arrive; `bodies` what they got."""

    order: list[str] = field(default_factory=list)
    bodies: dict[str, list[Any]] = field(default_factory=dict)
    headers: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    hooks: dict[str, Hook] = field(default_factory=dict)
    response: dict[str, Any] = field(default_factory=answer)
    receipt: dict[str, Any] = field(default_factory=dict)
    verdict: dict[str, Any] = field(default_factory=lambda: {"reward": 1.0})
    arrived: dict[tuple[str, int], asyncio.Event] = field(default_factory=dict)

    def event(self, step: str, times: int = 1) -> asyncio.Event:
        """Set once the step has been asked for so many times."""
        return self.arrived.setdefault((step, times), asyncio.Event())

    def hold(self, step: str) -> asyncio.Event:
        """Let the step wait until the returned event is set."""
        gate = asyncio.Event()

        async def wait(_body: Any) -> None:
            await gate.wait()

        self.hooks[step] = wait
        return gate

    def fail(self, step: str, status: int, *, times: int = 1_000_000, body: dict[str, Any] | None = None) -> None:
        """Answer the step with an error, the first `times` times."""
        left = [times]

        async def refuse(_body: Any) -> Response | None:
            left[0] -= 1
            return JSONResponse(body or {"error": {"message": f"{step} refused"}}, status) if left[0] >= 0 else None

        self.hooks[step] = refuse

    def app(self) -> Starlette:
        def route(path: str, step: str, reply: Callable[[Any], Response]) -> Route:
            async def serve(request: Request) -> Response:
                body = orjson.loads(await request.body())
                self.order.append(step)
                self.bodies.setdefault(step, []).append(body)
                self.headers.setdefault(step, []).append(dict(request.headers))
                self.event(step, self.order.count(step)).set()
                hook = self.hooks.get(step)
                return (await hook(body) if hook is not None else None) or reply(body)

            return Route(path, serve, methods=["POST"])

        return Starlette(
            routes=[
                route("/{r}/seed_session", "seed resources", self._seed_resources),
                route("/{r}/verify", "verify", lambda _: JSONResponse(self.verdict)),
                route("/{r}/close_session", "close resources", self._close_resources),
                route("/{r}/aggregate_metrics", "aggregate", lambda body: JSONResponse({"rows": len(body["results"])})),
                route("/{a}/v1/agent_sessions", "seed agent", self._seed_agent),
                route("/{a}/v1/responses", "run", lambda _: JSONResponse(self.response)),
                route("/{a}/v1/agent_sessions/close", "close agent", self._close_agent),
            ]
        )

    def _seed_resources(self, body: Any) -> Response:
        tools = {"http": [{"type": "function", "name": "add"}], "mcp": {"transport": "http", "path": "/mcp"}}
        reply = JSONResponse({"resources_session_id": body["resources_session_id"], "resources_tools": tools})
        reply.set_cookie("res", "r1")
        return reply

    def _close_resources(self, body: Any) -> Response:
        return JSONResponse({"resources_session_id": body["resources_session_id"], "status": "closed"})

    def _seed_agent(self, body: Any) -> Response:
        reply = JSONResponse({"agent_session_id": body["agent_session_id"]})
        reply.set_cookie("age", "a1")
        return reply

    def _close_agent(self, body: Any) -> Response:
        receipt = {
            "agent_session_id": body["agent_session_id"],
            "status": "closed",
            "cleanup": {"cleanup_confirmed": True},
            "agent_observations": {"tool_calls": []},
        }
        return JSONResponse(receipt | self.receipt)


@dataclass
class House:
    """The environment server on a socket, a client for it, and the two parties."""

    parties: Parties
    http: httpx.AsyncClient
    url: str

    async def run(self, body: dict[str, Any] | bytes | None = None, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else orjson.dumps(flat() if body is None else body)
        return await self.http.post("/run", content=content, headers=headers)


def flat(rollout_id: str | None = None, **fields: Any) -> dict[str, Any]:
    ids = {} if rollout_id is None else {"episode_id": {"rollout_id": rollout_id}}
    return {"responses_create_params": PARAMS, "expected_answer": "42", **ids, **fields}


def native(rollout_id: str = "r1", attempt: int = 0, **task_data: Any) -> dict[str, Any]:
    return {
        "episode_id": {"rollout_id": rollout_id, "attempt": attempt},
        "task": {
            "task_id": {"taskset": "sums", "task_id": "t1"},
            "task_input": {
                "responses_create_params": PARAMS,
                "task_data": {"expected_answer": "42", **task_data},
            },
        },
    }


def settings_for(parties_url: str, environment: dict[str, Any], more: dict[str, Any]) -> LoadedSettings:
    services = {"agent": {"url": parties_url}, "resources": {"url": parties_url}, "patience_s": 0.3}
    entry = {"resources": "sums", "agent": "solver", "cleanup_timeout_s": 5.0, **environment}
    values: dict[str, Any] = {
        "services": services,
        "models": {"policy": {"upstream": "scripted"}},
        "agents": {"solver": {"harness": "tool_loop", "close_timeout_s": 0.5}},
        "resources": {"sums": {"verifier": "math", "verify_timeout_s": 0.5, "close_timeout_s": 0.5}},
        "environments": {"sums": entry},
        "serving": {"drain_lead_s": 0.0, "stop_grace_s": 3.0},
        **more,
    }
    return LoadedSettings(Settings.model_validate(values), {})


@asynccontextmanager
async def house(*, more: dict[str, Any] | None = None, **environment: Any) -> AsyncIterator[House]:
    """An environment server named `sums` over fresh parties."""
    parties = Parties()
    async with serving(parties.app()) as parties_url:
        app = create_app(settings_for(parties_url, environment, more or {}))
        async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=30.0) as http:
            yield House(parties, http, url)
