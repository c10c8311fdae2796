"""`paddock up`: the four services, and model engines where they are configured, as children of one launcher.

Owns which services there are and where they listen. Starting, watching and stopping processes is the
supervisor's; serving HTTP is the service's own.
"""

import contextlib
import errno
import os
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from services.launcher.children import OnDeath, Supervisor
from services.launcher.engines import engine_children
from services.launcher.fork import Child
from services.launcher.signals import SignalInbox
from services.launcher.stopping import stop_plan
from services.launcher.workers import metrics_folder, preload, workers_of
from shared.errors import ConfigurationError, ConfigurationProblem
from shared.settings import SERVICE_NAMES, LoadedSettings, ServiceName, ServicesSettings

Listeners = dict[ServiceName, list[socket.socket]]


def say(sentence: str) -> None:
    """Print a line at once; when nobody reads standard output any more, go on without."""
    try:
        # In one piece: the keepers of engines print to the same stream.
        print(f"{sentence}\n", end="", flush=True)
    except BrokenPipeError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())  # else the interpreter's last flush changes the exit status
        os.close(null)


def run_mesh(
    loaded: LoadedSettings,
    *,
    on_death: OnDeath,
    announce: Callable[[str], None] = say,
    progress: Callable[[str], None] = say,
    host: str | None = None,
    on_ready: Callable[[ServicesSettings], None] | None = None,
    lifeline_fd: int | None = None,
    start_timeout_s: float = 60.0,
) -> int:
    """Start the services and engines, watch them, and stop them on TERM, INT or HUP; the exit status.

    A service listens on `host`, else on the host of its URL; port 0 there means any free port. `announce`
    gets one sentence per event, and the addresses unless `on_ready` takes them; `progress` gets sentences
    about the start of engines. `start_timeout_s` is for each service; engines have their own.

    Raises:
        ConfigurationError: a service or an engine cannot listen where it is configured to, or the program of an
            engine is missing; nothing was started then.
    """
    with SignalInbox() as inbox, contextlib.ExitStack() as stack:
        plan = stop_plan(loaded)
        engines = engine_children(loaded, progress, plan.engine_stage)
        listeners = _listen(loaded, host, stack)
        metrics = stack.enter_context(metrics_folder(loaded.settings.serving.workers))
        preload(SERVICE_NAMES)
        placed = with_urls(loaded, _actual_urls(loaded, listeners))
        services = placed.settings.services
        children: list[Child] = []
        for name in SERVICE_NAMES:
            fitted = plan.fitted(placed, name)
            children += workers_of(name, fitted, listeners[name], metrics, plan.stage_of(name))

        def ready() -> None:
            if on_ready is not None:
                on_ready(services)
                return
            for name in SERVICE_NAMES:
                announce(f"{name:<12} {services.url_of(name)}")
            announce("All services are ready. Ctrl-C stops them.")

        return Supervisor(
            [*children, *engines],
            inbox,
            say=announce,
            on_ready=ready,
            on_death=on_death,
            start_timeout_s=start_timeout_s,
            stop_times_s=plan.times_s,
            lifeline_fd=lifeline_fd,
        ).run()


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


def _listen(loaded: LoadedSettings, host: str | None, stack: contextlib.ExitStack) -> Listeners:
    """Open all listeners, so that a port that is taken is told before anything is started."""
    from shared.http.listeners import listen, unix_listeners

    settings = loaded.settings
    listeners: Listeners = {}
    problems: list[ConfigurationProblem] = []
    for name in SERVICE_NAMES:
        at = host or urlsplit(settings.services.url_of(name)).hostname or "127.0.0.1"
        port = getattr(settings.services, name).port
        try:
            listeners[name] = [listen(at, port, settings)]
            stack.callback(listeners[name][0].close)
            listeners[name] += stack.enter_context(unix_listeners(name, settings))
        except ConfigurationError as error:
            taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
            problems += [_port_taken(loaded, name, at, port)] if taken else error.problems
    if problems:
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
    return {name: with_port(services.url_of(name), at[0].getsockname()[1]) for name, at in listeners.items()}
