"""`paddock doctor`: what this machine and this configuration can do, in sentences."""

import asyncio
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from services.launcher.engines import missing_programs, taken_ports
from shared.errors import ConfigurationError, ProviderError, StoreUnavailableError
from shared.redaction import redact
from shared.sandbox.local.launch import bubblewrap_problem
from shared.sandbox.open import PROVIDERS, open_provider
from shared.settings import SERVICE_NAMES, LoadedSettings, SandboxSettings, Settings
from shared.store.open import open_store

Grade = Literal["ok", "missing", "wrong"]
ENDPOINT_TIMEOUT_S = 5.0
_MARKS: dict[Grade, str] = {"ok": "ok      ", "missing": "missing ", "wrong": "WRONG   "}


@dataclass(frozen=True, slots=True)
class Finding:
    """`wrong` keeps the configured mesh from running; `missing` does not."""

    grade: Grade
    what: str
    told: str


def examine(load: Callable[[], LoadedSettings], say: Callable[[str], None]) -> int:
    """Print one line per finding; 1 when something keeps the configured mesh from running."""
    findings = [*_machine()]
    try:
        loaded = load()
    except ConfigurationError as error:
        findings += [Finding("wrong", "configuration", str(problem)) for problem in error.problems]
    else:
        findings.append(Finding("ok", "configuration", "every key and every plug-in's options fit."))
        findings += [*_ports(loaded), asyncio.run(_store(loaded)), *_models(loaded), *_engines(loaded)]
        findings += asyncio.run(_sandboxes(loaded))
    for finding in findings:
        say(f"{_MARKS[finding.grade]}{finding.what:<16}{finding.told}")
    return 1 if any(finding.grade == "wrong" for finding in findings) else 0


def _machine() -> Iterator[Finding]:
    version = platform.python_version()
    grade: Grade = "ok" if sys.version_info >= (3, 11) else "wrong"
    yield Finding(grade, "python", f"{version}; 3.11 or newer is needed.")
    yield Finding(
        "ok" if sys.platform == "linux" else "wrong",
        "system",
        f"{platform.system()} {platform.machine()}; Linux is needed.",
    )
    yield _program(
        "docker",
        "runs the services as containers (`docker compose up`).",
        "install a Docker engine; without it everything but `docker compose up` works.",
    )


def _program(name: str, use: str, without: str) -> Finding:
    path = shutil.which(name)
    return Finding("ok", name, use) if path else Finding("missing", name, without)


def _ports(loaded: LoadedSettings) -> Iterator[Finding]:
    for name in SERVICE_NAMES:
        address = urlsplit(loaded.settings.services.url_of(name))
        where = f"{address.hostname}:{address.port or 80}"
        with socket.socket() as probe:
            probe.settimeout(1.0)
            taken = probe.connect_ex((address.hostname or "127.0.0.1", address.port or 80)) == 0
        if taken:
            remedy = f"`paddock up` needs that port, or another in PADDOCK_{name.upper()}_URL."
            yield Finding("missing", f"port {address.port or 80}", f"something answers on {where}; {remedy}")
        else:
            yield Finding("ok", f"port {address.port or 80}", f"free for the {name} server.")


async def _store(loaded: LoadedSettings) -> Finding:
    address = redact(loaded.settings.store.url)
    store = open_store(loaded)
    try:
        await store.ping()
    except StoreUnavailableError as error:
        return Finding("wrong", "store", error.message)
    finally:
        await store.close()
    return Finding("ok", "store", f"{address} answers.")


async def _sandboxes(loaded: LoadedSettings) -> list[Finding]:
    """The configured sandboxes, and what else could be had: only a configured one that cannot work is wrong."""
    unused = {name: SandboxSettings(provider=name) for name in PROVIDERS.names()}
    for entry in loaded.settings.sandboxes.values():
        unused.pop(entry.provider, None)
    settings = loaded.settings.model_copy(update={"sandboxes": {**unused, **loaded.settings.sandboxes}})
    return [await _sandbox(name, settings, "missing" if name in unused else "wrong") for name in settings.sandboxes]


async def _sandbox(name: str, settings: Settings, otherwise: Grade) -> Finding:
    what = f"sandbox {name}"
    provider = open_provider(name, settings)
    try:
        await provider.check()
    except ProviderError as error:
        return Finding(otherwise, what, error.message)
    finally:
        await provider.close()
    if provider.features.isolated:
        return Finding("ok", what, "sandboxes can be made, and what runs in them is kept apart from this machine.")
    return Finding("missing", what, f"sandboxes can be made but are NOT isolated: {bubblewrap_problem()}.")


def _models(loaded: LoadedSettings) -> Iterator[Finding]:
    for name, model in loaded.settings.models.items():
        base_url = model.options.get("base_url")
        if loaded.sources.get(f"models.{name}.base_url", "").startswith("engines."):
            yield Finding("ok", f"model {name}", "`paddock up` and `paddock run` start its engines.")
            continue
        if base_url is None:
            yield Finding("ok", f"model {name}", f"upstream '{model.upstream}' needs no endpoint.")
            continue
        for url in base_url if isinstance(base_url, list) else [base_url]:
            yield _endpoint(name, redact(str(url)))


def _engines(loaded: LoadedSettings) -> Iterator[Finding]:
    for problem in missing_programs(loaded):
        yield Finding("wrong", "engines", f"{problem.key}: {problem.message}")
    for problem in taken_ports(loaded):
        yield Finding("missing", "engines", f"{problem.key}: {problem.message}")


def _endpoint(name: str, base_url: str) -> Finding:
    what = f"model {name}"
    try:
        with urlopen(Request(f"{base_url.rstrip('/')}/models"), timeout=ENDPOINT_TIMEOUT_S):
            return Finding("ok", what, f"{base_url} answers.")
    except HTTPError as error:
        # Any answer shows that a server is there; a list of models is not every server's.
        return Finding("ok", what, f"{base_url} answers (its list of models with {error.code}).")
    except (URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return Finding("wrong", what, f"{base_url} cannot be reached: {reason}. Start it, or correct its address.")
