"""A mesh of one's own for the length of a `with` block: `paddock run` and `paddock demo` without `--url`.

The launcher is a fresh process and no fork of the caller, which may have threads and an event loop. One
socket joins the two: over it the launcher tells that it is ready or why it failed, and its end, however
the caller ended, stops the mesh.
"""

import contextlib
import json
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import SecretStr

from services.launcher.children import REAP_S
from services.launcher.engines import longest_start_s
from services.launcher.mesh import run_mesh, with_urls
from services.launcher.stopping import stop_plan
from shared.errors import ConfigurationError
from shared.settings import SERVICE_NAMES, LoadedSettings, ServicesSettings

_INTERPRETER_S = 10.0  # for the launcher's own start, on top of the services'
_READ_BYTES = 65536
_DRAIN_KEYS = {"serving.drain_lead_s", "serving.stop_grace_s"}


class EmbeddedMeshError(Exception):
    """The embedded mesh did not become ready, or ended by itself; the message holds the launcher's sentences."""


@dataclass(frozen=True, slots=True)
class EmbeddedMesh:
    """A mesh that is ready: its configuration has the actual URLs and the mesh token."""

    loaded: LoadedSettings

    @property
    def environment_url(self) -> str:
        return self.loaded.settings.services.url_of("environment")


@contextlib.contextmanager
def embedded_mesh(
    loaded: LoadedSettings,
    *,
    start_timeout_s: float = 60.0,
    log_path: Path | None = None,
    progress: Callable[[str], None] = lambda sentence: None,
) -> Iterator[EmbeddedMesh]:
    """Run the four services on free loopback ports, and the model engines where some are configured.

    The services log to `log_path`, else to standard error; `progress` gets sentences about the start of engines.
    All processes are gone afterwards, also after an exception or Ctrl-C. A mesh that ends by itself interrupts
    the block like a Ctrl-C would (main thread only).

    Raises:
        EmbeddedMeshError: it was not ready within `start_timeout_s` and the engines' own time, a service or an
            engine failed, or it ended early.
    """
    private = _private(loaded)
    ready_s = start_timeout_s + _INTERPRETER_S + longest_start_s(private.settings)
    ours, theirs = socket.socketpair()
    with ours, _log_file(log_path) as log_fd:
        with theirs:
            launcher = subprocess.Popen(
                [sys.executable, "-P", "-m", "services.launcher.embedded", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=log_fd,
                stderr=log_fd,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a Ctrl-C is the caller's; the mesh lives until the caller is done
            )
        try:
            _send(launcher, private, start_timeout_s)
            mesh = EmbeddedMesh(with_urls(private, _await_ready(ours, ready_s, progress)))
            with _Watch(ours):
                yield mesh
        finally:
            _stop(launcher, stop_plan(private).times_s[-1] + 2 * REAP_S)


class _Watch:
    """Interrupts the block when the mesh ends before it does, and turns the interrupt into its reason."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._in_main_thread = threading.current_thread() is threading.main_thread()
        self._lock = threading.Lock()
        self._over = False
        self._ended_early = False
        self._thread = threading.Thread(target=self._watch, name="embedded mesh watch", daemon=True)

    def __enter__(self) -> None:
        self._channel.settimeout(None)
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            with self._lock:
                self._over = True
            with contextlib.suppress(OSError):  # the other end is gone already
                self._channel.shutdown(socket.SHUT_RD)
            self._thread.join()
        except KeyboardInterrupt:
            if not self._ended_early:
                raise
        if self._ended_early and (error is None or isinstance(error, KeyboardInterrupt)):
            raise EmbeddedMeshError("The mesh ended by itself while it was in use; its log says why.") from error

    def _watch(self) -> None:
        while self._channel.recv(_READ_BYTES):
            pass
        with self._lock:
            self._ended_early = not self._over
            if self._ended_early and self._in_main_thread:
                # A real signal: it also ends a wait that the main thread is in.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _private(loaded: LoadedSettings) -> LoadedSettings:
    """The configuration on free loopback ports, with a token even where none is configured.

    Its drain is the shortest: there is no balancer, and its only client is done with it.
    """
    on_free_ports = with_urls(loaded, {name: "http://127.0.0.1:0" for name in SERVICE_NAMES})
    security = loaded.settings.security
    if security.mesh_token is None:
        security = security.model_copy(update={"mesh_token": SecretStr(secrets.token_urlsafe(32))})
    settings = on_free_ports.settings.model_copy(update={"security": security})
    kept = {key: source for key, source in loaded.sources.items() if key not in _DRAIN_KEYS}
    return LoadedSettings(settings, kept)


@contextlib.contextmanager
def _log_file(path: Path | None) -> Iterator[int]:
    if path is None:
        yield sys.__stderr__.fileno() if sys.__stderr__ is not None else subprocess.DEVNULL
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        yield file.fileno()


def _send(launcher: subprocess.Popen[bytes], loaded: LoadedSettings, start_timeout_s: float) -> None:
    """Hand over the configuration, secrets and all, where no other process can read it."""
    assert launcher.stdin is not None
    with contextlib.suppress(BrokenPipeError), launcher.stdin:  # it died: the missing answer tells
        launcher.stdin.write(pickle.dumps((loaded, start_timeout_s)))


def _await_ready(ours: socket.socket, timeout_s: float, progress: Callable[[str], None]) -> dict[Any, str]:
    """The services' URLs, once they are ready."""
    deadline = time.monotonic() + timeout_s
    reasons: list[str] = []
    rest = b""
    while True:
        ours.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            data = ours.recv(_READ_BYTES)
        except TimeoutError as error:
            raise EmbeddedMeshError(f"The mesh was not ready within {timeout_s:g} s.") from error
        *lines, rest = (rest + data).split(b"\n")
        for message in map(json.loads, lines):
            if "urls" in message:
                return dict(message["urls"])
            if "progress" in message:
                progress(message["progress"])
            else:
                reasons.append(message["reason"])
        if not data:
            raise EmbeddedMeshError(
                f"The mesh did not start. {' '.join(reasons) or 'Its launcher ended without a word.'}"
            )


def _stop(launcher: subprocess.Popen[bytes], timeout_s: float) -> None:
    try:
        launcher.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(timeout_s)
    finally:
        launcher.kill()  # no-op when it has ended; otherwise the services end with it
        launcher.wait()


def _launch(channel_fd: int) -> int:
    """The launcher's side."""
    loaded, start_timeout_s = pickle.load(sys.stdin.buffer)
    os.set_inheritable(channel_fd, False)  # its end must mean the end of the launcher, whatever an engine leaves behind
    ready = False

    def tell(message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the caller is gone: the lifeline tells
            os.write(channel_fd, json.dumps(message).encode() + b"\n")

    def say(sentence: str) -> None:
        if ready:
            print(sentence, file=sys.stderr, flush=True)
        else:
            tell({"reason": sentence})

    def on_ready(services: ServicesSettings) -> None:
        nonlocal ready
        ready = True
        tell({"urls": {name: services.url_of(name) for name in SERVICE_NAMES}})

    try:
        return run_mesh(
            loaded,
            on_death="restart",
            announce=say,
            progress=lambda sentence: tell({"progress": sentence}),
            on_ready=on_ready,
            lifeline_fd=channel_fd,
            start_timeout_s=start_timeout_s,
        )
    except ConfigurationError as error:
        say(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(_launch(int(sys.argv[1])))
