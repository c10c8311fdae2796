"""Log lines: one JSON object each, on standard error.

Each has time, level, service, instance and message; the episode's key and stage and the trace where there are
any; and whatever else it was given. Services write one line per episode; requests are not logged unless they
fail. No line holds a credential, whatever raised an error brought along: see `shared/redaction.py`.
"""

import logging
import sys
import time
from contextvars import ContextVar
from typing import Any

import orjson

from shared.redaction import redact
from shared.tracing import current_trace

current_key: ContextVar[str | None] = ContextVar("current_key", default=None)
current_stage: ContextVar[str | None] = ContextVar("current_stage", default=None)

_STANDARD = frozenset(vars(logging.makeLogRecord({})))


class JsonFormatter(logging.Formatter):
    """A record as one JSON line; fields given as `extra` lie beside the standard ones and win over key and stage."""

    def __init__(self, service: str, instance: str | None = None) -> None:
        super().__init__()
        self._service = service
        self._second = (0, "")
        self.instance = instance

    def format(self, record: logging.LogRecord) -> str:
        trace = current_trace.get()
        line: dict[str, Any] = {
            "time": self._time_of(record),
            "level": record.levelname.lower(),
            "service": self._service,
            "instance": self.instance,
            "message": record.getMessage(),
            "key": current_key.get(),
            "stage": current_stage.get(),
            "trace_id": None if trace is None else trace.trace_id,
        }
        line = {name: value for name, value in line.items() if value is not None}
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return redact(orjson.dumps(line, default=str).decode())

    def _time_of(self, record: logging.LogRecord) -> str:
        second = int(record.created)
        if second != self._second[0]:
            self._second = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._second[1]}.{int(record.msecs):03d}Z"


def configure_logging(service: str, level: str = "info") -> None:
    """Send all log lines of this process to standard error in our form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # No line tells where it was written or by which thread, and to find that out costs more than to write it.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    for noisy in ("uvicorn", "mcp", "httpx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def log_as(instance: str) -> None:
    """From now on the log lines of this process carry the instance that serves in it."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonFormatter):
            handler.formatter.instance = instance
