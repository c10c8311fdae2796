"""Sends what is due, at most so many rows at once, and writes every answer as it comes."""

import asyncio
from collections.abc import Iterator
from typing import Any

from services.collector.client import EnvironmentClient
from services.collector.files import RunFiles
from services.collector.ledger import Ledger, RowOutcome
from services.collector.options import RunError, RunOptions
from services.collector.outcomes import Episode, Result
from services.collector.records import FailureRecord
from services.collector.standing import Standing
from services.collector.watching import Watcher


class Dispatch:
    """One run's work, from the first row that is sent to the last answer that is written."""

    def __init__(
        self, client: EnvironmentClient, files: RunFiles, ledger: Ledger, standing: Standing, watcher: Watcher
    ) -> None:
        self._client = client
        self._files = files
        self._ledger = ledger
        self._standing = standing
        self._watcher = watcher
        self.stopped = False
        """It was told to stop, and rows were left without an outcome of their own."""

    async def run(self, options: RunOptions, stop: asyncio.Event) -> RunError | None:
        """Until all is done or `stop` is set, or something ends the run: that is returned."""
        due = self._ledger.to_run(self._files.read_inputs())
        workers = [asyncio.create_task(self._work(due)) for _ in range(min(options.concurrency, self._ledger.due()))]
        stopping = asyncio.create_task(stop.wait())
        all_work = asyncio.gather(*workers)
        watched: set[asyncio.Future[Any]] = {all_work, stopping}
        try:
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if not all_work.done():
                await self._stop(options, all_work)
            if all_work.done():
                await all_work
            else:
                self.stopped = True
        except RunError as error:
            return error
        finally:
            # A dropped connection does not end an episode: it goes on in the environment.
            for task in (*workers, stopping):
                task.cancel()
            await asyncio.gather(*workers, stopping, all_work, return_exceptions=True)
        return None

    async def _stop(self, options: RunOptions, all_work: asyncio.Future[Any]) -> None:
        """Send nothing more, and give what is under way a short while."""
        self._client.stopping = True
        under_way = self._standing.under_way
        self._watcher.note(_stopping(options, len(under_way)))
        if options.cancel_on_stop and under_way:
            self.stopped = True
            taken = await asyncio.gather(*(self._client.cancel(key) for key in under_way))
            if missed := taken.count(False):
                self._watcher.note(f"{missed} of them could not be cancelled.")
        await asyncio.wait({all_work}, timeout=options.stop_wait_s)

    async def _work(self, due: Iterator[Episode]) -> None:
        for first in due:
            episode: Episode | None = first
            while episode is not None:
                ended = None if self._client.stopping else await self._client.attempt(episode)
                if ended is None:
                    self.stopped = True
                    return
                outcome = self._keep(ended.answer)
                # What had failed already while nobody was listening was not this run's try.
                episode = self._ledger.attempt_due(first.row) if ended.before else None
            self._standing.ended(outcome)
            self._watcher.ended(outcome)

    def _keep(self, answer: Result | FailureRecord) -> RowOutcome:
        if isinstance(answer, Result):
            self._files.write_result(answer)
            return self._ledger.add_result(answer.value)
        self._files.write_failure(answer)
        return self._ledger.add_failure(answer)


def _stopping(options: RunOptions, count: int) -> str:
    if not count:
        return "Stopping: no more rows are sent."
    if options.cancel_on_stop:
        then = f"{count} under way are cancelled."
    elif options.own_services:
        then = f"{count} under way have {options.stop_wait_s:g} s to end; what is left ends with this run's services."
    else:
        then = f"{count} under way have {options.stop_wait_s:g} s to end; what is left goes on in the environment."
    return f"Stopping: no more rows are sent. {then} Ctrl-C again leaves at once."
