"""What a service listens on: a TCP address, and for the model proxy a Unix socket beside it.

Listeners are opened before the processes that serve them, which may be several or be started again.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from shared.errors import ConfigurationError, ConfigurationProblem
from shared.settings import ServiceName, Settings, is_loopback

_BACKLOG: Final = 2048


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
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            [ConfigurationProblem("services", key, f"cannot listen there: {error.strerror}. Is it taken?")]
        ) from error
    listener.setblocking(False)
    return listener


@contextlib.contextmanager
def unix_listeners(name: ServiceName, settings: Settings) -> Iterator[list[socket.socket]]:
    """The Unix sockets of a service: one for the model proxy where it is configured, else none.

    The path goes away afterwards, unless another process has put its own socket there.

    Raises:
        ConfigurationError: it cannot listen there.
    """
    path = settings.services.model_proxy.socket_path
    if name != "model_proxy" or path is None:
        yield []
        return
    try:
        listener = _listen_on_path(path)
    except OSError as error:
        key = "services.model_proxy.socket_path"
        why = error.strerror or str(error)
        raise ConfigurationError([ConfigurationProblem("services", key, f"cannot listen on {path}: {why}.")]) from error
    made = path.stat()
    try:
        yield [listener]
    finally:
        listener.close()
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), made):
                path.unlink()


def _listen_on_path(path: Path) -> socket.socket:
    """Every user of a sandbox may connect; what protects the models is the token."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_socket():  # left behind by a process that was killed
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener
