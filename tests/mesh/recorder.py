"""A reverse proxy before agent and resources that writes down every step of an episode, with its begin and its end.

It can also lose answers: the service has done what it was asked for, and the caller's connection breaks.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Final

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

_STEPS: Final = {
    "seed_session": "seed resources",
    "v1/agent_sessions": "seed agent",
    "v1/responses": "run",
    "v1/agent_sessions/close": "close agent",
    "verify": "verify",
    "close_session": "close resources",
}
_NOT_PASSED: Final = frozenset({"host", "content-length", "transfer-encoding", "connection"})


class Recorder:
    """`steps` has, per episode key, each step twice: when it began, and, with ` ended`, when it was answered."""

    def __init__(self) -> None:
        self.steps: dict[str, list[str]] = defaultdict(list)
        self._to_lose: set[tuple[str, str]] = set()

    def lose(self, key: str, *steps: str) -> None:
        """Lose the next answer to each of these steps of an episode."""
        self._to_lose |= {(key, step) for step in steps}

    def app(self, target: str) -> Starlette:
        """A proxy before one service."""

        @contextlib.asynccontextmanager
        async def lifespan(_app: Starlette) -> AsyncIterator[None]:
            # Keeps no cookies: those of one episode would go into the next one's requests.
            jar = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
            async with httpx.AsyncClient(base_url=target, timeout=60.0, trust_env=False, cookies=jar) as client:
                clients.append(client)
                yield

        clients: list[httpx.AsyncClient] = []

        async def forward(request: Request) -> Response:
            _, _, below = request.url.path.lstrip("/").partition("/")
            step = _STEPS.get(below, f"tool {below}")
            key = request.headers.get("x-paddock-key", "no key")
            body = await request.body()
            headers = [(name, value) for name, value in request.headers.items() if name not in _NOT_PASSED]
            self.steps[key].append(step)
            answer = await clients[0].request(request.method, request.url.path, content=body, headers=headers)
            if (key, step) in self._to_lose:
                self._to_lose.remove((key, step))
                self.steps[key].append(f"{step} lost")
                return StreamingResponse(_broken(), headers={"content-length": str(len(answer.content) + 1)})
            self.steps[key].append(f"{step} ended")
            reply = Response(answer.content, answer.status_code)
            for name, value in answer.headers.multi_items():
                if name not in _NOT_PASSED:
                    reply.headers.append(name, value)
            return reply

        return Starlette(routes=[Route("/{rest:path}", forward, methods=["GET", "POST"])], lifespan=lifespan)


async def _broken() -> AsyncIterator[bytes]:
    yield b"{"
    await asyncio.sleep(0)
    raise ConnectionResetError("an answer is lost on purpose")


def in_turn(*steps: str) -> list[str]:
    """What a recorder has when each of these steps ended before the next one began."""
    return [told for step in steps for told in (step, f"{step} ended")]
