"""Spans that leave the process: only where a collector is named, in the standard's form, and without a secret."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import opentelemetry.trace
import pytest

from shared.errors import ConfigurationError
from shared.otel import LAST_SPANS_S, exporting, exports_spans
from shared.otel_recorder import OtelRecorder
from shared.redaction import redact
from shared.tracing import Trace, current_trace, record_with, span
from tests.otlp import Collector, collector

ROOT = Path(__file__).parents[2]
PARENT = Trace("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "a=b,c=d")
UNSAMPLED = Trace("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00", "a=b")
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """The SDK reads its variables from the process's own environment."""
    with collector() as kept:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", kept.endpoint)
        monkeypatch.setenv(
            "OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic dGhlLWNvbGxlY3Rvcg,x-tenant=paddock-tests"
        )
        yield kept


async def test_spans_go_to_the_collector_with_who_made_them(received: Collector) -> None:
    async with exporting("agent", "instance-1", "1.2.3"):
        current_trace.set(PARENT)
        with span("outer", "server") as outer:
            outer.set("paddock.key", "r1")
            outer.set("http.response.status_code", 200)
            with span("inner", "client") as inner:
                inner.rename("renamed")
                inner.fail("timeout")
    spans = {one.name: one for one in received.spans}
    assert set(spans) == {"outer", "renamed"}
    outer_span, inner_span = spans["outer"], spans["renamed"]
    assert (outer_span.trace_id, outer_span.parent, outer_span.kind) == (PARENT.trace_id, PARENT.span_id, "server")
    assert (inner_span.parent, inner_span.kind, inner_span.failed) == (outer_span.span_id, "client", True)
    assert outer_span.attributes == {"paddock.key": "r1", "http.response.status_code": 200}
    assert inner_span.attributes == {"error.type": "timeout"}
    assert (outer_span.state, outer_span.failed) == ("a=b,c=d", False)
    for one in received.spans:
        assert one.resource["service.namespace"] == "paddock"
        assert one.resource["service.name"] == "agent"
        assert one.resource["service.instance.id"] == "instance-1"
        assert one.resource["service.version"] == "1.2.3"
    (headers,) = received.headers
    assert headers[":path"] == "/v1/traces"
    assert headers["x-tenant"] == "paddock-tests"
    assert redact("dGhlLWNvbGxlY3Rvcg") == "dGhlLWNvbGxlY3Rvcg"
    assert redact("Basic dGhlLWNvbGxlY3Rvcg") == "[credential]"


async def test_what_the_caller_does_not_sample_is_not_sent_and_goes_on_as_it_came(received: Collector) -> None:
    async with exporting("agent", "instance-1", "1"):
        current_trace.set(UNSAMPLED)
        with span("not this one"):
            assert current_trace.get() == UNSAMPLED
        current_trace.set(None)
        with span("a root") as root:
            trace = current_trace.get()
            assert root.recorded
    assert [one.name for one in received.spans] == ["a root"]
    assert trace is not None
    assert trace.flags & 1
    assert trace.trace_id == received.spans[0].trace_id


async def test_nothing_is_recorded_after_the_end(received: Collector) -> None:
    async with exporting("agent", "instance-1", "1"):
        pass
    with span("late") as late:
        assert not late.recorded
    assert received.spans == []


async def test_a_collector_that_does_not_answer_holds_up_a_stop_for_a_bounded_time_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3")
        async with exporting("agent", "instance-1", "1"):
            with span("never told"):
                pass
            began = time.monotonic()
        assert LAST_SPANS_S / 2 < time.monotonic() - began < LAST_SPANS_S + 1.5


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {**ENDPOINT, "OTEL_SDK_DISABLED": "true"},
        {**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_SERVICE_NAME": "x", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
    ],
)
def test_nothing_is_exported_unless_a_collector_is_named(environ: dict[str, str]) -> None:
    assert exports_spans(environ) is False


@pytest.mark.parametrize(
    "environ",
    [
        ENDPOINT,
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"},
        {**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
    ],
)
def test_a_named_collector_is_enough(environ: dict[str, str]) -> None:
    assert exports_spans(environ) is True


def test_another_protocol_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigurationError, match=r"http/protobuf, not over 'grpc'.*usually 4318"):
        exports_spans({**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})


def _python(program: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    path = os.pathsep.join([environ.pop("FIRST_ON_PATH", ""), str(ROOT)]).lstrip(os.pathsep)
    return subprocess.run(
        [sys.executable, "-c", program], cwd=cwd, env={**kept, "PYTHONPATH": path, **environ},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_nothing_of_the_sdk_is_loaded_while_no_collector_is_named(tmp_path: Path) -> None:
    program = (
        "import importlib, sys; from shared.configuration import load_settings; import shared.http.serve;"
        "names = ('environment', 'agent', 'model_proxy', 'resources'); loaded = load_settings([], {});"
        "[importlib.import_module(f'services.{name}.app').create_app(loaded) for name in names];"
        "print(sorted(name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter',"
        " 'opentelemetry.proto', 'google.protobuf', 'requests', 'shared.otel_recorder'))))"
    )
    done = _python(program, tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_a_named_collector_without_the_extra_is_a_clear_sentence_and_no_start(tmp_path: Path) -> None:
    """What stands in an environment without the extra is the API alone, which others of our packages need."""
    (tmp_path / "bare" / "opentelemetry").mkdir(parents=True)
    (tmp_path / "bare" / "opentelemetry" / "__init__.py").touch()
    for part in Path(opentelemetry.trace.__file__).parents[1].iterdir():
        if part.name not in {"sdk", "exporter", "proto"}:
            (tmp_path / "bare" / "opentelemetry" / part.name).symlink_to(part)
    program = (
        "import sys; from services.cli import main; sys.argv[1:] = ['serve', 'agent', '--port', '0']; sys.exit(main())"
    )
    done = _python(program, tmp_path, FIRST_ON_PATH=str(tmp_path / "bare"), **ENDPOINT)
    assert done.returncode != 0
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in done.stderr
    assert "pip install 'paddock-mesh[otel]', or unset the variable" in done.stderr
    assert "Traceback" not in done.stderr


async def test_spans_of_many_tasks_keep_their_parents(received: Collector) -> None:
    recorder = OtelRecorder("agent", "instance-1", "1")
    record_with(recorder)
    met = asyncio.Barrier(20)

    async def episode(n: int) -> None:
        current_trace.set(Trace(f"00-{n + 1:032x}-{n + 1:016x}-01"))
        with span(f"outer {n}"):
            await met.wait()
            with span(f"inner {n}"):
                await met.wait()

    try:
        await asyncio.gather(*(episode(n) for n in range(20)))
    finally:
        record_with(None)
        await asyncio.to_thread(recorder.close, 10.0)
    spans = {one.name: one for one in received.spans}
    for n in range(20):
        outer, inner = spans[f"outer {n}"], spans[f"inner {n}"]
        assert (outer.trace_id, outer.parent) == (f"{n + 1:032x}", f"{n + 1:016x}")
        assert (inner.trace_id, inner.parent) == (outer.trace_id, outer.span_id)
