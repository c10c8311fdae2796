"""`paddock up`: the four services as children of one preloaded launcher.

Owns which services there are, where they listen and how long they may take to stop. Starting, watching and
stopping processes is the supervisor's; serving HTTP is the service's own.
"""

import errno
import gc
import importlib
import os
import socket
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from services.launcher.children import KILL_AFTER_S, OnDeath, Supervisor
from services.launcher.fork import Child
from services.launcher.signals import SignalInbox
from shared.errors import ConfigurationError, ConfigurationProblem
from shared.settings import SERVICE_NAMES, LoadedSettings, ServiceName, ServicesSettings

if TYPE_CHECKING:  # a caller that only embeds a mesh need not wait for this import
    from fastapi import FastAPI

MARGIN_S = 0.5
"""Between the end of a service's own grace and KILL."""

_ALSO_PRELOADED = ("uvloop", "httptools", "uvicorn.lifespan.on", "uvicorn.protocols.http.httptools_impl")

Listeners = Mapping[ServiceName, socket.socket]


def say(sentence: str) -> None:
    """Print a line at once; when nobody reads standard output any more, go on without."""
    try:
        print(sentence, flush=True)
    except BrokenPipeError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())  # else the interpreter's last flush changes the exit status
        os.close(null)


def run_mesh(
    loaded: LoadedSettings,
    *,
    on_death: OnDeath,
    announce: Callable[[str], None] = say,
    host: str | None = None,
    on_ready: Callable[[ServicesSettings], None] | None = None,
    lifeline_fd: int | None = None,
    start_timeout_s: float = 60.0,
) -> int:
    """Start the four services, watch them, and stop them on TERM, INT or HUP; the exit status.

    A service listens on `host`, else on the host of its URL; port 0 there means any free port. `announce`
    gets one sentence per event, and the addresses unless `on_ready` takes them.

    Raises:
        ConfigurationError: a service cannot listen where it is configured to; nothing was started then.
    """
    with SignalInbox() as inbox:
        listeners = _listen(loaded, host)
        preload()
        placed, kill_after_s = _within_the_stop_time(with_urls(loaded, _actual_urls(loaded, listeners)))
        services = placed.settings.services

        def ready() -> None:
            if on_ready is not None:
                on_ready(services)
                return
            for name in SERVICE_NAMES:
                announce(f"{name:<12} {services.url_of(name)}")
            announce("All services are ready. Ctrl-C stops them.")

        return Supervisor(
            [_child(name, placed, listeners[name]) for name in SERVICE_NAMES],
            inbox,
            say=announce,
            on_ready=ready,
            on_death=on_death,
            start_timeout_s=start_timeout_s,
            kill_after_s=kill_after_s,
            lifeline_fd=lifeline_fd,
        ).run()


def preload() -> None:
    """Import once what every service needs, for all to share. Starts no thread and no event loop."""
    for module in ("shared.http.serve", *_ALSO_PRELOADED, *(f"services.{name}.app" for name in SERVICE_NAMES)):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collector that never touches these objects leaves their pages shared


def with_urls(loaded: LoadedSettings, urls: Mapping[ServiceName, str]) -> LoadedSettings:
    """The same configuration with the services elsewhere."""
    services = loaded.settings.services
    moved: dict[str, Any] = {
        name: getattr(services, name).model_copy(update={"url": url}) for name, url in urls.items()
    }
    settings = loaded.settings.model_copy(update={"services": services.model_copy(update=moved)})
    return LoadedSettings(settings, loaded.sources)


def with_port(url: str, port: int) -> str:
    """The URL with another port."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return urlunsplit(parts._replace(netloc=f"{host}:{port}"))


def application(name: ServiceName, loaded: LoadedSettings) -> "FastAPI":
    """The application of one service.

    Raises:
        ConfigurationError: it cannot be configured like this.
    """
    app: FastAPI = importlib.import_module(f"services.{name}.app").create_app(loaded)
    return app


def _child(name: ServiceName, loaded: LoadedSettings, listener: socket.socket) -> Child:
    def run(ready: Callable[[], None]) -> int:
        from shared.http.serve import serve
        from shared.telemetry import configure_logging

        configure_logging(name, loaded.settings.serving.log_level)
        try:
            app = application(name, loaded)
        except ConfigurationError as error:
            raise SystemExit(str(error)) from error
        return serve(app, sockets=[listener], settings=loaded.settings, ready=ready)

    return Child(name, run, (listener,))


def _listen(loaded: LoadedSettings, host: str | None) -> Listeners:
    """Open all listeners, so that a port that is taken is told before anything is started."""
    from shared.http.serve import listen

    listeners: dict[ServiceName, socket.socket] = {}
    problems: list[ConfigurationProblem] = []
    for name in SERVICE_NAMES:
        url = loaded.settings.services.url_of(name)
        at = host or urlsplit(url).hostname or "127.0.0.1"
        port = getattr(loaded.settings.services, name).port
        try:
            listeners[name] = listen(at, port, loaded.settings)
        except ConfigurationError as error:
            taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
            problems += [_port_taken(loaded, name, at, port)] if taken else error.problems
    if problems:
        for listener in listeners.values():
            listener.close()
        raise ConfigurationError(problems)
    return listeners


def _port_taken(loaded: LoadedSettings, name: ServiceName, host: str, port: int) -> ConfigurationProblem:
    key = f"services.{name}.url"
    elsewhere = f"PADDOCK_{name.upper()}_URL=http://{host}:{port + 1}"
    return ConfigurationProblem(
        loaded.source_of(key) if key in loaded.sources else "default",
        key,
        f"port {port} on {host} is taken, so the {name} service cannot listen there. Stop what listens there (perhaps"
        f" another `paddock up`), or move the service, for example with {elsewhere}.",
    )


def _actual_urls(loaded: LoadedSettings, listeners: Listeners) -> dict[ServiceName, str]:
    services = loaded.settings.services
    return {name: with_port(services.url_of(name), listeners[name].getsockname()[1]) for name in listeners}


def _within_the_stop_time(loaded: LoadedSettings) -> tuple[LoadedSettings, float]:
    """Fit the services' own stop times under the launcher's, and say when the launcher kills.

    One machine has no balancer that needs a lead, and a person waits for the prompt: everything ends within
    five seconds unless the configuration itself asks for a lead or a grace.
    """
    serving = loaded.settings.serving
    lead_s = serving.drain_lead_s if "serving.drain_lead_s" in loaded.sources else 0.0
    grace_s = serving.stop_grace_s if "serving.stop_grace_s" in loaded.sources else KILL_AFTER_S - MARGIN_S
    fitted = serving.model_copy(update={"drain_lead_s": lead_s, "stop_grace_s": grace_s})
    settings = loaded.settings.model_copy(update={"serving": fitted})
    return LoadedSettings(settings, loaded.sources), lead_s + grace_s + MARGIN_S
