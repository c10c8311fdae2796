"""`paddock run`: rows in, results and metrics out.

The story of a run is `collect`: look at the environment, materialise the rows (or read what a run left),
send what is due, write every answer as it comes, sum up. Whatever ends it early loses nothing: episodes
go on in the environment, and `--resume` asks for them by the same ids.
"""

import asyncio
import os
import time
from typing import TYPE_CHECKING

from services.collector.client import EnvironmentClient
from services.collector.connection import Connection
from services.collector.dispatch import Dispatch
from services.collector.files import RunFiles
from services.collector.inputs import materialise, read_again
from services.collector.interrupts import told_by_signals
from services.collector.ledger import Ledger
from services.collector.metrics import run_metrics
from services.collector.options import RefusedError, RunError, RunOptions, check_options
from services.collector.paths import paths_of
from services.collector.standing import Standing
from services.collector.watching import RunSummary, Silence, Watcher

if TYPE_CHECKING:
    from services.collector.display import Display


async def collect(
    options: RunOptions,
    url: str,
    *,
    token: str | None = None,
    watcher: Watcher | None = None,
    stop: asyncio.Event | None = None,
) -> RunSummary:
    """Run the rows against the environment server at `url`. Setting `stop` ends the run early and cleanly.

    Raises:
        RunError: the run cannot begin: a wrong option, nobody at `url`, a refused token, files in the way, or an
            environment that takes none of the rows.
    """
    began = time.monotonic()
    watcher, stop = watcher or Silence(), stop or asyncio.Event()
    check_options(options)
    async with Connection(url, token) as connection:
        await connection.check()
        with RunFiles(paths_of(options), resume=options.resume) as files:
            begin = read_again if options.resume else materialise
            ledger = await begin(options, files, watcher, stop, None if options.own_services else connection.url)
            standing = Standing(ledger.due())
            watcher.begin(standing)
            client = EnvironmentClient(connection, options, standing, one_environment=ledger.one_environment)
            dispatch = Dispatch(client, files, ledger, standing, watcher)
            trouble = await dispatch.run(options, stop)
            if isinstance(trouble, RefusedError) and not (options.resume or client.took_one):
                files.discard()
                raise trouble
            summary = RunSummary(
                options=options,
                paths=files.paths,
                run_id=ledger.run_id,
                outcomes=tuple(ledger.outcomes()),
                bad_rows=ledger.bad_rows,
                due=ledger.due(),
                metrics=_metrics(ledger),
                duration_s=time.monotonic() - began,
                stopped=dispatch.stopped,
                trouble=trouble,
            )
            files.write_metrics(dict(summary.metrics))
            return summary


def _metrics(ledger: Ledger) -> dict[str, object]:
    rollouts = [outcome.rollout for outcome in ledger.outcomes()]
    return {
        "schema_version": 1,
        "run_id": ledger.run_id,
        "complete": all(rollout.reward is not None for rollout in rollouts) and not ledger.bad_rows,
        "rows": ledger.rows,
        "bad_rows": ledger.bad_rows,
        "environments": run_metrics(rollouts),
    }


def run(options: RunOptions, url: str, token: str | None = None) -> int:
    """`paddock run`, shown to a person; returns the exit status (130 after Ctrl-C, 143 after TERM).

    `token` is the environment's client token; PADDOCK_CLIENT_TOKEN when left out.
    """
    from services.collector.display import Display

    display = Display()
    return asyncio.run(_run(options, url, token or os.environ.get("PADDOCK_CLIENT_TOKEN") or None, display))


async def _run(options: RunOptions, url: str, token: str | None, display: "Display") -> int:
    stop = asyncio.Event()
    with told_by_signals(stop) as received:
        try:
            summary = await collect(options, url, token=token, watcher=display, stop=stop)
        except RunError as error:
            display.close()
            display.note(str(error))
            return 128 + received[0] if received else error.status
        finally:
            display.close()
        display.show(summary)
        return 128 + received[0] if received and summary.stopped else summary.status
