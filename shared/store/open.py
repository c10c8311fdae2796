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
    url = loaded.settings.store.url
    if urlsplit(url).scheme == "memory":
        return MemoryStore()
    raise ConfigurationError(
        [
            ConfigurationProblem(
                loaded.source_of("store.url"),
                "store.url",
                f"there is no store of kind '{urlsplit(url).scheme}'. Known: memory.",
            )
        ]
    )
