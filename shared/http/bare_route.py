"""Routes of the hot paths: documented like any FastAPI route, called like a bare ASGI application.

FastAPI's own way to a function passes half a dozen middlewares, tries the routes one after the other,
solves dependencies and keeps exit stacks for every request, which costs more than the rest of a small
request. A bare route's function takes the request and nothing else, path parameters included
(`request.path_params`), and returns a response. The service's edge looks for it before FastAPI is asked.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

Endpoint = Callable[[Request], Awaitable[Response]]


class BareRoute(APIRoute):
    """In the router it serves as documentation; `serves` and `app` are all that a call needs."""

    def __init__(self, path: str, endpoint: Endpoint, **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self.app = _called_bare(endpoint)

    def serves(self, scope: Scope) -> bool:
        """Whether this request is for this route; sets its path parameters."""
        if scope["method"] not in (self.methods or ()):
            return False
        found = self.path_regex.match(scope["path"])
        if found is None:
            return False
        scope["path_params"] = {
            name: self.param_convertors[name].convert(value) for name, value in found.groupdict().items()
        }
        scope["route"] = self
        return True


def _called_bare(endpoint: Endpoint) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        response = await endpoint(Request(scope, receive, send))
        await response(scope, receive, send)

    return app
