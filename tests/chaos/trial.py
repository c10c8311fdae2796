"""One trial: episodes while faults happen, then calm, another attempt at what failed, and everything that is wrong."""

import asyncio
import random
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from tests.chaos.clients import Client, Episode
from tests.chaos.faults import Faults, storm
from tests.chaos.fleet import Fleet
from tests.chaos.journal import errors, history, stamp
from tests.chaos.rows import Task
from tests.chaos.verdicts import breaches, retried, table, times

TWINS = 0.2
PACE_S = 0.5
STORM_PAUSE_S = (0.2, 1.0)
# Requests that are still open when half of a service's grace is over are cut, as they should be.
_CUT = re.compile(r"timeout graceful shutdown exceeded")
_HISTORIES = 3


@dataclass(frozen=True)
class Trial:
    """`wrong` is empty when everything held; `told` is for people."""

    fleet: Fleet
    episodes: list[Episode]
    wrong: list[str]
    told: list[str]

    @property
    def graded(self) -> int:
        return sum(episode.failure is None for episode in self.episodes)

    def require_all_well(self) -> None:
        """Raises:
        AssertionError: something is wrong; with what happened to the episodes concerned.
        """
        if not self.wrong:
            return
        keys = [episode.key for episode in self.episodes if any(_names(text, episode.key) for text in self.wrong)]
        told = [line for key in dict.fromkeys(keys[:_HISTORIES]) for line in ["", *history(self.fleet.folder, key)]]
        raise AssertionError("\n".join([*self.wrong, "", *self.told, *told]))


async def stormy(fleet: Fleet, tasks: Sequence[Task], seed: int, *, at_once: int) -> Trial:
    """Random faults for as long as the episodes run."""
    client, faults = prepared(fleet, tasks, seed)
    began = stamp()
    async with raging(faults, seed):
        episodes = await client.run_all(fleet.url, tasks, at_once=at_once, twins=TWINS)
    return await ended(fleet, client, faults, episodes, began)


@asynccontextmanager
async def raging(faults: Faults, seed: int) -> AsyncIterator[None]:
    """A storm for as long as the block lasts, while the model takes its time; everyone is back afterwards."""
    faults.fleet.model.pace(PACE_S, seed)
    task = asyncio.create_task(storm(faults, pause_s=STORM_PAUSE_S))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    await faults.settled()
    await faults.fleet.whole()


def prepared(fleet: Fleet, tasks: Sequence[Task], seed: int) -> tuple[Client, Faults]:
    """Both throw dice of their own, so that neither's luck depends on the other's speed."""
    fleet.model.know(tasks)
    client = Client(fleet.http, random.Random(seed), fleet.journal)
    return client, Faults(fleet, client, random.Random(seed))


async def ended(fleet: Fleet, client: Client, faults: Faults, episodes: list[Episode], began: str) -> Trial:
    """What came of it, once it is calm."""
    await faults.settled()
    await fleet.whole()
    again = await retried(fleet, client, episodes)
    wrong = [*faults.wrong, *await breaches(fleet, client, [*episodes, *again])]
    wrong += [f"{episode.key} failed in calm: {episode.failure}" for episode in again if episode.failure is not None]
    wrong += [f"logged by {error}" for error in errors(fleet.folder, began) if not _CUT.search(error)]
    done = ", ".join(f"{count} × {name}" for name, count in sorted(faults.done.items()))
    told = [f"{len(episodes)} answers, {client.cuts} connections cut; {done}", *table(episodes)]
    return Trial(fleet, [*episodes, *again], wrong, [*told, *times(faults.takeovers)])


def _names(text: str, key: str) -> bool:
    return re.search(rf"{re.escape(key)}(?![\w-])", text) is not None
