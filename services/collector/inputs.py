"""A run's rows: materialised for a fresh run, read again and checked for one that goes on.

Both end with the ledger of the run and with every episode id on disk. A stop is heeded between rows.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Final, TypeVar

from services.collector.files import InputsWriter, RunFiles
from services.collector.ledger import Ledger
from services.collector.options import RunError, RunOptions
from services.collector.outcomes import unread
from services.collector.reading import read_run
from services.collector.records import MaterialisedRow, RunRecord
from services.collector.rows import BadRow, Materialiser
from services.collector.watching import Watcher

_T = TypeVar("_T")
_ROWS_BETWEEN_BREATHS: Final = 100


async def materialise(
    options: RunOptions, files: RunFiles, watcher: Watcher, stop: asyncio.Event, url: str | None
) -> Ledger:
    """Read and check the rows and write them as they will be sent.

    Raises:
        RunError: a file cannot be read or written, there are no rows, or `stop` was set.
    """
    ledger = Ledger()
    ledger.run_id = f"run-{secrets.token_hex(5)}"
    with InputsWriter(files.paths) as inputs:
        async for row in _until(stop, Materialiser(options, ledger.run_id).rows()):
            if isinstance(row, BadRow):
                ledger.add_bad_row()
                watcher.bad_row(row)
                files.write_failure(unread(ledger.run_id, row.source, row.problem))
            else:
                ledger.add_row(row)
                inputs.write(row)
        if not ledger.rows and not ledger.bad_rows:
            raise RunError(f"There are no rows in {', '.join(map(str, options.rows))}.")
        files.write_run(
            RunRecord(
                run_id=ledger.run_id,
                url=url,
                environment=options.environment,
                repeats=options.repeats,
                limit=options.limit,
            )
        )
        inputs.commit()
    return ledger


async def read_again(
    options: RunOptions, files: RunFiles, watcher: Watcher, stop: asyncio.Event, url: str | None
) -> Ledger:
    """How a run stands that is to be continued.

    Raises:
        RunError: the rows or options are not those of the run, a file of it cannot be used, or `stop` was set.
    """
    for path in files.cut:
        watcher.note(f"{path}: the last line was cut off in the middle and is dropped.")
    record = read_run(files.paths)
    _check_options(options, record)
    if options.rows:
        await _check_rows(options, record, files, stop)
    if url != record.url:
        watcher.note(
            f"The run was started {_at(record.url)} and goes on {_at(url)}: what runs or has ended there is joined"
            " only if both keep their episodes in one store."
        )
    ledger = Ledger()
    async for row in _until(stop, files.read_inputs()):
        ledger.add_row(row)
    async for failure in _until(stop, files.read_failures()):
        if failure.episode_id is None:
            ledger.add_bad_row()
        else:
            ledger.add_failure(failure)
    async for number, line in _until(stop, files.read_results()):
        ledger.add_result(line, f"{files.paths.results}:{number}")
    watcher.note(f"Rows come from {files.paths.inputs}: {ledger.rows} rows, {ledger.due()} still to run.")
    return ledger


def _at(url: str | None) -> str:
    return "with services of its own" if url is None else f"at {url}"


def _check_options(options: RunOptions, record: RunRecord) -> None:
    """An option that is left out is the run's own."""
    given: tuple[tuple[str, Any, Any], ...] = (
        ("--environment", options.environment, record.environment),
        ("--repeats", None if options.repeats == 1 else options.repeats, record.repeats),
        ("--limit", options.limit, record.limit),
    )
    for name, now, then in given:
        if now not in {None, then}:
            begun = f"without {name}" if then is None else f"with {name} {then}"
            raise RunError(f"The run was started {begun}, not with {name} {now}: leave {name} out, or start anew.")


async def _check_rows(options: RunOptions, record: RunRecord, files: RunFiles, stop: asyncio.Event) -> None:
    """See that the rows that are named are still those of the run."""
    begun = replace(options, environment=record.environment, repeats=record.repeats, limit=record.limit)
    rows = (row for row in Materialiser(begun, record.run_id).rows() if isinstance(row, MaterialisedRow))
    async for ours, theirs in _until(stop, zip_longest(rows, files.read_inputs())):
        if ours is None or theirs is None or ours.request != theirs.request:
            where = (ours or theirs).source
            raise RunError(
                f"The rows are not those that this run was started with; the first other one is {where}. Leave them"
                f" out to go on with the run's own, which are in {files.paths.inputs}, or start anew with another -o."
            )


async def _until(stop: asyncio.Event, items: Iterable[_T]) -> AsyncIterator[_T]:
    """The items, with a breath for the event loop now and then."""
    for number, item in enumerate(items):
        yield item
        if number % _ROWS_BETWEEN_BREATHS == 0:
            await asyncio.sleep(0)
            if stop.is_set():
                raise RunError("Stopped before the first row was sent.")
