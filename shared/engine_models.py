"""Which models are served by the configured engines: the models get their addresses, and what cannot be is told."""

from collections.abc import Iterator
from typing import Final

from shared.engines import LAST_PORT
from shared.errors import ConfigurationProblem, unknown_name
from shared.settings import LoadedSettings, Settings

_WITHOUT_SERVER: Final = frozenset({"scripted", "replay"})


def pointed_at_engines(loaded: LoadedSettings) -> LoadedSettings:
    """The same configuration in which models have the addresses of the engines that serve them."""
    models, sources = dict(loaded.settings.models), dict(loaded.sources)
    for engines, model in _served(loaded.settings):
        if model in models and models[model].upstream not in _WITHOUT_SERVER:
            base_urls = loaded.settings.engines[engines].base_urls
            models[model] = models[model].model_copy(update={"base_url": base_urls})
            sources[f"models.{model}.base_url"] = f"engines.{engines}"
    return LoadedSettings(loaded.settings.model_copy(update={"models": models}), sources)


def engine_problems(loaded: LoadedSettings) -> list[ConfigurationProblem]:
    """What is wrong with the configured engines; empty when nothing is. To be asked before models have addresses."""
    told = [*_model_problems(loaded.settings), *_port_problems(loaded.settings)]
    return [ConfigurationProblem(loaded.source_of(key), key, message) for key, message in told]


def _served(settings: Settings) -> Iterator[tuple[str, str]]:
    """Each entry of engines with each model that it serves."""
    for name, entry in settings.engines.items():
        for model in entry.models or (name,):
            yield name, model


def _model_problems(settings: Settings) -> Iterator[tuple[str, str]]:
    """Keys, and what is wrong with them."""
    served_by: dict[str, str] = {}
    for name, model in _served(settings):
        engines, entry = f"engines.{name}", settings.models.get(model)
        first = served_by.setdefault(model, engines)
        if entry is None:
            yield engines, f"{unknown_name('model', model, settings.models)} It is named in `models`, or by the entry."
        elif first != engines:
            yield engines, f"the model '{model}' is served by {first} already: leave it out of one of the two."
        elif entry.upstream in _WITHOUT_SERVER:
            yield f"models.{model}.upstream", f"'{entry.upstream}' asks no server, so {engines} cannot serve it."
        elif "base_url" in entry.options:
            yield (
                f"models.{model}.base_url",
                f"{engines} serves this model and fills this in: leave out one of the two.",
            )


def _port_problems(settings: Settings) -> Iterator[tuple[str, str]]:
    owners: dict[str, str] = {}
    for name, entry in settings.engines.items():
        for part, program in entry.programs.items():
            key = f"engines.{name}.port" if part.isdigit() else f"engines.{name}.{part}.port"
            what = f"engine {part} of {name}" if part.isdigit() else f"the {part} of {name}"
            if program.port > LAST_PORT:
                yield key, f"there is no port {program.port} for {what}."
            elif (owner := owners.setdefault(program.url, what)) != what:
                yield key, f"{program.url} belongs to {owner} already, so {what} cannot listen there."
