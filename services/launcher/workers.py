"""Services as processes: one or several workers each, which share the service's listeners.

What a worker does is the service's; when it is started again is the supervisor's.
"""

import contextlib
import gc
import importlib
import logging
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from services.launcher.children import Supervisor
from services.launcher.fork import Child
from services.launcher.signals import SignalInbox
from services.launcher.stopping import MARGIN_S
from shared.errors import ConfigurationError
from shared.settings import LoadedSettings, ServiceName

if TYPE_CHECKING:  # a caller that only embeds a mesh need not wait for this import
    from fastapi import FastAPI

_ALSO_PRELOADED: Final = ("uvloop", "httptools", "uvicorn.lifespan.on", "uvicorn.protocols.http.httptools_impl")
_log = logging.getLogger(__name__)


def application(name: ServiceName, loaded: LoadedSettings) -> "FastAPI":
    """The application of one service.

    Raises:
        ConfigurationError: it cannot be configured like this.
    """
    app: FastAPI = importlib.import_module(f"services.{name}.app").create_app(loaded)
    return app


def preload(names: Sequence[ServiceName]) -> None:
    """Import once what the services need, for all to share. Starts no thread and no event loop."""
    for module in ("shared.http.serve", *_ALSO_PRELOADED, *(f"services.{name}.app" for name in names)):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collector that never touches these objects leaves their pages shared


@contextlib.contextmanager
def metrics_folder(workers: int) -> Iterator[Path | None]:
    """Where workers share their metrics; None for one worker."""
    if workers == 1:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="paddock-metrics-") as folder:
        yield Path(folder)


def workers_of(
    name: ServiceName,
    loaded: LoadedSettings,
    listeners: Sequence[socket.socket],
    metrics: Path | None,
    stop_stage: int = 0,
) -> list[Child]:
    """As many workers of the service as are configured; with more than one, they share a `metrics_folder`."""

    def child(number: int) -> Child:
        def run(ready: Callable[[], None]) -> int:
            if metrics is not None:
                from shared.http.worker_metrics import share_metrics

                share_metrics(metrics / name, number)
            try:
                return _serve(name, loaded, listeners, ready)
            except ConfigurationError as error:
                raise SystemExit(str(error)) from error

        what = name if metrics is None else f"{name} worker {number}"
        return Child(what, run, tuple(listeners), stop_stage=stop_stage)

    if metrics is not None:
        (metrics / name).mkdir()
    return [child(number) for number in range(1, loaded.settings.serving.workers + 1)]


def serve_service(name: ServiceName, loaded: LoadedSettings, host: str, port: int | None) -> int:
    """`paddock serve`: one service in the foreground, in this process or, with several workers, in children of it.

    Listens on the port of the service's URL where `port` is None. Returns the exit status.

    Raises:
        ConfigurationError: it cannot be configured like this, or cannot listen there.
    """
    from shared.http.listeners import listen, unix_listeners
    from shared.telemetry import configure_logging

    settings = loaded.settings
    configure_logging(name, settings.serving.log_level)
    at = getattr(settings.services, name).port if port is None else port
    with unix_listeners(name, settings) as beside, metrics_folder(settings.serving.workers) as metrics:
        listeners = [listen(host, at, settings), *beside]
        if metrics is None:
            return _serve(name, loaded, listeners, lambda: None)
        return _supervise(name, loaded, listeners, metrics)


def _supervise(name: ServiceName, loaded: LoadedSettings, listeners: Sequence[socket.socket], metrics: Path) -> int:
    serving = loaded.settings.serving
    with SignalInbox() as inbox:
        preload([name])
        return Supervisor(
            workers_of(name, loaded, listeners, metrics),
            inbox,
            say=_log.warning,
            on_ready=lambda: _log.info("all %d workers are ready", serving.workers),
            on_death="restart",
            stop_times_s=(serving.drain_lead_s + serving.stop_grace_s + MARGIN_S,),
        ).run()


def _serve(
    name: ServiceName, loaded: LoadedSettings, listeners: Sequence[socket.socket], ready: Callable[[], None]
) -> int:
    from shared.http.serve import serve
    from shared.telemetry import configure_logging

    serving = loaded.settings.serving
    configure_logging(name, serving.log_level)
    return serve(application(name, loaded), sockets=[*listeners], serving=serving, ready=ready)
