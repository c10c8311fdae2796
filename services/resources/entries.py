"""The configured resources entries: each one's verifier and tools, made once per process."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shared.contracts.resources import McpMetadata, ResourcesTools
from shared.errors import ConfigurationError, ConfigurationProblem
from shared.plugins import PluginFolder
from shared.ports.toolset import Toolset, ToolSpec
from shared.ports.verifier import Verifier
from shared.settings import EnvironmentSettings, LoadedSettings, ResourcesSettings

VERIFIERS: Final = PluginFolder("services.resources.verifiers", "verifier")
TOOLSETS: Final = PluginFolder("services.resources.tools", "toolset")

# Names below an entry's address that are routes of ours: no tool may have them.
ROUTE_NAMES: Final = frozenset({"seed_session", "verify", "close_session", "aggregate_metrics", "reverify_mode", "mcp"})
_PATH_SEGMENT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
MCP_PATH: Final = "/mcp"
# What a session outlives its longest episode and cleanup by: the time in which a lost one is still found.
SESSION_MARGIN_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class LentTool:
    """A tool and the toolset, by name, that serves it."""

    spec: ToolSpec
    toolset_name: str
    toolset: Toolset


@dataclass(frozen=True, slots=True)
class Entry:
    """One configured resources entry. `tools` are all its toolsets' tools by name, `offer` what a seed says of them."""

    name: str
    settings: ResourcesSettings
    verifier: Verifier
    toolsets: Mapping[str, Toolset]
    session_ttl_s: float
    tools: Mapping[str, LentTool]
    offer: ResourcesTools | None

    @property
    def needs_session(self) -> bool:
        """Whether a verdict needs what only the session knows."""
        return self.verifier.needs_session or bool(self.tools)


@dataclass(frozen=True, slots=True)
class Plugins:
    """Where verifiers and toolsets are found."""

    verifiers: PluginFolder = VERIFIERS
    toolsets: PluginFolder = TOOLSETS


def entry_problems(loaded: LoadedSettings, plugins: Plugins) -> list[ConfigurationProblem]:
    """Everything that is wrong with the configured entries."""
    problems: list[ConfigurationProblem] = []
    for name, settings in loaded.settings.resources.items():
        key = f"resources.{name}"
        source = loaded.source_of(key)
        if not _PATH_SEGMENT.fullmatch(name):
            message = "an entry's name is part of its address: letters, digits, '.', '_' and '-' only."
            problems.append(ConfigurationProblem(source, key, message))
        problems += plugins.verifiers.check(settings.verifier, settings.options, source=source, key=key)
        wrong = [
            problem
            for toolset in settings.tools
            for problem in plugins.toolsets.check(toolset, {}, source=source, key=f"{key}.tools")
        ]
        problems += wrong or _name_problems(settings, plugins, source, f"{key}.tools")
    return problems


def _name_problems(settings: ResourcesSettings, plugins: Plugins, source: str, key: str) -> list[ConfigurationProblem]:
    """Tools that could not be told apart or reached."""
    problems = []
    owners: dict[str, str] = {}
    for name in settings.tools:
        for spec in _toolset(plugins, name).tools:
            if spec.name in ROUTE_NAMES:
                message = f"the tool '{spec.name}' of '{name}' has the name of a route of this server."
                problems.append(ConfigurationProblem(source, key, message))
            if spec.name in owners:
                message = f"the tool '{spec.name}' is in '{owners[spec.name]}' and in '{name}'."
                problems.append(ConfigurationProblem(source, key, message))
            owners[spec.name] = name
    return problems


def _toolset(plugins: Plugins, name: str) -> Toolset:
    toolset: Toolset = plugins.toolsets.module(name).create(plugins.toolsets.options(name, {}))
    return toolset


def create_entries(loaded: LoadedSettings, plugins: Plugins) -> dict[str, Entry]:
    """All configured entries by name.

    Raises:
        ConfigurationError: with everything that is wrong.
    """
    if problems := entry_problems(loaded, plugins):
        raise ConfigurationError(problems)
    return {name: _create(loaded, plugins, name, settings) for name, settings in loaded.settings.resources.items()}


def _create(loaded: LoadedSettings, plugins: Plugins, name: str, settings: ResourcesSettings) -> Entry:
    options = plugins.verifiers.options(settings.verifier, settings.options)
    toolsets = {toolset: _toolset(plugins, toolset) for toolset in settings.tools}
    tools = {spec.name: LentTool(spec, owner, toolset) for owner, toolset in toolsets.items() for spec in toolset.tools}
    functions = [tool.spec.as_function_tool() for tool in tools.values()]
    return Entry(
        name,
        settings,
        plugins.verifiers.module(settings.verifier).create(options),
        toolsets,
        _session_ttl_s(loaded, name),
        tools,
        ResourcesTools(http=functions, mcp=McpMetadata(path=MCP_PATH)) if functions else None,
    )


async def close_entries(entries: Mapping[str, Entry]) -> None:
    for entry in entries.values():
        await entry.verifier.close()


def _session_ttl_s(loaded: LoadedSettings, entry: str) -> float:
    """Longer than the longest episode that may use the entry, plus its cleanup."""
    users = [item for item in loaded.settings.environments.values() if item.resources == entry]
    users = users or [EnvironmentSettings(resources=entry, agent="any")]
    return max(item.episode_timeout_s + item.cleanup_timeout_s for item in users) + SESSION_MARGIN_S
