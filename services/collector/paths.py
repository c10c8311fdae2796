"""Where a run's files are."""

import secrets
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from services.collector.options import RunOptions


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Results, and beside them failures, materialised inputs, metrics, and what the run was started with."""

    results: Path

    def _beside(self, what: str) -> Path:
        return self.results.with_name(f"{self.results.stem}_{what}")

    @property
    def failures(self) -> Path:
        return self._beside("failures.jsonl")

    @property
    def inputs(self) -> Path:
        return self._beside("inputs.jsonl")

    @property
    def metrics(self) -> Path:
        return self._beside("metrics.json")

    @property
    def run(self) -> Path:
        return self._beside("run.json")


def paths_of(options: RunOptions) -> RunPaths:
    if options.out is not None:
        return RunPaths(options.out)
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    path = Path("results") / f"{options.rows[0].stem}-{stamp}.jsonl"
    # Two runs within one second get two files.
    return RunPaths(path.with_stem(f"{path.stem}-{secrets.token_hex(2)}") if path.exists() else path)
