"""Metrics of a service that runs as several workers: a scrape meets one of them and is told the sum over all.

That is prometheus_client's multiprocess mode: each worker's values lie in memory-mapped files of one folder.
Files carry the worker's number instead of its pid, so a worker that was started again goes on with the
counters of the one before it, and no restart leaves a file behind. A label per worker would show the same
numbers only to whoever scrapes every worker, and a shared port cannot be asked for a certain one.
"""

import os
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest, values
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

_FOLDER: Final = "PROMETHEUS_MULTIPROC_DIR"


def share_metrics(folder: Path, worker: int) -> None:
    """Keep the metrics of this process, which is worker number `worker`, where the others read them.

    To be called before the application is made. Gauges begin anew: what the worker before it had under way
    is gone.
    """
    os.environ[_FOLDER] = str(folder)
    mark_process_dead(worker, str(folder))  # type: ignore[no-untyped-call]
    values.ValueClass = values.MultiProcessValue(process_identifier=lambda: worker)  # type: ignore[no-untyped-call]


def exposition(registry: CollectorRegistry) -> bytes:
    """The process's metrics, or the sum over all workers, in Prometheus' text format."""
    if _FOLDER not in os.environ:
        return generate_latest(registry)
    over_all = CollectorRegistry()
    MultiProcessCollector(over_all)  # type: ignore[no-untyped-call]
    return generate_latest(over_all)
