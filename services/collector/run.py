"""`paddock run`: rows in, results and metrics out.

The story of a run is `collect`: look at the environment, materialise the rows (or read what a run left),
send what is due, write every answer as it comes, sum up. Whatever ends it early loses nothing: episodes
go on in the environment, and `--resume` asks for them by the same ids.
"""

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from services.collector.client import EnvironmentClient
from services.collector.files import InputsWriter, RunFiles, paths_of
from services.collector.ledger import Ledger
from services.collector.metrics import run_metrics
from services.collector.options import RunError, RunOptions, check_options
from services.collector.outcomes import Episode, Result, unread
from services.collector.rows import BadRow, Materialiser
from services.collector.watching import RunSummary, Silence, Watcher

if TYPE_CHECKING:
    from services.collector.display import Display

_ROWS_BETWEEN_BREATHS = 100


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
        RunError: the run cannot begin: a wrong option, nobody at `url`, files in the way.
    """
    began = time.monotonic()
    watcher, stop = watcher or Silence(), stop or asyncio.Event()
    check_options(options)
    async with EnvironmentClient(url, token, options) as client:
        await client.check_ready()
        with RunFiles(paths_of(options), resume=options.resume) as files:
            if options.resume:
                ledger = _read_run(options, files, watcher)
            else:
                ledger = await _materialise(options, files, watcher, stop)
            watcher.begin(ledger.rows, ledger.due())
            dispatch = _Dispatch(client, files, ledger, watcher)
            trouble = await dispatch.run(options.concurrency, stop)
            summary = _summary(files, ledger, began, stopped=dispatch.stopped, trouble=trouble)
            files.write_metrics(dict(summary.metrics))
            return summary


def _read_run(options: RunOptions, files: RunFiles, watcher: Watcher) -> Ledger:
    """How a run stands that is to be continued."""
    for path in files.cut:
        watcher.note(f"{path}: the last line was cut off in the middle and is dropped.")
    ledger = Ledger()
    for row in files.read_inputs():
        ledger.add_row(row)
    if options.repeats not in {1, ledger.repeats}:
        raise RunError(
            f"The run has {ledger.repeats} repeats, not {options.repeats}: leave --repeats out, or start anew."
        )
    for record in files.read_failures():
        if record.episode_id is None:
            ledger.add_bad_row()
        else:
            ledger.add_failure(record)
    for number, line in files.read_results():
        ledger.add_result(line, f"{files.paths.results}:{number}")
    watcher.note(f"Rows come from {files.paths.inputs}: {ledger.rows} rows, {ledger.due()} still to run.")
    return ledger


async def _materialise(options: RunOptions, files: RunFiles, watcher: Watcher, stop: asyncio.Event) -> Ledger:
    """Read and check the rows and write them as they will be sent."""
    ledger = Ledger()
    ledger.run_id = f"run-{secrets.token_hex(5)}"
    with InputsWriter(files.paths) as inputs:
        for number, row in enumerate(Materialiser(options, ledger.run_id).rows()):
            if isinstance(row, BadRow):
                ledger.add_bad_row()
                watcher.bad_row(row)
                files.write_failure(unread(ledger.run_id, row.source, row.problem))
            else:
                ledger.add_row(row)
                inputs.write(row)
            if number % _ROWS_BETWEEN_BREATHS == 0:
                await asyncio.sleep(0)
                if stop.is_set():
                    raise RunError("Stopped before the first row was sent.")
        if not ledger.rows and not ledger.bad_rows:
            raise RunError(f"There are no rows in {', '.join(map(str, options.rows))}.")
        inputs.commit()
    return ledger


class _Dispatch:
    """Sends what is due, at most so many at once."""

    def __init__(self, client: EnvironmentClient, files: RunFiles, ledger: Ledger, watcher: Watcher) -> None:
        self._client = client
        self._files = files
        self._ledger = ledger
        self._watcher = watcher
        self.stopped = False

    async def run(self, concurrency: int, stop: asyncio.Event) -> RunError | None:
        """Until all is done, `stop` is set, or something ends the run: that is returned."""
        due = self._ledger.to_run(self._files.read_inputs())
        workers = [asyncio.create_task(self._work(due)) for _ in range(min(concurrency, self._ledger.due()))]
        stopping = asyncio.create_task(stop.wait())
        all_work = asyncio.gather(*workers)
        watched: set[asyncio.Future[Any]] = {all_work, stopping}
        try:
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            self.stopped = not all_work.done()
            if not self.stopped:
                await all_work
        except RunError as error:
            return error
        finally:
            # A dropped connection does not end an episode: it goes on in the environment.
            for task in (*workers, stopping):
                task.cancel()
            await asyncio.gather(*workers, stopping, all_work, return_exceptions=True)
        return None

    async def _work(self, due: Iterator[Episode]) -> None:
        for episode in due:
            answer = await self._client.attempt(episode)
            if isinstance(answer, Result):
                self._files.write_result(answer)
                self._watcher.ended(self._ledger.add_result(answer.value))
            else:
                self._files.write_failure(answer)
                self._watcher.ended(self._ledger.add_failure(answer))


def _summary(files: RunFiles, ledger: Ledger, began: float, *, stopped: bool, trouble: RunError | None) -> RunSummary:
    outcomes = tuple(ledger.outcomes())
    environments = run_metrics(outcome.rollout for outcome in outcomes)
    metrics = {
        "schema_version": 1,
        "run_id": ledger.run_id,
        "complete": all(outcome.rollout.reward is not None for outcome in outcomes) and not ledger.bad_rows,
        "rows": ledger.rows,
        "bad_rows": ledger.bad_rows,
        "environments": environments,
    }
    return RunSummary(
        run_id=ledger.run_id,
        paths=files.paths,
        outcomes=outcomes,
        bad_rows=ledger.bad_rows,
        due=ledger.due(),
        metrics=metrics,
        duration_s=time.monotonic() - began,
        stopped=stopped,
        trouble=trouble,
    )


def run(options: RunOptions, url: str, token: str | None = None) -> int:
    """`paddock run`, shown to a person; returns the exit status (130 after Ctrl-C, 143 after TERM).

    `token` is the environment's client token; PADDOCK_CLIENT_TOKEN when left out.
    """
    from services.collector.display import Display

    display = Display()
    return asyncio.run(_run(options, url, token or os.environ.get("PADDOCK_CLIENT_TOKEN") or None, display))


async def _run(options: RunOptions, url: str, token: str | None, display: "Display") -> int:
    stop = asyncio.Event()
    with _told_by_signals(stop) as received:
        try:
            summary = await collect(options, url, token=token, watcher=display, stop=stop)
        except RunError as error:
            display.close()
            display.refuse(str(error))
            return 128 + received[0] if received else error.status
        finally:
            display.close()
        display.show(summary)
        return 128 + received[0] if received and summary.stopped else summary.status


@contextmanager
def _told_by_signals(stop: asyncio.Event) -> Iterator[list[int]]:
    """INT and TERM set `stop`; yields which came. Only the main thread hears signals."""
    received: list[int] = []
    loop = asyncio.get_running_loop()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        loop.call_soon_threadsafe(stop.set)

    before: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, on_signal)
    except ValueError:
        yield received
        return
    try:
        yield received
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
