"""Sandbox providers as the configuration names them, and what is wrong with what it says of them."""

from collections.abc import Iterable
from typing import Final

from shared.errors import ConfigurationProblem, unknown_name
from shared.plugins import PluginFolder
from shared.ports.sandbox import SandboxProvider
from shared.sandbox.context import ProviderContext
from shared.settings import LoadedSettings, Settings

PROVIDERS: Final = PluginFolder("shared.sandbox.providers", "sandbox provider")


def open_provider(name: str, settings: Settings, providers: PluginFolder = PROVIDERS) -> SandboxProvider:
    """The provider of the configured entry `sandboxes.NAME`. It connects on first use.

    Raises:
        LookupError: nothing of that name is configured.
    """
    if name not in settings.sandboxes:
        raise LookupError(unknown_name("sandbox", name, settings.sandboxes))
    entry = settings.sandboxes[name]
    module = providers.module(entry.provider)
    options = providers.options(entry.provider, entry.options)
    provider: SandboxProvider = module.create(options, ProviderContext.of(name, settings))
    return provider


def sandbox_problems(loaded: LoadedSettings, providers: PluginFolder = PROVIDERS) -> list[ConfigurationProblem]:
    """What is wrong with the configured sandboxes; empty when nothing is."""
    problems: list[ConfigurationProblem] = []
    for name, entry in loaded.settings.sandboxes.items():
        key = f"sandboxes.{name}"
        problems += providers.check(entry.provider, entry.options, source=loaded.source_of(key), key=key)
    return problems


def isolation_problems(loaded: LoadedSettings, guarded: Iterable[tuple[str, str]]) -> list[ConfigurationProblem]:
    """Sandboxes that hold something to guard and do not isolate. `guarded`: names and what is to be guarded.

    Only for a configuration in which `sandbox_problems` finds nothing.
    """
    problems = []
    for name, what in guarded:
        entry = loaded.settings.sandboxes.get(name)
        if entry is None or entry.allow_unisolated or open_provider(name, loaded.settings).features.isolated:
            continue
        key = f"sandboxes.{name}"
        problems.append(
            ConfigurationProblem(
                loaded.source_of(key),
                key,
                f"the provider '{entry.provider}' does not isolate here, and {what}: what runs inside could read it."
                " Use `docker`, or install bubblewrap, or say `allow_unisolated: true` for tasks that you trust.",
            )
        )
    return problems
