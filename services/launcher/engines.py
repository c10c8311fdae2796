"""Model engines, their cache and their router as children of the launcher: what each is called with, and when.

The cache starts first, the engines after it, the router last; all stop with the last of the services. How
one of them is kept is in `program.py`; that the models have their addresses is the configuration's doing.
"""

import errno
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final
from urllib.parse import quote

from services.launcher.fork import Child
from services.launcher.program import Program, keep
from shared.engines import EngineSettings, ProgramSettings
from shared.errors import ConfigurationError, ConfigurationProblem
from shared.settings import LoadedSettings, Settings

REPORT_S: Final = 10.0
"""What a program is given on top of its own time to be ready, so that its own account of it comes first."""

_START_STAGES: Final = {"cache": 0, "router": 2}
_ENGINE_STAGE: Final = 1
_WORD: Final = re.compile(r"\{(\w+)\}")
_URLS: Final = "engine_urls"


def engine_children(loaded: LoadedSettings, say: Callable[[str], None], stop_stage: int) -> list[Child]:
    """A child for every program of every entry of `engines`.

    `say` gets sentences about their start.

    Raises:
        ConfigurationError: a program is not there, or something else has its port.
    """
    if problems := [*missing_programs(loaded), *taken_ports(loaded)]:
        raise ConfigurationError(problems)
    children = []
    for name, entry in loaded.settings.engines.items():
        for part, settings in entry.programs.items():
            program = _program(loaded.settings, name, part, settings)
            child = Child(
                program.name,
                _kept(program, say),
                start_stage=_START_STAGES.get(part, _ENGINE_STAGE),
                start_timeout_s=settings.ready_timeout_s + REPORT_S,
                stop_stage=stop_stage,
            )
            children.append(child)
    return children


def missing_programs(loaded: LoadedSettings) -> Iterator[ConfigurationProblem]:
    for key, program in _by_key(loaded.settings):
        if shutil.which(program.command[0]) is None:
            told = f"'{program.command[0]}' is not there: install it, or give its path."
            yield ConfigurationProblem(loaded.source_of(key), f"{key}.command", told)


def taken_ports(loaded: LoadedSettings) -> Iterator[ConfigurationProblem]:
    """Where something listens already. It would answer in the place of the program."""
    for key, program in _by_key(loaded.settings):
        for one in program.engines if isinstance(program, EngineSettings) else [program]:
            if _is_taken(one.host, one.port):
                told = f"port {one.port} on {one.host} is taken, so the program cannot listen there."
                yield ConfigurationProblem(loaded.source_of(key), f"{key}.port", told)


def longest_start_s(settings: Settings) -> float:
    """How long the engines may take until the last of them is ready."""

    def time_s(entry: EngineSettings) -> float:
        one_after_the_other = [part for part in (entry.cache, entry, entry.router) if part is not None]
        return sum(part.ready_timeout_s + REPORT_S for part in one_after_the_other)

    return max((time_s(entry) for entry in settings.engines.values()), default=0.0)


def longest_stop_s(settings: Settings) -> float:
    """The longest grace of all engines, caches and routers."""
    programs = [program for entry in settings.engines.values() for program in entry.programs.values()]
    return max((program.stop_grace_s for program in programs), default=0.0)


def _by_key(settings: Settings) -> Iterator[tuple[str, ProgramSettings]]:
    """Where each kind of program is configured."""
    for name, entry in settings.engines.items():
        yield f"engines.{name}", entry
        for part, program in (("cache", entry.cache), ("router", entry.router)):
            if program is not None:
                yield f"engines.{name}.{part}", program


def _kept(program: Program, say: Callable[[str], None]) -> Callable[[Callable[[], None]], int]:
    return lambda ready: keep(program, ready, say)


def _program(settings: Settings, name: str, part: str, program: ProgramSettings) -> Program:
    entry = settings.engines[name]
    urls = [engine.url for engine in entry.engines]
    words = {"host": program.host, "port": str(program.port), _URLS: ",".join(urls)}
    if entry.cache is not None:
        words["cache_url"] = entry.cache.url
    if part.isdigit():
        devices = range(int(part) * entry.devices, (int(part) + 1) * entry.devices)
        words |= {"index": part, "devices": ",".join(map(str, devices))}
    own = {variable: _filled(value.get_secret_value(), words) for variable, value in program.env.items()}
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PADDOCK_")}
    return Program(
        name=f"engine {name}-{part}" if part.isdigit() else f"{part} of {name}",
        command=tuple(_command(program.command, words, urls)),
        environ={**inherited, **own},
        ready_url=program.url + program.ready_path,
        ready_timeout_s=program.ready_timeout_s,
        stop_grace_s=program.stop_grace_s,
        log_path=settings.state_dir / "engines" / f"{quote(name, safe='')}-{part}.log",
    )


def _command(command: Sequence[str], words: Mapping[str, str], urls: Sequence[str]) -> Iterator[str]:
    """`{engine_urls}` alone becomes one argument per engine; within a longer argument commas part them."""
    for argument in command:
        if argument == f"{{{_URLS}}}":
            yield from urls
        else:
            yield _filled(argument, words)


def _filled(text: str, words: Mapping[str, str]) -> str:
    """Other words in braces stand for themselves: arguments may be JSON."""
    return _WORD.sub(lambda found: words.get(found[1], found[0]), text)


def _is_taken(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:  # an address that is not this machine's is the program's affair
            return error.errno == errno.EADDRINUSE
        return False
