"""Run one service's application: uvicorn with a drain that loses nothing.

TERM or INT: `readyz` answers 503 at once while the service goes on serving for the drain lead; then open
waits end, the listener closes, and what is still open is cancelled after the grace. Further signals
change nothing.
"""

import asyncio
import resource
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import cast

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shared.errors import ConfigurationError, ConfigurationProblem
from shared.settings import ServingSettings, Settings, is_loopback

HEAD_MAX_BYTES = 65_536
_HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_STATUS_OF = {signal.SIGINT: 130, signal.SIGTERM: 143}


class _BoundedHead(HttpToolsProtocol):
    """Ends a connection whose request head grows beyond all measure; the parser itself would take it all in."""

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


class _Server(uvicorn.Server):
    def __init__(
        self, app: FastAPI, serving: ServingSettings, ready: Callable[[], None], unix_listener: socket.socket | None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=_BoundedHead,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=round(serving.keep_alive_s),
                timeout_graceful_shutdown=max(1, round(serving.stop_grace_s)),
            )
        )
        self.stopped_by: int | None = None
        self._app = app
        self._lead_s = serving.drain_lead_s
        self._ready = ready
        self._unix_listener = unix_listener
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets=sockets)
        if self._unix_listener is not None:
            self.servers.append(await self._serve_socket(self._unix_listener))
        if self.stopped_by is None:
            self._ready()

    async def _serve_socket(self, listener: socket.socket) -> asyncio.base_events.Server:
        """The same application on a Unix socket; whoever can open it still needs a token."""

        def protocol() -> asyncio.Protocol:
            protocol_class = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
            return protocol_class(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

        return await asyncio.get_running_loop().create_unix_server(protocol, sock=listener)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.stopped_by is not None:
            return
        self.stopped_by = sig
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._app.state.mesh.draining.set()
        asyncio.get_running_loop().call_later(self._lead_s, self._exit)

    def _exit(self) -> None:
        self.should_exit = True


def serve(
    app: FastAPI,
    *,
    sockets: list[socket.socket],
    settings: Settings,
    ready: Callable[[], None] = lambda: None,
) -> int:
    """Serve on listening sockets until a signal ends it; returns the exit status (130 for INT, 143 for TERM).

    `ready` is called once requests are answered.
    """
    _allow_many_connections()
    proxy_socket = settings.services.model_proxy.socket_path
    socket_path = proxy_socket if app.state.mesh.name == "model_proxy" else None
    server = _Server(app, settings.serving, ready, None if socket_path is None else _listen_on_path(socket_path))
    try:
        server.run(sockets=sockets)
    except SystemExit as error:
        # uvicorn's word for an application that did not start; its log line says why.
        return error.code if isinstance(error.code, int) else 1
    finally:
        if socket_path is not None:
            socket_path.unlink(missing_ok=True)
    return _STATUS_OF.get(signal.Signals(server.stopped_by), 0) if server.stopped_by is not None else 0


def _allow_many_connections() -> None:
    """Systems start processes with 1,024 open files although they allow more; a stream needs two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _listen_on_path(path: Path) -> socket.socket:
    """Every user of a sandbox may connect; what protects the models is the token."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o666)
    listener.listen(2048)
    listener.setblocking(False)
    return listener


def listen(host: str, port: int, settings: Settings) -> socket.socket:
    """A listening socket.

    Raises:
        ConfigurationError: the port is taken, the address is not ours, or others could reach a service
            that has no mesh token.
    """
    key = f"{host}:{port}"
    if not is_loopback(host) and settings.security.mesh_token is None:
        raise ConfigurationError(
            [
                ConfigurationProblem(
                    "security", "mesh_token",
                    f"{key} can be reached from other machines, so the mesh needs a token: set PADDOCK_MESH_TOKEN,"
                    " or listen on 127.0.0.1.",
                )
            ]
        )  # fmt: skip
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            [ConfigurationProblem("services", key, f"cannot listen there: {error.strerror}. Is it taken?")]
        ) from error
    listener.setblocking(False)
    return listener
