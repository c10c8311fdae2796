"""One load against running processes, and what it cost them."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import orjson
import psutil

from tests.bench.load import Job

WARM_UP: Final = 200

ROW: Final[dict[str, Any]] = {
    "environment": "string_match",
    "expected_answer": "Paris",
    "extraction_mode": "boxed",
    "responses_create_params": {
        "input": [
            {"role": "user", "content": "What is the capital of France? Put your final answer in \\boxed{}."},
        ]
    },
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One load: requests a second, latencies in ms, CPU ms per request of the watched processes."""

    per_second: float
    p50_ms: float
    p95_ms: float
    first_p50_ms: float | None
    cpu_ms: float


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measure(job: Job, watched: Sequence[psutil.Process]) -> Measured:
    """Run a job in a fresh process."""
    before = _cpu_s(watched)
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.load"], input=job.to_json(), capture_output=True, check=False, timeout=600
    )
    if done.returncode != 0:
        raise SystemExit(f"the load generator failed: {done.stderr.decode()[-2000:]}")
    cpu_s = _cpu_s(watched) - before
    told = orjson.loads(done.stdout)
    latencies = sorted(told["latencies"])
    firsts = sorted(told["firsts"])
    return Measured(
        per_second=job.requests / told["seconds"],
        p50_ms=latencies[len(latencies) // 2],
        p95_ms=latencies[int(len(latencies) * 0.95)],
        first_p50_ms=firsts[len(firsts) // 2] * 1e3 if firsts else None,
        cpu_ms=cpu_s * 1e3 / job.requests,
    )


@contextmanager
def program(name: str, *arguments: str) -> Iterator[tuple[str, psutil.Process]]:
    """One of `tests.bench.programs`: its base URL and its process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.programs", name, *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()


def services_of_this_process() -> list[psutil.Process]:
    """The launcher and its services."""
    found: list[psutil.Process] = psutil.Process().children(recursive=True)
    return found
