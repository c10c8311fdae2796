"""The `paddock` command: reads words, calls the part that does the work, prints errors as sentences."""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shared.configuration import load_settings
from shared.errors import ConfigurationError
from shared.settings import SERVICE_NAMES, LoadedSettings

if TYPE_CHECKING:
    from services.launcher.embedded import EmbeddedMesh

USAGE_ERROR: Final = 2
INTERRUPTED: Final = 130

_DESCRIPTION = """\
Paddock runs agent harnesses on prepared rows and grades what they did.

  paddock demo                          shipped rows, scripted model, offline
  paddock run rows.jsonl                your rows; brings the services up and down by itself
  paddock up                            the four services, until Ctrl-C
  paddock run rows.jsonl --url URL      your rows against services that run already

To use your own model, set PADDOCK_MODEL_BASE_URL (any Chat Completions endpoint, e.g.
http://127.0.0.1:8000/v1), PADDOCK_MODEL_NAME and, where it needs one, PADDOCK_MODEL_API_KEY.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status (2: a wrong call or configuration)."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return INTERRUPTED
    except ConfigurationError as error:
        print("Paddock cannot start with this configuration:", file=sys.stderr)
        for problem in error.problems:
            print(f"  {problem}", file=sys.stderr)
        return USAGE_ERROR
    except BrokenPipeError:
        # Whoever read the output has what it wanted, as in `paddock schema row | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paddock", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_up(commands)
    _add_serve(commands)
    _add_run(commands)
    _add_episodes(commands)
    _add_demo(commands)
    _add_looking(commands)
    _add_selfcheck(commands)
    return parser


_Commands = argparse._SubParsersAction


def _command(
    commands: "_Commands[argparse.ArgumentParser]", name: str, summary: str, text: str
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=f"{summary}\n\n{text}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument(
        "--config",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="configuration file; may be repeated, later files win key by key"
        " (else PADDOCK_CONFIG, else ./paddock.yaml, else the embedded default)",
    )
    return command


def _add_up(commands: "_Commands[argparse.ArgumentParser]") -> None:
    from services.launcher.arguments import UP_TEXT, add_up_arguments

    command = _command(commands, "up", "Start the four services and keep them running.", UP_TEXT)
    add_up_arguments(command)
    command.set_defaults(run=_up)


def _add_serve(commands: "_Commands[argparse.ArgumentParser]") -> None:
    from services.launcher.arguments import SERVE_TEXT, add_serve_arguments

    command = _command(commands, "serve", "Run one service in the foreground.", SERVE_TEXT)
    add_serve_arguments(command)
    command.set_defaults(run=_serve)


def _add_run(commands: "_Commands[argparse.ArgumentParser]") -> None:
    from services.collector.arguments import add_run_arguments

    command = _command(
        commands,
        "run",
        "Run prepared rows and write their graded results.",
        "Rows that do not fit are reported by line; the others run. Every result is written at once, so that\n"
        "--resume goes on where a run was ended. Exit status: 0 every row has a result, 1 some have not,\n"
        "2 wrong call or configuration.",
    )
    add_run_arguments(command)
    command.set_defaults(run=_run)


def _add_episodes(commands: "_Commands[argparse.ArgumentParser]") -> None:
    from services.collector.episodes import add_episodes_arguments

    command = _command(
        commands,
        "episodes",
        "List, watch or cancel the episodes of an environment server.",
        "For what was sent with `Prefer: respond-async`, or goes on after a run was left.",
    )
    add_episodes_arguments(command)
    command.set_defaults(run=_episodes)


def _add_demo(commands: "_Commands[argparse.ArgumentParser]") -> None:
    command = _command(
        commands,
        "demo",
        "Run the shipped rows on the embedded mesh and show their rewards.",
        "Needs no network: the model is scripted, and some of its answers are wrong on purpose.",
    )
    command.set_defaults(run=_demo)


def _add_looking(commands: "_Commands[argparse.ArgumentParser]") -> None:
    doctor = _command(
        commands,
        "doctor",
        "Check what this machine and this configuration can do.",
        "Says of each missing part how to get it and what works without it. Exit status 1 when the\n"
        "configured mesh could not run.",
    )
    doctor.set_defaults(run=_doctor)
    config = _command(
        commands,
        "config",
        "Show the effective configuration and where each value comes from.",
        "Secrets are hidden.",
    )
    config.add_argument("--defaults", action="store_true", help="show every key with its default and meaning instead")
    config.set_defaults(run=_config)
    schema = _command(
        commands,
        "schema",
        "Print the JSON schema of a message or of the configuration.",
        "For editors and for whoever prepares rows.",
    )
    from services.describe import SCHEMAS

    schema.add_argument("name", choices=sorted(SCHEMAS), help="what to describe")
    schema.set_defaults(run=_schema)


def _add_selfcheck(commands: "_Commands[argparse.ArgumentParser]") -> None:
    command = _command(
        commands,
        "selfcheck",
        "Check that a sandbox provider keeps its contract on this machine.",
        "PROVIDER is a configured sandbox, or a provider such as `local` or `docker` with its defaults. Makes and\n"
        "removes sandboxes of its own only. Exit status 1 when a check failed.",
    )
    command.add_argument("provider", metavar="PROVIDER", help="what to check")
    command.add_argument("--repeat", type=int, default=1, metavar="N", help="run all checks N times (default: 1)")
    command.add_argument("--image", help="image of the sandboxes; it needs a POSIX shell and coreutils")
    command.add_argument("--only", default="", metavar="TEXT", help="only checks with this text in their name")
    command.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the provider, such as isolation=none",
    )
    command.set_defaults(run=_selfcheck)


def _loaded(arguments: argparse.Namespace) -> LoadedSettings:
    """The configuration, with every plug-in's options checked."""
    from services.describe import check_plugins
    from services.launcher.arguments import settings_of

    return load_settings(arguments.config, options=settings_of(arguments), check=check_plugins)


def _up(arguments: argparse.Namespace) -> int:
    from services.launcher.mesh import run_mesh

    return run_mesh(_loaded(arguments), on_death=arguments.on_death)


def _serve(arguments: argparse.Namespace) -> int:
    from services.launcher.arguments import settings_of
    from services.launcher.workers import serve_service

    loaded = load_settings(arguments.config, options=settings_of(arguments))
    return serve_service(arguments.service, loaded, arguments.host, arguments.port)


def _run(arguments: argparse.Namespace) -> int:
    from services.collector.arguments import options_of
    from services.collector.options import RunError, check_options
    from services.collector.reading import url_of_run
    from services.collector.run import run

    options = options_of(arguments)
    try:
        check_options(options)
        url = arguments.url or url_of_run(options)
    except RunError as error:
        print(error, file=sys.stderr)
        return error.status
    if url is not None:
        return run(options, url)
    with _own_mesh(arguments) as mesh:
        return run(replace(options, own_services=True), mesh.environment_url, _client_token(mesh.loaded))


def _episodes(arguments: argparse.Namespace) -> int:
    from services.collector.episodes import episodes

    loaded = load_settings(arguments.config)
    return episodes(arguments, arguments.url or loaded.settings.services.url_of("environment"), _client_token(loaded))


def _demo(arguments: argparse.Namespace) -> int:
    from services.collector.demo_rows import run_demo

    with _own_mesh(arguments) as mesh:
        policy = mesh.loaded.settings.models.get("policy")
        scripted = policy is not None and policy.upstream == "scripted"
        return run_demo(mesh.environment_url, _client_token(mesh.loaded), scripted=scripted)


def _client_token(loaded: LoadedSettings) -> str | None:
    token = loaded.settings.security.client_token
    return None if token is None else token.get_secret_value()


@contextmanager
def _own_mesh(arguments: argparse.Namespace) -> Iterator["EmbeddedMesh"]:
    """Four services for the length of one command; they log to a file, so that the screen is the command's."""
    from services.launcher.embedded import EmbeddedMeshError, embedded_mesh

    loaded = _loaded(arguments)
    log_path = loaded.settings.state_dir / "mesh.log"
    began = time.monotonic()
    print("Starting the four services …", file=sys.stderr)
    try:
        with embedded_mesh(loaded, log_path=log_path, progress=lambda told: print(told, file=sys.stderr)) as mesh:
            services = mesh.loaded.settings.services
            print(f"Ready after {time.monotonic() - began:.1f} s; their log is {log_path}.", file=sys.stderr)
            for name in SERVICE_NAMES:
                print(f"  {name:<12} {services.url_of(name)}", file=sys.stderr)
            yield mesh
    except EmbeddedMeshError as error:
        raise SystemExit(f"The services failed: {error}\nTheir log is {log_path}.") from error


def _doctor(arguments: argparse.Namespace) -> int:
    from services.doctor import examine

    return examine(lambda: _loaded(arguments), print)


def _selfcheck(arguments: argparse.Namespace) -> int:
    from shared.sandbox.selfcheck.report import selfcheck
    from shared.sandbox.selfcheck.run import Subject

    if wrong := [option for option in arguments.option if "=" not in option]:
        print(f"--option takes NAME=VALUE, not '{wrong[0]}'.", file=sys.stderr)
        return USAGE_ERROR
    loaded = _loaded(arguments)
    more = dict(option.split("=", 1) for option in arguments.option)
    try:
        subject = Subject.of(arguments.provider, loaded.settings, more, arguments.image)
    except (LookupError, ValueError) as error:
        print(error, file=sys.stderr)
        return USAGE_ERROR
    return selfcheck(subject, repeat=arguments.repeat, only=arguments.only)


def _config(arguments: argparse.Namespace) -> int:
    from services.describe import defaults_table, effective

    for line in defaults_table() if arguments.defaults else effective(_loaded(arguments)):
        print(line)
    return 0


def _schema(arguments: argparse.Namespace) -> int:
    from services.describe import schema_of

    print(schema_of(arguments.name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
