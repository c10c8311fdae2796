"""What the mesh tells about itself: schemas, effective values, defaults."""

import json
from collections.abc import Iterator
from typing import Any, Final, get_args, get_origin

from pydantic import BaseModel, SecretStr

from shared.contracts.agent import CloseReceipt
from shared.contracts.capture import Capture
from shared.contracts.episode import EpisodeReply, FlatRow, NativeRequest
from shared.contracts.failure import Failure
from shared.contracts.resources import Verdict
from shared.errors import ConfigurationProblem
from shared.plugins import PluginFolder
from shared.redaction import redact
from shared.sandbox.open import PROVIDERS, sandbox_problems
from shared.settings import LoadedSettings, Settings
from shared.store.open import store_problems

SCHEMAS: Final[dict[str, type[BaseModel]]] = {
    "config": Settings,
    "row": FlatRow,
    "native": NativeRequest,
    "reply": EpisodeReply,
    "failure": Failure,
    "verdict": Verdict,
    "receipt": CloseReceipt,
    "capture": Capture,
}
PLUGIN_FOLDERS: Final = {
    "models.<name>": PluginFolder("services.model_proxy.upstreams", "upstream"),
    "sandboxes.<name>": PROVIDERS,
    "agents.<name>": PluginFolder("services.agent.harnesses", "harness"),
    "resources.<name>": PluginFolder("services.resources.verifiers", "verifier"),
}
HIDDEN: Final = "(set, hidden)"
_SECRET_WORDS: Final = ("token", "secret", "password", "api_key")


def check_plugins(loaded: LoadedSettings) -> list[ConfigurationProblem]:
    """What is wrong with the configured store and the plug-ins of all services."""
    from services.agent.app import check as check_agent
    from services.model_proxy.app import check as check_model_proxy
    from services.resources.app import check as check_resources

    problems = [*store_problems(loaded), *sandbox_problems(loaded)]
    return [*problems, *check_model_proxy(loaded), *check_agent(loaded), *check_resources(loaded)]


def schema_of(name: str) -> str:
    """The JSON schema of one of `SCHEMAS`, indented."""
    return json.dumps(SCHEMAS[name].model_json_schema(), indent=2)


def effective(loaded: LoadedSettings) -> Iterator[str]:
    """One line per value: key, value, source."""
    rows = list(_flat(loaded.settings, ""))
    width = max(len(key) for key, _ in rows)
    for key, value in rows:
        yield f"{key:<{width}}  {value:<24}  # {loaded.sources.get(key) or _nearest_source(loaded, key)}"


def _nearest_source(loaded: LoadedSettings, key: str) -> str:
    """A list or an empty mapping is set as a whole, so its source stands at a key above."""
    while "." in key:
        key = key.rpartition(".")[0]
        if key in loaded.sources:
            return loaded.sources[key]
    return "default"


def _flat(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name) for name in [*type(value).model_fields, *(value.model_extra or {})]}
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from _flat(below, f"{key}.{name}" if key else str(name))
        return
    secret = isinstance(value, SecretStr) or (
        value is not None and key.rpartition(".")[2] in _SECRET_WORDS and isinstance(value, str)
    )
    yield key, HIDDEN if secret else _told(value)


def _told(value: Any) -> str:
    if value is None:
        return "-"
    return redact(str(list(value) if isinstance(value, tuple) else value))


def defaults_table() -> Iterator[str]:
    """The table of defaults as it stands in the documentation, plug-ins' own options included."""
    yield "| key | default | meaning |"
    yield "| --- | --- | --- |"
    yield from _defaults(Settings, "", None)
    for section, folder in PLUGIN_FOLDERS.items():
        for name in folder.names():
            yield from _defaults(folder.module(name).Options, f"{section} ({folder.kind}: {name}).", None)


def _defaults(model: type[BaseModel], prefix: str, instance: BaseModel | None) -> Iterator[str]:
    """`instance` holds the defaults of a section that has other ones than its type."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        default = getattr(instance, name) if instance is not None else field.get_default(call_default_factory=True)
        section = _section(field.annotation)
        if section is not None:
            named = f"{key}.<name>." if get_origin(field.annotation) is dict else f"{key}."
            yield from _defaults(section, named, default if isinstance(default, BaseModel) else None)
            continue
        told = "(required)" if instance is None and field.is_required() else _told(default)
        meaning = " ".join((field.description or "").split())
        yield f"| `{key}` | `{told}` | {meaning} |"


def _section(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
