"""Short ways to a run against the fake environment."""

import asyncio
from pathlib import Path
from typing import Any

from services.collector.options import RunOptions
from services.collector.run import collect
from services.collector.watching import RunSummary
from tests.collector.fake_environment import FakeEnvironment, write_rows
from tests.serving import serving

BOUND_S = 60.0


def fresh(tmp_path: Path, rows: list[Any], **more: Any) -> RunOptions:
    """A new run of these rows; it is patient for a short while only, so that no test hangs."""
    path = write_rows(tmp_path / "rows.jsonl", rows)
    return RunOptions(rows=(path,), out=tmp_path / "o.jsonl", **({"patience_s": 5.0} | more))


def again(tmp_path: Path, **more: Any) -> RunOptions:
    """The same run, continued."""
    return RunOptions(rows=(), out=tmp_path / "o.jsonl", resume=True, **more)


async def run_against(environment: FakeEnvironment, options: RunOptions, **more: Any) -> RunSummary:
    async with asyncio.timeout(BOUND_S), serving(environment.app) as url:
        return await collect(options, url, **more)
