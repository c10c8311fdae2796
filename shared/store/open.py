"""Open the configured store."""

from urllib.parse import urlsplit

from shared.errors import ConfigurationError, ConfigurationProblem
from shared.ports.store import Store
from shared.settings import LoadedSettings
from shared.store.memory import MemoryStore


def open_store(loaded: LoadedSettings) -> Store:
    """The store of `store.url`.

    Raises:
        ConfigurationError: there is no such kind of store.
    """
    if problems := store_problems(loaded):
        raise ConfigurationError(problems)
    return MemoryStore()


def store_problems(loaded: LoadedSettings) -> list[ConfigurationProblem]:
    """What is wrong with `store.url`; empty when nothing is."""
    kind = urlsplit(loaded.settings.store.url).scheme
    if kind == "memory":
        return []
    message = f"there is no store of kind '{kind}'. Known: memory."
    return [ConfigurationProblem(loaded.source_of("store.url"), "store.url", message)]
