"""`paddock run` against real services through a proxy that can hold, cut or spoil each exchange."""

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.collector.fault_proxy import Exchange, Fault, FaultProxy, passes
from tests.mesh import rows
from tests.mesh.chat import ChatServer, Scene
from tests.mesh.processes import Done, Running, ServedMesh, paddock, running
from tests.model_proxy.wire import Asked, Handler

BOUND_S = 60.0
RIGHT = r"\boxed{12}"


class Hold:
    """Keeps exchanges waiting until the test opens it; what happens to them then is `then`'s affair."""

    def __init__(self, then: Fault = passes) -> None:
        self._then = then
        self._open = threading.Event()
        self._arrived = threading.Semaphore(0)
        self._done = threading.Semaphore(0)

    async def before(self, exchange: Exchange) -> None:
        """Hold the request back."""
        await self._wait()
        await self._then(exchange)

    async def after(self, exchange: Exchange) -> None:
        """Hold the whole answer back."""
        answer = await exchange.forward()
        await self._wait()
        await exchange.send(answer)
        self._done.release()

    async def _wait(self) -> None:
        self._arrived.release()
        while not self._open.is_set():  # noqa: ASYNC110 - it is opened in another thread
            await asyncio.sleep(0.01)

    def open(self) -> None:
        self._open.set()

    def wait_for(self, count: int) -> None:
        _count_down(self._arrived, count)

    def wait_until_sent(self, count: int) -> None:
        _count_down(self._done, count)


def answers_late(seconds: float, then: Handler) -> Handler:
    """A model that takes its time."""

    async def handler(asked: Asked) -> None:
        await asyncio.sleep(seconds)
        await then(asked)

    return handler


def wait_for_note(run: Running, pattern: str) -> None:
    """Until a line of what the run tells on the way matches."""
    deadline = time.monotonic() + BOUND_S
    while re.search(pattern, run.err, re.MULTILINE) is None:
        if run.process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"'{pattern}' was not told.\n{run.err}")
        time.sleep(0.02)


def _count_down(semaphore: threading.Semaphore, count: int) -> None:
    for _ in range(count):
        if not semaphore.acquire(timeout=BOUND_S):
            raise TimeoutError("too few exchanges came")


@dataclass
class RunRig:
    """One test's run: its rows, and where they go. Every row has a scene at the model."""

    folder: Path
    mesh: ServedMesh
    proxy: FaultProxy
    chat: ChatServer
    scenes: list[Scene] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.spoil_nothing()

    def rows(self, *answers: Sequence[Handler]) -> Path:
        """A file of as many rows as there are lists of answers."""
        # The folder's name is the test's own, so no other test's scene answers.
        markers = [f"<{self.folder.name} {number}>" for number in range(len(answers))]
        self.scenes = [self.chat.on(marker, *given) for marker, given in zip(markers, answers, strict=True)]
        return rows.write(self.folder / "rows.jsonl", [rows.math(marker, "12") for marker in markers])

    def on(self, method: str, prefix: str, fault: Fault) -> None:
        """Spoil these exchanges, and no other."""

        def choose(exchange: Exchange) -> Fault:
            return fault if exchange.method == method and exchange.path.startswith(prefix) else passes

        self.proxy.choose = choose

    def spoil_nothing(self) -> None:
        self.proxy.choose = lambda _: passes

    @contextlib.contextmanager
    def begun(self, file: Path, *more: object) -> Iterator[Running]:
        arguments = ("run", file, "--environment", "math", "-o", self.out, "--url", self.proxy.url, *more)
        with running(*arguments, cwd=self.folder, environ={}, name="run") as run:
            yield run

    @contextlib.contextmanager
    def resumed(self, *more: object) -> Iterator[Running]:
        """Without `--url`: the run knows it."""
        with running("run", "--resume", "-o", self.out, *more, cwd=self.folder, environ={}, name="again") as run:
            yield run

    def resume(self, *more: object) -> Done:
        """To the end."""
        return paddock("run", "--resume", "-o", self.out, *more, cwd=self.folder)

    @property
    def out(self) -> Path:
        return self.folder / "out.jsonl"

    @property
    def results(self) -> list[dict[str, Any]]:
        return rows.read(self.out)

    @property
    def failures(self) -> list[dict[str, Any]]:
        return rows.read(self.folder / "out_failures.jsonl")

    @property
    def keys(self) -> list[str]:
        """The episode ids that the run wrote down before it sent anything."""
        return [row["request"]["episode_id"]["rollout_id"] for row in rows.read(self.folder / "out_inputs.jsonl")]

    def told(self, key: str) -> httpx.Response:
        """What the environment server says of an episode."""
        return httpx.get(f"{self.mesh.url('environment')}/episodes/{key}", trust_env=False)

    def wait_for_calls(self, count: int | None = None) -> list[Asked]:
        """The model's calls of the first `count` rows, of all by default, once each has come."""
        return [scene.wait_for_call() for scene in self.scenes[:count]]

    def wait_until_ended(self) -> None:
        """Until the environment has an outcome for each row."""
        for key in self.keys:
            deadline = time.monotonic() + BOUND_S
            while self.told(key).status_code != 200:
                assert time.monotonic() < deadline, f"{key} did not end"
                time.sleep(0.02)

    def assert_each_ran_once(self) -> None:
        assert [len(scene.asked) for scene in self.scenes] == [1] * len(self.scenes)
        self.assert_complete()

    def assert_complete(self) -> None:
        """One right result for each row, and none twice."""
        assert sorted(result["_ng_task_index"] for result in self.results) == list(range(len(self.scenes)))
        assert {result["reward"] for result in self.results} == {1.0}
