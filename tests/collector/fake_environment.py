"""An environment server of a few lines: joins and replays by key, knows `Prefer`, counts what it sees."""

import asyncio
import json
import re
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

Body = dict[str, Any]
Play = Callable[[Body], Awaitable[Body]]
Gate = Callable[[Body], Response | None]


def key_of(body: Body) -> str:
    episode_id = body["episode_id"]
    return str(episode_id["rollout_id"]) + (f"-a{episode_id['attempt']}" if episode_id["attempt"] else "")


def graded(body: Body, reward: float = 1.0, **fields: Any) -> Body:
    """The flat answer of a graded episode."""
    return {"reward": reward, "mask_sample": False, "episode_id": body["episode_id"], **fields}


def failing(body: Body, *, terminal: bool, kind: str = "model_overloaded") -> Body:
    """The flat answer of an episode that failed."""
    failure = {"failure_reason": f"it is {kind}", "terminal": terminal, "failure_kind": kind, "stage": "agent"}
    return {"failure": failure, "episode_id": body["episode_id"], "_ng_failure_class": "environment_server_failed"}


async def always_one(body: Body) -> Body:
    return graded(body)


class FakeEnvironment:
    """`play` runs an episode; `gate` may answer a post before anything is started."""

    def __init__(self, play: Play = always_one, *, gate: Gate | None = None, longest_wait_s: float = 30.0) -> None:
        self.posts: list[Body] = []
        self.prefers: list[str] = []
        self.authorizations: list[str | None] = []
        self.polls: Counter[str] = Counter()
        self.starts: Counter[str] = Counter()
        self.cancelled: list[str] = []
        self.running = 0
        self.most_running = 0
        self.ready = True
        self._play = play
        self._gate = gate
        self._polled: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._given_up: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._longest_wait_s = longest_wait_s
        self._episodes: dict[str, asyncio.Task[Body]] = {}
        self.app = FastAPI()
        self.app.get("/readyz")(self._readyz)
        self.app.post("/run")(self._run)
        self.app.get("/episodes/{key}")(self._episode)
        self.app.delete("/episodes/{key}")(self._cancel)

    async def _readyz(self) -> Response:
        return JSONResponse({"status": "ready", "service": "environment"}, 200 if self.ready else 503)

    async def _run(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.posts.append(body)
        self.prefers.append(request.headers.get("prefer", ""))
        self.authorizations.append(request.headers.get("authorization"))
        if self._gate is not None and (refusal := self._gate(body)) is not None:
            return refusal
        key = key_of(body)
        if key not in self._episodes:
            self._episodes[key] = asyncio.create_task(self._started(key, body))
        return await self._answer(request, key)

    async def _episode(self, request: Request, key: str) -> Response:
        if key not in self._episodes:
            self._polled[key].set()
            return _not_found(key)
        self.polls[key] += 1
        self._polled[key].set()
        return await self._answer(request, key)

    async def _cancel(self, key: str) -> Response:
        self.cancelled.append(key)
        if key not in self._episodes:
            return _not_found(key)
        self._given_up[key].set()
        return JSONResponse({"key": key}, 202)

    async def _started(self, key: str, body: Body) -> Body:
        self.starts[key] += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._play_or_give_up(key, body)
        finally:
            self.running -= 1

    async def _play_or_give_up(self, key: str, body: Body) -> Body:
        playing = asyncio.ensure_future(self._play(body))
        given_up = asyncio.ensure_future(self._given_up[key].wait())
        try:
            await asyncio.wait({playing, given_up}, return_when=asyncio.FIRST_COMPLETED)
            return playing.result() if playing.done() else failing(body, terminal=False, kind="cancelled")
        finally:
            playing.cancel()
            given_up.cancel()

    async def _answer(self, request: Request, key: str) -> Response:
        episode = self._episodes[key]
        wait = re.search(r"wait=(\d+)", request.headers.get("prefer", ""))
        longest_s = min(self._longest_wait_s, float(wait.group(1))) if wait else None
        done, _ = await asyncio.wait({episode}, timeout=longest_s)
        if not done:
            return JSONResponse({"stage": "agent"}, 202, {"location": f"/episodes/{key}"})
        if episode.cancelled():
            return _not_found(key) if request.method == "GET" else JSONResponse({}, 503)
        return JSONResponse(episode.result())

    async def polled(self, key: str) -> None:
        """Return once somebody has asked for the episode."""
        await self._polled[key].wait()

    def forget(self) -> None:
        """What a restart without a store does."""
        for task in self._episodes.values():
            task.cancel()
        self._episodes.clear()


class HeldEnvironment(FakeEnvironment):
    """The first `free` rows, by their field `n`, end at once; the others wait for `go`."""

    def __init__(self, free: int = 0) -> None:
        super().__init__(self._hold)
        self.go = asyncio.Event()
        self._entered = asyncio.Semaphore(0)
        self._free = free

    async def _hold(self, body: Body) -> Body:
        if body["n"] >= self._free:
            self._entered.release()
            await self.go.wait()
        return graded(body)

    async def holds(self, count: int) -> None:
        """Return once so many more rows wait."""
        for _ in range(count):
            await self._entered.acquire()


def _not_found(key: str) -> Response:
    return JSONResponse(
        {
            "error": {"message": f"There is no episode '{key}'."},
            "failure": {"failure_kind": "not_found", "terminal": True},
        },
        404,
    )


def flat_row(text: str = "hello", **fields: Any) -> Body:
    return {"responses_create_params": {"input": [{"role": "user", "content": text}]}, **fields}


def native_row(rollout_id: str, attempt: int = 0) -> Body:
    return {
        "episode_id": {"rollout_id": rollout_id, "attempt": attempt},
        "task": {
            "task_id": {"taskset": "math", "task_id": "t1"},
            "task_input": {"responses_create_params": {"input": "hello"}, "task_data": {"expected_answer": "1"}},
        },
    }


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_jsonl(path: Path) -> list[Body]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
