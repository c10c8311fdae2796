"""Files and variables → `Settings`.

YAML files, later ones winning key by key, over which environment variables lie. Unknown keys are
refused. Everything that is wrong is reported at once, each problem with its source and key.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from shared.engine_models import engine_problems, pointed_at_engines
from shared.errors import ConfigurationError, ConfigurationProblem, unknown_name
from shared.settings import SERVICE_NAMES, EnvironmentSettings, LoadedSettings, Settings

EMBEDDED = "the embedded default"


def load_settings(
    paths: Sequence[Path],
    environ: Mapping[str, str] = os.environ,
    *,
    options: Mapping[str, dict[str, Any]] | None = None,
    check: Callable[[LoadedSettings], Sequence[ConfigurationProblem]] = lambda _: (),
) -> LoadedSettings:
    """Read the configuration.

    Its files are `paths`, else those of `PADDOCK_CONFIG` (parted by `:`), else `./paddock.yaml`, else the
    embedded default. Over all of them lie `options`: of the command line, each with the values that it sets.
    What `check` finds is told together with the rest.

    Raises:
        ConfigurationError: with everything that is wrong.
    """
    chosen = list(paths) or [Path(part) for part in environ.get("PADDOCK_CONFIG", "").split(":") if part]
    if not chosen and Path("paddock.yaml").is_file():
        chosen = [Path("paddock.yaml")]
    layers = [_read_file(path) for path in chosen] or [(EMBEDDED, _read_embedded())]
    layers += [*_environment_layers(environ), *(options or {}).items()]
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, layer in layers:
        _merge(values, layer, source, sources, "")
    _bind_only_agent(values)
    loaded = LoadedSettings(_validated(values, sources), sources)
    problems = [*_cross_problems(loaded), *_worker_problems(loaded), *engine_problems(loaded)]
    loaded = pointed_at_engines(loaded)
    if problems := [*problems, *check(loaded)]:
        raise ConfigurationError(problems)
    return loaded


def _read_embedded() -> dict[str, Any]:
    return dict(yaml.safe_load(files("shared").joinpath("default.yaml").read_text(encoding="utf-8")))


def _read_file(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except OSError as error:
        raise ConfigurationError([ConfigurationProblem(str(path), "", f"cannot be read: {error.strerror}.")]) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError([ConfigurationProblem(str(path), "", f"is not valid YAML: {error}")]) from error
    if values is not None and not isinstance(values, dict):
        raise ConfigurationError([ConfigurationProblem(str(path), "", "must hold a mapping at its top level.")])
    return str(path), values or {}


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping: YAML readers silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"'{key.value}' stands twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _environment_layers(environ: Mapping[str, str]) -> list[tuple[str, dict[str, Any]]]:
    layers: list[tuple[str, dict[str, Any]]] = []
    for name in SERVICE_NAMES:
        variable = f"PADDOCK_{name.upper()}_URL"
        if environ.get(variable):
            layers.append((variable, {"services": {name: {"url": environ[variable]}}}))
    layers += _secret_file_layers(environ)
    for variable, keys in (
        ("PADDOCK_STORE_URL", ("store", "url")),
        ("PADDOCK_MESH_TOKEN", ("security", "mesh_token")),
        ("PADDOCK_PREVIOUS_MESH_TOKEN", ("security", "previous_mesh_token")),
        ("PADDOCK_CLIENT_TOKEN", ("security", "client_token")),
        ("PADDOCK_STATE_DIR", ("state_dir",)),
        ("PADDOCK_DRAIN_LEAD_S", ("serving", "drain_lead_s")),
        ("PADDOCK_LOG_LEVEL", ("serving", "log_level")),
    ):
        if environ.get(variable):
            layers.append((variable, _nested(keys, environ[variable])))
    if environ.get("PADDOCK_MODEL_BASE_URL"):
        policy: dict[str, Any] = {
            "upstream": "chat_completions",
            "base_url": environ["PADDOCK_MODEL_BASE_URL"],
            "model": environ.get("PADDOCK_MODEL_NAME") or None,
        }
        if environ.get("PADDOCK_MODEL_API_KEY"):
            policy["api_key_env"] = "PADDOCK_MODEL_API_KEY"
        elif environ.get("PADDOCK_MODEL_API_KEY_FILE"):
            policy["api_key_file"] = environ["PADDOCK_MODEL_API_KEY_FILE"]
        layers.append(("PADDOCK_MODEL_BASE_URL", {"models": {"policy": _Replace(policy)}}))
    return layers


def _secret_file_layers(environ: Mapping[str, str]) -> list[tuple[str, dict[str, Any]]]:
    """Secrets from files, so that they need not stand in a container's environment."""
    layers = []
    for variable, keys in (
        ("PADDOCK_STORE_URL_FILE", ("store", "url")),
        ("PADDOCK_MESH_TOKEN_FILE", ("security", "mesh_token")),
        ("PADDOCK_CLIENT_TOKEN_FILE", ("security", "client_token")),
    ):
        if environ.get(variable):
            layers.append((variable, _nested(keys, _read_secret(variable, ".".join(keys), environ[variable]))))
    return layers


def _read_secret(variable: str, key: str, path: str) -> str:
    try:
        secret = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise ConfigurationError([ConfigurationProblem(variable, key, f"{path} cannot be read: {why}.")]) from error
    if not secret:
        raise ConfigurationError([ConfigurationProblem(variable, key, f"{path} is empty.")])
    return secret


class _Replace(dict[str, Any]):
    """A mapping that takes the place of what is there instead of being merged into it."""


def _nested(keys: tuple[str, ...], value: Any) -> dict[str, Any]:
    return {keys[0]: _nested(keys[1:], value)} if keys else value


def _merge(into: dict[str, Any], layer: Mapping[str, Any], source: str, sources: dict[str, str], at: str) -> None:
    for name, value in layer.items():
        key = f"{at}.{name}" if at else str(name)
        if isinstance(value, _Replace):
            into[name] = {}
            for old in [old for old in sources if old.startswith(f"{key}.")]:
                del sources[old]
        if isinstance(value, Mapping):
            if not isinstance(into.get(name), dict):
                into[name] = {}
            _merge(into[name], value, source, sources, key)
            if not value:
                sources[key] = source
        else:
            into[name] = value
            sources[key] = source


def _bind_only_agent(values: dict[str, Any]) -> None:
    """An environment that names no agent gets the only one there is: benchmark and harness need not know each other."""
    agents, environments = values.get("agents"), values.get("environments")
    if not isinstance(environments, dict) or not isinstance(agents, dict) or len(agents) != 1:
        return
    for environment in environments.values():
        if isinstance(environment, dict):
            environment.setdefault("agent", next(iter(agents)))


def _validated(values: dict[str, Any], sources: Mapping[str, str]) -> Settings:
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        known = LoadedSettings(Settings(), sources)
        problems = []
        for item in error.errors(include_url=False):
            key = ".".join(str(part) for part in item["loc"])
            message = item["msg"].removeprefix("Value error, ")
            if item["type"] == "extra_forbidden":
                message = "unknown key." + _nearest_key(item["loc"])
            problems.append(ConfigurationProblem(known.source_of(key), key, message))
        raise ConfigurationError(problems) from error


def _nearest_key(loc: tuple[str | int, ...]) -> str:
    model: Any = Settings
    for part in loc[:-1]:
        field = getattr(model, "model_fields", {}).get(part)
        model = field.annotation if field else None
    known = list(getattr(model, "model_fields", {}))
    return " " + unknown_name("key", str(loc[-1]), known) if known else ""


def _cross_problems(loaded: LoadedSettings) -> list[ConfigurationProblem]:
    """References between sections, and budgets that do not fit."""
    settings = loaded.settings
    problems: list[ConfigurationProblem] = []

    def require(key: str, what: str, name: str | None, known: Mapping[str, Any]) -> None:
        if name is not None and name not in known:
            problems.append(ConfigurationProblem(loaded.source_of(key), key, unknown_name(what, name, known)))

    for name, agent in settings.agents.items():
        require(f"agents.{name}.model", "model", agent.model, settings.models)
    for name, resources in settings.resources.items():
        require(f"resources.{name}.judge", "model", resources.judge, settings.models)
    for name, environment in settings.environments.items():
        key = f"environments.{name}"
        require(f"{key}.resources", "resources entry", environment.resources, settings.resources)
        require(f"{key}.agent", "agent", environment.agent, settings.agents)
        problems += _budget_problems(loaded, key, environment)
    return problems


def _budget_problems(loaded: LoadedSettings, key: str, environment: EnvironmentSettings) -> list[ConfigurationProblem]:
    agent = loaded.settings.agents.get(environment.agent)
    resources = loaded.settings.resources.get(environment.resources)
    if agent is None or resources is None:
        return []
    problems = []
    closing = agent.close_timeout_s + resources.close_timeout_s
    if closing > environment.cleanup_timeout_s:
        problems.append(
            ConfigurationProblem(
                loaded.source_of(key),
                f"{key}.cleanup_timeout_s",
                f"{environment.cleanup_timeout_s:g} s is less than the closes it has to hold: agent"
                f" {agent.close_timeout_s:g} s and resources {resources.close_timeout_s:g} s.",
            )
        )
    held_back = agent.close_timeout_s + resources.verify_timeout_s
    if held_back >= environment.episode_timeout_s:
        problems.append(
            ConfigurationProblem(
                loaded.source_of(key),
                f"{key}.episode_timeout_s",
                f"{environment.episode_timeout_s:g} s leaves no time for the agent: its close"
                f" ({agent.close_timeout_s:g} s) and the verification ({resources.verify_timeout_s:g} s) are held"
                " back.",
            )
        )
    return problems


def _worker_problems(loaded: LoadedSettings) -> list[ConfigurationProblem]:
    workers, store = loaded.settings.serving.workers, loaded.settings.store.url
    if workers == 1 or not store.startswith("memory:"):
        return []
    key = "serving.workers"
    message = f"{workers} workers need a store that they share, and `{store}` lies in one process: set store.url"
    return [
        ConfigurationProblem(
            loaded.source_of(key), key, f"{message} (PADDOCK_STORE_URL) to a Redis, as in redis://127.0.0.1:6379/0."
        )
    ]
