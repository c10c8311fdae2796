"""What `paddock up` and `paddock serve` take, and say of themselves."""

import argparse
from typing import Any, Final

from shared.settings import SERVICE_NAMES

UP_TEXT: Final = """\
Prints their addresses once all are ready. Where the configuration has `engines`, those are started, too: first
a cache, then the engines, then a router; their output goes to files below state_dir/engines.

TERM or Ctrl-C stops the environment first, so that episodes under way are ended in good order while their peers
still serve, then everything else. Nothing is left after 5 seconds, unless the configuration itself asks for more
(serving.drain_lead_s, serving.stop_grace_s, engines.<name>.stop_grace_s). Further signals change nothing.

Exit status: 143 or 130 after TERM or Ctrl-C, 1 when a service or an engine failed, 2 for a wrong call or
configuration."""

SERVE_TEXT: Final = """\
For containers and clusters. A service that listens on anything but loopback needs PADDOCK_MESH_TOKEN.

After TERM or Ctrl-C /readyz answers 503 while the service goes on serving for serving.drain_lead_s, so that a
balancer notices; then it refuses new work, ends open waits and streams, and exits within serving.stop_grace_s.
Give it a little more than the two together before it is killed. Further signals change nothing.

Exit status: 143 after TERM, 130 after Ctrl-C, 1 when it failed, 2 for a wrong call or configuration."""

_WORKERS: Final = "--workers"


def add_up_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--on-death",
        choices=["restart", "end"],
        default="restart",
        help="what happens when a service or an engine ends by itself, also with status 0: start it again, 3 times"
        " a minute at most (the default), or end all; before all are ready it always ends all",
    )
    _add_workers(command, "every service")


def add_serve_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("service", choices=SERVICE_NAMES, type=lambda name: name.replace("-", "_"))
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    command.add_argument("--port", type=int, help="port to listen on (default: that of the service's configured URL)")
    _add_workers(command, "the service")


def _add_workers(command: argparse.ArgumentParser, of_what: str) -> None:
    command.add_argument(
        _WORKERS,
        type=int,
        metavar="N",
        help=f"processes of {of_what}, which share its port (default: serving.workers, 1); a worker that dies is"
        " started again; more than one need a store that they share (store.url)",
    )


def settings_of(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The settings that the command line sets, by option."""
    workers = getattr(arguments, "workers", None)
    return {} if workers is None else {_WORKERS: {"serving": {"workers": workers}}}
