"""What is counted of a model call, and the span that it is. The span bears the names of OpenTelemetry's conventions."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from services.model_proxy.record import Record
from shared.metrics import Metrics
from shared.tracing import Span, span


@contextmanager
def measured(record: Record, metrics: Metrics) -> Iterator[None]:
    """Around the whole call. One that was refused before it began is counted as a request only."""
    under_way = metrics.running.labels("model_calls")
    under_way.inc()
    try:
        with span("chat", "client") as step:
            yield
            if step.recorded:
                _describe(step, record.facts)
    finally:
        under_way.dec()
        if "ended_at" in record.facts:
            _count(metrics, record.facts)


def _count(metrics: Metrics, facts: dict[str, Any]) -> None:
    model: str = facts["model"]
    metrics.model_calls.labels(model, facts.get("error_category") or "ok").inc()
    metrics.model_call_seconds.labels(model).observe(facts["ended_at"] - facts["started_at"])
    metrics.upstream_attempts.labels(model).inc(facts["attempts"])
    if "first_byte_at" in facts:
        metrics.first_byte_seconds.labels(model).observe(facts["first_byte_at"] - facts["started_at"])
    for direction in ("input", "output"):
        metrics.tokens.labels(model, direction).inc((facts.get("usage") or {}).get(f"{direction}_tokens", 0))


def _describe(step: Span, facts: dict[str, Any]) -> None:
    usage = facts.get("usage") or {}
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": facts["model"],
        "gen_ai.response.id": facts.get("response_id"),
        "gen_ai.usage.input_tokens": usage.get("input_tokens"),
        "gen_ai.usage.output_tokens": usage.get("output_tokens"),
        "http.response.status_code": facts.get("upstream_status"),
        "paddock.attempts": facts["attempts"],
        "paddock.call": facts["call_id"],
    }
    step.rename(f"chat {facts['model']}")
    for name, value in attributes.items():
        if value is not None:
            step.set(name, value)
    if (category := facts.get("error_category")) is not None:
        step.fail(category)
