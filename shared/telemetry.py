"""Log lines, metrics, trace context.

One JSON object per line on standard error: time, level, service, message, the episode's key and stage
where there are any. Services write one line per episode; requests are not logged unless they fail.
"""

import logging
import secrets
import sys
import time
from contextvars import ContextVar

import orjson
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

current_key: ContextVar[str | None] = ContextVar("current_key", default=None)
current_trace: ContextVar[str | None] = ContextVar("current_trace", default=None)

_STANDARD = frozenset(vars(logging.makeLogRecord({})))


class JsonFormatter(logging.Formatter):
    """A record as one JSON line; fields given as `extra` lie beside the standard ones."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "message": record.getMessage(),
        }
        if (key := current_key.get()) is not None:
            line["key"] = key
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def configure_logging(service: str, level: str = "info") -> None:
    """Send all log lines of this process to standard error in our form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("uvicorn", "mcp", "httpx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class Metrics:
    """The mesh's fixed, low-cardinality vocabulary; one registry per service process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "paddock_requests",
            "HTTP requests by route and status.",
            ["route", "status"],
            registry=self.registry,
        )
        self.episodes = Counter(
            "paddock_episodes",
            "Episodes by outcome (result or failure) and failure kind.",
            ["environment", "outcome", "kind"],
            registry=self.registry,
        )
        self.stage_seconds = Histogram(
            "paddock_stage_seconds",
            "Duration of an episode's stages.",
            ["environment", "stage"],
            registry=self.registry,
            buckets=(0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300, 1800, 7200, 21600),
        )
        self.running = Gauge(
            "paddock_running",
            "Work under way in this process, by what it is.",
            ["what"],
            registry=self.registry,
        )
        self.upstream_statuses = Counter(
            "paddock_upstream_statuses",
            "Answers of model upstreams by model and status.",
            ["model", "status"],
            registry=self.registry,
        )


def new_traceparent(parent: str | None) -> str:
    """A W3C `traceparent` for a new span: the parent's trace id where there is one (https://www.w3.org/TR/trace-context/)."""
    parts = (parent or "").split("-")
    trace_id = parts[1] if len(parts) == 4 and len(parts[1]) == 32 else secrets.token_hex(16)
    return f"00-{trace_id}-{secrets.token_hex(8)}-01"
