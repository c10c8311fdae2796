"""A verifier whose tasks say how it ends. What ran is counted; a run may be held at a gate."""

import asyncio
from collections import Counter
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from shared.contracts.resources import ReverifyMode, Verdict
from shared.ports.verifier import Answer, Judge

RUNS: Counter[str] = Counter()
STARTED: dict[str, asyncio.Event] = {}
GATES: dict[str, asyncio.Event] = {}


def gate(name: str) -> tuple[asyncio.Event, asyncio.Event]:
    """Hold the task of that name; its two events: it has started, it may go on."""
    STARTED[name], GATES[name] = asyncio.Event(), asyncio.Event()
    return STARTED[name], GATES[name]


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")

    needs_session: bool = False
    reverify_mode: ReverifyMode = "stateless"


class Task(BaseModel):
    name: str
    end: Literal["reward", "raise", "judge", "not_json", "hang"] = "reward"
    reward: float = 1.0


class Scripted:
    task_data = Task

    def __init__(self, options: Options) -> None:
        self.needs_session = options.needs_session
        self.reverify_mode = options.reverify_mode

    async def verify(self, task: Task, answer: Answer, judge: Judge | None) -> Verdict:
        RUNS[task.name] += 1
        if task.name in STARTED:
            STARTED[task.name].set()
            await GATES[task.name].wait()
        extra: dict[str, Any] = {"run": RUNS[task.name], "nothing": None, "state": answer.state, "text": "größer"}
        if task.end == "raise":
            raise ValueError("the answer sheet is missing; token sk-abcdefghij")
        if task.end == "hang":
            await asyncio.Event().wait()
        if task.end == "not_json":
            extra["huge"] = 2**70
        if task.end == "judge":
            assert judge is not None
            extra["said"] = await judge.ask("Is it right?", system="You are a judge.", timeout_s=5)
        return Verdict.model_validate({"reward": task.reward, **extra})

    def aggregate(self, results: list[dict[str, Any]]) -> dict[str, Any]:
        return {"seen": len(results)}

    async def close(self) -> None:
        return


def create(options: Options) -> Scripted:
    return Scripted(options)
