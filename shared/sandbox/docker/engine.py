"""A Docker engine over its SDK, in threads. The only file that knows the SDK's errors.

An engine's answer that is an error becomes `EngineError` with its status; no answer becomes `ProviderError`.
A call that was made is waited for, also when its caller is cancelled: its thread cannot be stopped, and what it
makes has to be known before it can be undone.
"""

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, TypeVar

from shared.cleanup import shielded
from shared.errors import ProviderError

if TYPE_CHECKING:
    from docker import APIClient

_T = TypeVar("_T")
THREADS: Final = 16
LONG_THREADS: Final = 4
CALL_TIMEOUT_S: Final = 60


class EngineError(ProviderError):
    """The engine's own answer: `code` is its HTTP status, `said` its explanation."""

    def __init__(self, what: str, code: int, said: str) -> None:
        super().__init__(f"The Docker engine refused to {what} (status {code}): {said}")
        self.code = code
        self.said = said


class Engine:
    """Calls to one engine. `host` is an address as in DOCKER_HOST; without one, the environment decides."""

    def __init__(self, host: str | None, *, call_timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._host = host
        self._timeout_s = call_timeout_s
        self._client: APIClient | None = None
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="docker")
        self._long_threads = ThreadPoolExecutor(LONG_THREADS, thread_name_prefix="docker-long")
        self.closing = threading.Event()
        """Set when what runs for long, a pull or a build, is to end."""

    @property
    def address(self) -> str:
        return self._host or os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"

    async def call(self, what: str, work: Callable[["APIClient"], _T], *, long: bool = False) -> _T:
        """Do `work` in a thread; `what` says it in words, as in "start a container". `long` work takes no thread
        from the rest.

        Raises:
            EngineError: the engine answered with an error.
            ProviderError: there was no answer.
        """
        threads = self._long_threads if long else self._threads
        return await shielded(asyncio.get_running_loop().run_in_executor(threads, self._work, what, work))

    def _work(self, what: str, work: Callable[["APIClient"], _T]) -> _T:
        from docker.errors import APIError, DockerException
        from requests.exceptions import RequestException
        from urllib3.exceptions import HTTPError

        try:
            return work(self._connected())
        except APIError as error:
            raise EngineError(what, error.status_code or 500, str(error.explanation or error)) from error
        except (RequestException, HTTPError, OSError, DockerException) as error:
            raise ProviderError(
                f"The Docker engine at {self.address} gave no answer when asked to {what}: {error}. "
                "Is it running, and may this user reach it? DOCKER_HOST or the sandbox's `host` names another."
            ) from error

    def _connected(self) -> "APIClient":
        from docker import APIClient
        from docker.utils import kwargs_from_env

        with self._lock:
            if self._client is None:
                _try_socket(self.address)
                environment = dict(os.environ)
                if self._host is not None:
                    environment["DOCKER_HOST"] = self._host
                arguments: Any = kwargs_from_env(environment=environment)
                self._client = APIClient(
                    version="auto", timeout=round(self._timeout_s), max_pool_size=THREADS, **arguments
                )
            return self._client

    async def open_exec(self, container: str, argv: list[str], user: str) -> tuple[socket.socket, bytes]:
        """Start a program in a container: its input and its output, in Docker's frames, are on the socket.

        The bytes are what came with the answer's head already.
        """
        opening = asyncio.ensure_future(self.call("run a command", lambda api: _open_exec(api, container, argv, user)))
        try:
            return await shielded(opening)
        except asyncio.CancelledError:
            if opening.done() and not opening.cancelled() and opening.exception() is None:
                opening.result()[0].close()
            raise

    def close(self) -> None:
        self.closing.set()
        self._threads.shutdown(wait=False)
        self._long_threads.shutdown(wait=False)
        if self._client is not None:
            self._client.close()
            self._client = None


def _try_socket(address: str) -> None:
    """The SDK's own error for a socket that is not there is long and leaves a socket open. Raises OSError."""
    kind, _, path = address.partition("://")
    if kind in {"unix", "http+unix"}:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(path)


def _open_exec(api: "APIClient", container: str, argv: list[str], user: str) -> tuple[socket.socket, bytes]:
    made = api.exec_create(container, argv, stdin=True, stdout=True, stderr=True, user=user, workdir="/")
    opened: Any = api.exec_start(made["Id"], socket=True)
    # The SDK gives the response's own socket, or a file around it, and closes the connection with the response.
    carrier: socket.socket = getattr(opened, "_sock", opened)
    kept = carrier.dup()
    response = getattr(opened, "_response", None)
    early = b""
    if response is not None:
        early = _read_ahead(carrier, response.raw._fp.fp)
        response.close()
    opened.close()
    return kept, early


def _read_ahead(connection: socket.socket, head: Any) -> bytes:
    """What the buffer, from which the answer's head was read, holds of the stream behind it.

    A program that ends at once sends all it has with the head: without this its words would be lost.
    """
    connection.setblocking(False)  # the buffer reads from this very socket: it then gives what there is
    return bytes(head.read(len(head.peek())))
