"""Spans into the OpenTelemetry SDK, and with OTLP over HTTP to a collector.

Import this only when traces are to be exported: the SDK costs memory and time that a mesh without it never
pays. Everything about the export that has a standard variable (`OTEL_…`) is read by the SDK itself.
"""

import threading
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)
from opentelemetry.trace import Span as OtelSpan

from shared.tracing import Kind, Trace, Value

_KINDS: Final[dict[Kind, SpanKind]] = {
    "internal": SpanKind.INTERNAL,
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
}
NAMESPACE: Final = "paddock"


class OtelSpanOfOurs:
    """Implements `shared.tracing.RecordedSpan`."""

    def __init__(self, span: OtelSpan, parent: Trace | None) -> None:
        self._span = span
        context = span.get_span_context()
        state = None if parent is None else parent.state
        if parent is not None and not span.is_recording():
            # Not sampled: whoever is called sees the span of the caller, which may be recorded.
            self.trace = parent
        else:
            self.trace = Trace(f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}", state)

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def set(self, name: str, value: Value) -> None:
        self._span.set_attribute(name, value)

    def end(self, error: str | None) -> None:
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


class OtelRecorder:
    """Implements `shared.tracing.Recorder`. Sends in a thread of its own; what a full queue cannot take is dropped."""

    def __init__(self, service: str, instance: str, version: str) -> None:
        resource = Resource.create(
            {
                "service.namespace": NAMESPACE,
                "service.name": service,
                "service.instance.id": instance,
                "service.version": version,
            }
        )
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer(NAMESPACE, version)

    def begin(self, name: str, kind: Kind, parent: Trace | None) -> OtelSpanOfOurs:
        context = set_span_in_context(_remote(parent)) if parent is not None else None
        return OtelSpanOfOurs(self._tracer.start_span(name, context, _KINDS[kind]), parent)

    def close(self, timeout_s: float) -> None:
        """Send what is left, within a bound: a collector that does not answer must not hold up a stop."""
        closing = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        closing.start()
        closing.join(timeout_s)


def _remote(trace: Trace) -> NonRecordingSpan:
    state = TraceState.from_header([trace.state]) if trace.state is not None else TraceState()
    context = SpanContext(int(trace.trace_id, 16), int(trace.span_id, 16), True, TraceFlags(trace.flags), state)
    return NonRecordingSpan(context)
