"""An OpenTelemetry collector for tests: takes spans over OTLP/HTTP on a socket, and keeps them."""

import gzip
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

BOUND_S: Final = 30.0
KINDS: Final = {1: "internal", 2: "server", 3: "client"}


@dataclass(frozen=True)
class Received:
    """One span as it came; ids are hex, `parent` is empty for a root."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent: str
    state: str
    failed: bool
    seconds: float
    attributes: dict[str, Any]
    resource: dict[str, Any]

    @property
    def service(self) -> str:
        return str(self.resource.get("service.name"))


@dataclass
class Collector:
    """`endpoint` is what OTEL_EXPORTER_OTLP_ENDPOINT is set to; `headers` are those of every request."""

    endpoint: str = ""
    spans: list[Received] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, body: bytes, headers: dict[str, str]) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        found = [
            _received(span, _plain(of_one.resource.attributes))
            for of_one in request.resource_spans
            for scope in of_one.scope_spans
            for span in scope.spans
        ]
        with self._changed:
            self.spans += found
            self.headers.append(headers)
            self._changed.notify_all()

    def wait_for(self, enough: Callable[[Sequence[Received]], bool], bound_s: float = BOUND_S) -> list[Received]:
        """All spans, as soon as they are enough.

        Raises:
            TimeoutError: they are not within `bound_s`; it names what came.
        """
        deadline = time.monotonic() + bound_s
        with self._changed:
            while not enough(self.spans):
                if not self._changed.wait(deadline - time.monotonic()):
                    names = sorted((span.service, span.name) for span in self.spans)
                    raise TimeoutError(f"not the spans that were waited for: {names}")
            return [*self.spans]


def _received(span: Any, resource: dict[str, Any]) -> Received:
    return Received(
        name=span.name,
        kind=KINDS[span.kind],
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        state=span.trace_state,
        failed=span.status.code == 2,
        seconds=(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
        attributes=_plain(span.attributes),
        resource=resource,
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return None if kind is None else getattr(value, kind)


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector on a free port, in threads of its own."""
    kept = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            headers = {name.lower(): value for name, value in self.headers.items()}
            kept.take(body, {**headers, ":path": self.path})
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    kept.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, name="collector", daemon=True)
    thread.start()
    try:
        yield kept
    finally:
        server.shutdown()
        server.server_close()
        thread.join(BOUND_S)
