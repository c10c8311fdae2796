"""The way to one environment server: its address, its token, its connections, and whether it takes rows.

What an answer means for an episode is decided in `client.py`.
"""

import asyncio
import os
from typing import Any, Final, Self
from urllib.parse import urlsplit

import httpx

from services.collector.options import RefusedError, RunError
from shared.http.problems import read
from shared.redaction import redact
from shared.settings import is_loopback

CONNECT_TIMEOUT_S: Final = 5.0
READY_TRIES: Final = 10
READY_PAUSE_S: Final = 0.3
# A name that no episode has, since rollout ids begin with a letter or digit: to ask for it shows the token, no more.
_NO_EPISODE: Final = "_"


class Connection:
    """Connections to the environment server at `url`; use it as an async context manager."""

    def __init__(self, url: str, token: str | None) -> None:
        """Raises:
        RunError: `url` is no address of a server, or holds a password.
        """
        self.url = url.rstrip("/")
        self.knows_prefer = False
        """Whether it is a server of this mesh, which answers as soon as `Prefer` asks."""
        # A proxy from the environment variables leads away from this machine.
        self._trust_env = not is_loopback(host_of(self.url))
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._ssl = httpx.create_ssl_context()
        self._clients: list[httpx.AsyncClient] = []
        self._free: list[httpx.AsyncClient] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients:
            await client.aclose()

    async def request(self, method: str, path: str, *, timeout_s: float, **more: Any) -> httpx.Response:
        """One request. A client per connection: one client's pool looks at all of its connections each time.

        Raises:
            httpx.RequestError: there was no whole answer.
        """
        client = self._free.pop() if self._free else self._another()
        try:
            timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
            return await client.request(method, self.url + path, timeout=timeout, **more)
        finally:
            self._free.append(client)

    def _another(self) -> httpx.AsyncClient:
        client = httpx.AsyncClient(headers=self._headers, trust_env=self._trust_env, verify=self._ssl)
        self._clients.append(client)
        return client

    async def check(self) -> None:
        """See that an environment server answers, is ready, and takes our token.

        Raises:
            RunError: nothing answers, something else does, it is not ready, or it refuses the token.
        """
        if (problem := await self.not_ready_for_a_while()) is not None:
            raise RunError(problem)
        try:
            reply = await self.request("GET", f"/episodes/{_NO_EPISODE}", timeout_s=CONNECT_TIMEOUT_S)
        except httpx.RequestError:
            return  # it was there a moment ago; what is sent next bears with such trouble
        if reply.status_code in {401, 403}:
            raise self.token_refused(reply.status_code)

    async def not_ready_for_a_while(self) -> str | None:
        """None as soon as it is ready, else a sentence that says what is wrong."""
        problem = await self._not_ready()
        for _ in range(READY_TRIES - 1):
            if problem is None:
                break
            await asyncio.sleep(READY_PAUSE_S)
            problem = await self._not_ready()
        return problem

    async def _not_ready(self) -> str | None:
        try:
            reply = await self.request("GET", "/readyz", timeout_s=CONNECT_TIMEOUT_S)
        except httpx.RequestError as error:
            return nobody_there(self.url, error)
        if reply.status_code == 200:
            return self._other_service(reply)
        problem = read(reply.status_code, dict(reply.headers), reply.content, service=f"{self.url}/readyz")
        if reply.status_code in {404, 405}:
            return f"What answers at {self.url} is no environment server: {problem.message}"
        return f"The environment server is not ready. {problem.message}"

    def _other_service(self, reply: httpx.Response) -> str | None:
        """The sentence for a service of the mesh that takes no rows; None for an environment server."""
        try:
            service = reply.json().get("service")
        except (ValueError, AttributeError):
            return f"What answers at {self.url} is no environment server."
        if service in {None, "environment"}:
            self.knows_prefer = service is not None
            return None
        return f"What answers at {self.url} is the {service} service; rows go to the environment server."

    def token_refused(self, status: int) -> RefusedError:
        return token_refused(self.url, status, given=bool(self._headers))


def token_refused(url: str, status: int, *, given: bool) -> RefusedError:
    """What to say of a 401 or 403; `given` tells whether a token was sent."""
    told = "refuses our token" if given else "asks for a token, and there is none"
    return RefusedError(
        f"The environment server at {url} {told} ({status}): set PADDOCK_CLIENT_TOKEN to the one that it was started"
        " with."
    )


def nobody_there(url: str, error: httpx.RequestError) -> str:
    remedy = "Start the mesh with `paddock up`, or name another address with --url."
    return f"Nothing answers at {url} ({why(error)}). {remedy}"


def why(error: httpx.RequestError) -> str:
    """What the system says, where it says something: the client's own words are those of several attempts."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
            return os.strerror(cause.errno)
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__


def host_of(url: str) -> str:
    """The host of a server's address.

    Raises:
        RunError: it is no address of a server, or holds a password.
    """
    try:
        parts = urlsplit(url)
        valid = parts.scheme in {"http", "https"} and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid or not parts.hostname:
        raise RunError(f"'{redact(url)}' is no address of an environment server; one looks like http://127.0.0.1:8100.")
    if parts.password is not None:
        raise RunError("An address may not hold a password; a token goes into PADDOCK_CLIENT_TOKEN.")
    return parts.hostname
