"""Run one service's application: uvicorn with a drain that loses nothing.

TERM or INT: `readyz` answers 503 at once while the service goes on serving for the drain lead; then new work
is refused and open waits end, the listeners close, and what is still open after its share of the grace is
cut, streams with a final event and other requests with 503. Further signals change nothing.
"""

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shared.http.service import Mesh
from shared.settings import ServingSettings

_log = logging.getLogger(__name__)

HEAD_MAX_BYTES = 65_536
_HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_STATUS_OF = {signal.SIGINT: 130, signal.SIGTERM: 143}
OPEN_SHARE: Final = 0.5
"""Of the grace: how long open requests may take to end. The rest is for what the service closes after them."""
LINGER_S: Final = 0.3
"""How long idle connections stay open in a stop: a request may be on its way already."""


class _Connection(HttpToolsProtocol):
    """Bounds request heads, which the parser itself would take in without end, and lets go without a race."""

    _head_bytes = 0
    _in_head = True
    _requests = 0

    def data_received(self, data: bytes) -> None:
        requests = self._requests
        super().data_received(data)
        # What ends a request belongs to its body, however much of it comes at once.
        if self._in_head and self._requests == requests:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_MAX_BYTES and not self.transport.is_closing():
                self.transport.write(_HEAD_TOO_LARGE)
                self.transport.close()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes = True, 0
        self._requests += 1
        super().on_message_complete()

    def shutdown(self) -> None:
        """Whoever has just connected, or sends the next request already, still gets an answer."""
        if self._is_idle():
            self.loop.call_later(LINGER_S, self._close_when_idle)
        else:
            self.cycle.keep_alive = False

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete  # type: ignore[redundant-expr]  # None at first

    def _close_when_idle(self) -> None:
        if self._is_idle() and not self._head_bytes:
            self.transport.close()


class _Server(uvicorn.Server):
    def __init__(self, app: FastAPI, serving: ServingSettings, ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=_Connection,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=round(serving.keep_alive_s),
                timeout_graceful_shutdown=OPEN_SHARE * serving.stop_grace_s,  # type: ignore[arg-type]  # not only whole ones
            )
        )
        self.stopped_by: int | None = None
        self._mesh: Mesh = app.state.mesh
        self._serving = serving
        self._ready = ready
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        listeners = sockets or []
        await super().startup(sockets=[one for one in listeners if one.family != socket.AF_UNIX])
        for listener in listeners:
            if listener.family == socket.AF_UNIX:  # whoever can open it still needs a token
                self.servers.append(await self._loop.create_unix_server(self._connection, sock=listener))
        if self.stopped_by is None:
            self._ready()

    def _connection(self) -> asyncio.Protocol:
        return _Connection(self.config, self.server_state, self.lifespan.state)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.handle_exit) for number in _STATUS_OF}
        try:
            yield
        finally:
            for number, handler in before.items():
                # On its way out, the process already has its exit status.
                signal.signal(number, handler if self.stopped_by is None else signal.SIG_IGN)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.stopped_by is not None:
            return
        self.stopped_by = sig
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        self._mesh.leaving.set()
        # A service that is not ready yet is known to no balancer.
        asyncio.get_running_loop().call_later(self._serving.drain_lead_s if self.started else 0.0, self._drain)

    def _drain(self) -> None:
        self._mesh.draining.set()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            async with asyncio.timeout(self._serving.stop_grace_s):
                await self._stop_listening(sockets or [])
                await super().shutdown()
        except TimeoutError:
            _log.warning("not everything was closed within the grace of %g s", self._serving.stop_grace_s)

    async def _stop_listening(self, listeners: list[socket.socket]) -> None:
        """Clients that the kernel has let in already are taken over: closing alone would reset their connections."""
        held = [listener.dup() for listener in listeners]
        for server in self.servers:
            server.close()
        for listener in listeners:
            listener.close()
        for listener in held:
            with listener, contextlib.suppress(OSError):  # none is left
                while True:
                    client, _ = listener.accept()
                    client.setblocking(False)
                    await asyncio.get_running_loop().connect_accepted_socket(self._connection, client)


def serve(
    app: FastAPI,
    *,
    sockets: list[socket.socket],
    serving: ServingSettings,
    ready: Callable[[], None] = lambda: None,
) -> int:
    """Serve on listening sockets, Unix ones too, until a signal ends it.

    Returns the exit status: 130 for INT, 143 for TERM, 1 when the application did not start. `ready` is called
    once requests are answered.
    """
    _allow_many_connections()
    server = _Server(app, serving, ready)
    try:
        server.run(sockets=sockets)
    except SystemExit:  # uvicorn's word for an application that did not start; its log line says why
        return 1
    return _STATUS_OF.get(signal.Signals(server.stopped_by), 0) if server.stopped_by is not None else 0


def _allow_many_connections() -> None:
    """Systems start processes with 1,024 open files although they allow more; a stream needs two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
