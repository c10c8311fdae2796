"""Metrics whose labels are closed: what `shared/metrics.py` builds its vocabulary from.

A label takes words of the code and names of the configuration. Anything else, whatever a request brings, counts
as `other`, so that no caller can make a process hold more and more series.

What happens is noted in plain numbers and handed on to prometheus_client by `flush`, since its own counting, made
for threads, would cost an episode several times as much. All of it belongs to the event loop's thread.
"""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

OTHER: Final = "other"
ALL: Final = "all"
Allowed = Collection[str] | None
"""The values of a label; None where they are fixed when the application is made, as its routes are."""


class Count:
    """One series of a counter."""

    __slots__ = ("_noted", "_series")

    def __init__(self, series: Counter) -> None:
        self._series = series
        self._noted = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self._noted += amount

    def flush(self) -> None:
        if self._noted:
            self._series.inc(self._noted)
            self._noted = 0.0


class Level:
    """One series of a gauge. The hottest path sets `value` itself."""

    __slots__ = ("_series", "value")

    def __init__(self, series: Gauge) -> None:
        self._series = series
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount

    def dec(self, amount: float = 1.0) -> None:
        self.value -= amount

    def set(self, value: float) -> None:
        self.value = value

    def flush(self) -> None:
        self._series.set(self.value)


class Spread:
    """One series of a histogram. Its bounds are without the last, infinite one."""

    __slots__ = ("_bounds", "_counts", "_series", "_sum")

    def __init__(self, series: Histogram, bounds: Sequence[float]) -> None:
        self._series = series
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, amount: float) -> None:
        self._counts[bisect_left(self._bounds, amount)] += 1
        self._sum += amount

    def flush(self) -> None:
        # The library takes single observations only; these are the two places where it keeps them.
        for bucket, count in zip(self._series._buckets, self._counts, strict=True):
            if count:
                bucket.inc(count)
        self._series._sum.inc(self._sum)
        self._counts = [0] * len(self._counts)
        self._sum = 0.0


class _Series(Protocol):
    def flush(self) -> None: ...


_S = TypeVar("_S", bound=_Series)
_M = TypeVar("_M", Counter, Gauge, Histogram)


@dataclass(frozen=True, slots=True)
class Entry:
    """What the documentation tells of a metric. `name` is as queried, without what a histogram's series add;
    `service` is the one that has it, `all` for every one."""

    name: str
    type: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    service: str
    meaning: str


class Family(Generic[_S]):
    """One metric with all its series. `make` makes the series of some values."""

    def __init__(self, make: Callable[..., _S], labels: Mapping[str, Allowed], exposed: bool) -> None:
        self._make = make
        self._exposed = exposed
        self._allowed = tuple(labels.values())
        self._series: dict[tuple[str, ...], _S] = {(): make()} if exposed and not labels else {}

    def labels(self, *values: str) -> _S:
        """The series of these values, in the order of the labels; a value that is not allowed becomes `other`."""
        series = self._series.get(values)
        if series is None:
            closed = tuple(
                value if allowed is None or value in allowed else OTHER
                for value, allowed in zip(values, self._allowed, strict=True)
            )
            series = self._series.get(closed)
            if series is None:
                series = self._series[closed] = self._make(*closed)
        return series

    def begin(self, *values: str) -> None:
        """Have this series from the start, or all of them: what appears with its first event has not risen, for
        Prometheus, and no rule sees it."""
        if self._exposed:
            every = itertools.product(*(allowed or () for allowed in self._allowed))
            for series in [values] if values else every:
                self.labels(*series)

    def flush(self) -> None:
        for series in self._series.values():
            series.flush()


class Vocabulary:
    """The metrics of one application, in their own registry. `service` is its name; None exposes all metrics."""

    def __init__(self, service: str | None) -> None:
        # Else every series comes with a second one that tells when it began.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.service = service
        self.entries: list[Entry] = []
        self.families: list[Family[Any]] = []

    def of(self, service: str) -> "Words":
        return Words(self, service)

    def flush(self) -> None:
        """Hand on what was noted."""
        for family in self.families:
            family.flush()


class Words:
    """Makes the metrics of one service; a counter's name is given without its `_total`."""

    def __init__(self, vocabulary: Vocabulary, service: str) -> None:
        self._vocabulary = vocabulary
        self._service = service
        self._exposed = vocabulary.service in (None, service) or service == ALL
        self._registry = vocabulary.registry if self._exposed else None

    def counter(self, name: str, meaning: str, **labels: Allowed) -> Family[Count]:
        def metric() -> Counter:
            return Counter(name, meaning, [*labels], registry=self._registry)

        entry = Entry(f"{name}_total", "counter", tuple(labels), self._service, meaning)
        return self._family(entry, metric, Count, labels)

    def gauge(self, name: str, meaning: str, **labels: Allowed) -> Family[Level]:
        def metric() -> Gauge:
            # Of several workers the sum over those that live.
            return Gauge(name, meaning, [*labels], registry=self._registry, multiprocess_mode="livesum")

        return self._family(Entry(name, "gauge", tuple(labels), self._service, meaning), metric, Level, labels)

    def histogram(self, name: str, meaning: str, buckets: Sequence[float], **labels: Allowed) -> Family[Spread]:
        def metric() -> Histogram:
            return Histogram(name, meaning, [*labels], registry=self._registry, buckets=buckets)

        entry = Entry(name, "histogram", tuple(labels), self._service, meaning)
        return self._family(entry, metric, lambda series: Spread(series, buckets), labels)

    def _family(
        self, entry: Entry, metric: Callable[[], _M], series: Callable[[_M], _S], labels: Mapping[str, Allowed]
    ) -> Family[_S]:
        # Made only where it is exposed: several workers tell also what stands in no registry.
        made = cache(metric)

        def make(*values: str) -> _S:
            return series(made().labels(*values) if values else made())

        family = Family(make, labels, self._exposed)
        if self._exposed:
            made()
        self._vocabulary.entries.append(entry)
        self._vocabulary.families.append(family)
        return family
