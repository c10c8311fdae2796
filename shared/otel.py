"""Whether this process exports its spans to an OpenTelemetry collector, and the life of that export.

It does where the standard variables name a collector; nothing of the SDK is imported before.
"""

import asyncio
import importlib.util
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

from shared.errors import ConfigurationError, ConfigurationProblem
from shared.redaction import hide
from shared.tracing import record_with

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HEADERS: Final = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
_PACKAGES: Final = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
LAST_SPANS_S: Final = 1.0
"""How long a stop may be held up by a collector that does not take the last spans."""


def exports_spans(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether spans go to a collector.

    Raises:
        ConfigurationError: they should, but the packages for it are missing, or the protocol is not ours.
    """
    named = next((name for name in ENDPOINTS if environ.get(name)), None)
    disabled = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if named is None or disabled or environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
        return False
    if problem := _protocol_problem(environ) or _missing_problem(named):
        raise ConfigurationError([problem])
    return True


def _protocol_problem(environ: Mapping[str, str]) -> ConfigurationProblem | None:
    name = next((name for name in _PROTOCOLS if environ.get(name)), None)
    if name is None or environ[name].strip().lower() == "http/protobuf":
        return None
    return ConfigurationProblem(
        "the environment",
        name,
        f"traces are exported over http/protobuf, not over '{environ[name]}': unset the variable, and name the"
        " collector's HTTP port, usually 4318.",
    )


def _missing_problem(named: str) -> ConfigurationProblem | None:
    if all(_is_there(package) for package in _PACKAGES):
        return None
    return ConfigurationProblem(
        "the environment",
        named,
        "is set, but the packages that export traces are not installed: pip install 'paddock-mesh[otel]', or unset"
        " the variable.",
    )


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


@asynccontextmanager
async def exporting(service: str, instance: str, version: str) -> AsyncIterator[None]:
    """Record the spans of this process until the block ends, where they are exported at all."""
    if not exports_spans():
        yield
        return
    from shared.otel_recorder import OtelRecorder

    for name in _HEADERS:
        for pair in os.environ.get(name, "").split(","):
            hide(pair.partition("=")[2].strip())
    recorder = OtelRecorder(service, instance, version)
    record_with(recorder)
    try:
        yield
    finally:
        record_with(None)
        await asyncio.to_thread(recorder.close, LAST_SPANS_S)
