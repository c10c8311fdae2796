"""A client that repeats blindly: every request may be cut, refused or answered by another replica than the last."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.chaos.journal import Journal
from tests.chaos.rows import Task

PATIENCE_S = 150.0
WAIT_S = 5
PAUSE_S = 0.1
AWAY = frozenset({429, 502, 503, 504})
"""A balancer without a server, a server that stops or whose store is away; and a full queue."""


@dataclass(frozen=True)
class Episode:
    """One attempt at a task, and its only answer as it came."""

    task: Task
    attempt: int
    raw: bytes
    answer: dict[str, Any]
    took_s: float

    @property
    def key(self) -> str:
        return self.task.key(self.attempt)

    @property
    def failure(self) -> dict[str, Any] | None:
        failure: dict[str, Any] | None = self.answer.get("failure")
        return failure

    @property
    def ended_as(self) -> str:
        """`result`, `masked`, or the failure's kind and stage."""
        if self.failure is not None:
            return f"{self.failure['failure_kind']} at {self.failure['stage']}"
        return "masked" if self.answer["result"]["mask_sample"] else "result"


@dataclass
class Client:
    http: httpx.AsyncClient
    dice: random.Random
    journal: Journal
    cuts: int = 0
    unanswered: list[str] = field(default_factory=list)
    """What must not happen to an episode: no answer in time, or one that is none."""
    _asking: set["asyncio.Task[httpx.Response]"] = field(default_factory=set)

    async def run(self, url: str, task: Task, attempt: int = 0) -> Episode | None:
        """The answer, however often it has to be asked for; None when it is `unanswered`."""
        began = time.monotonic()
        accepted, last = False, "nothing"
        while time.monotonic() - began < PATIENCE_S:
            reply = await self._asked(url, task, attempt, accepted)
            status = None if reply is None else reply.status_code
            self.journal.note("the client is answered", key=task.key(attempt), status=status)
            if reply is None or status in AWAY:
                last = "no answer" if reply is None else f"{reply.status_code} {reply.text}"
                await asyncio.sleep(PAUSE_S)
            elif reply.status_code == 200:
                return Episode(task, attempt, reply.content, reply.json(), time.monotonic() - began)
            elif reply.status_code == 202:
                accepted, last = True, reply.text
            else:
                self.unanswered.append(f"{task.key(attempt)}: {reply.status_code} {reply.text}")
                return None
        self.unanswered.append(f"{task.key(attempt)}: not ended after {PATIENCE_S:g} s; the last word was: {last}")
        return None

    async def _asked(self, url: str, task: Task, attempt: int, accepted: bool) -> httpx.Response | None:
        """One request; None when its connection was lost, or was never there."""
        wait_s = self.dice.randint(0, WAIT_S)
        if accepted and self.dice.random() < 0.5:
            path = f"{url}/episodes/{task.key(attempt)}"
            request = self.http.get(path, headers={"Prefer": f"wait={wait_s}"})
        else:
            headers = {"Prefer": f"respond-async, wait={wait_s}"}
            request = self.http.post(f"{url}/run", json=task.request(attempt), headers=headers)
        asking = asyncio.create_task(request)
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        try:
            await asyncio.wait({asking})
        finally:
            asking.cancel()
        if asking.cancelled():
            return None
        error = asking.exception()
        if isinstance(error, httpx.TransportError):
            return None
        return asking.result()

    def cut(self, share: float) -> None:
        """Close the connections of some of the requests that wait for an answer."""
        for asking in sorted(self._asking, key=lambda task: task.get_name()):
            if self.dice.random() < share:
                self.cuts += 1
                asking.cancel()

    async def run_all(
        self, url: str, tasks: Sequence[Task], attempt: int = 0, *, at_once: int = 1000, twins: float = 0.0
    ) -> list[Episode]:
        """Every task's episode; a share of `twins` is sent by two at once, and both answers are given."""
        places = asyncio.Semaphore(at_once)

        async def one(task: Task) -> Episode | None:
            async with places:
                return await self.run(url, task, attempt)

        sent = [task for task in tasks for _ in range(2 if self.dice.random() < twins else 1)]
        return [episode for episode in await asyncio.gather(*map(one, sent)) if episode is not None]
