"""The model behind the mesh: a Chat Completions server that writes down everything it is asked.

What it is asked is the side effect by which activations are counted: a first turn is a request that holds no
answer of its own yet. Every answer carries a number, so that a verdict can be traced to the answer that it is
about.
"""

import asyncio
import random
import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import orjson

from services.resources.grading.judging import DIFFERENT_LABEL, EQUAL_LABEL
from tests.chaos.journal import Journal
from tests.chaos.rows import CITIES, EXPECTED, OTHER, OTHER_CITIES, Task
from tests.model_proxy.wire import Asked, json_body, raw_upstream

POLICY, JUDGE = "policy-model", "judge-model"
WAIT_S = 60.0
_KEY = re.compile(r"#([\w.-]+)#")

Holds = Callable[[str, int], bool]


class Model:
    """`turns` counts requests by episode and turn, `served` has the numbers of the answers that were sent whole."""

    def __init__(self, journal: Journal) -> None:
        self.url = ""
        self.turns: dict[str, Counter[int]] = defaultdict(Counter)
        self.served: dict[str, set[int]] = defaultdict(set)
        self.judged: Counter[str] = Counter()
        self.slowest_s = 0.0
        self._journal = journal
        self._tasks: dict[str, Task] = {}
        self._random = random.Random(0)
        self._answers = 0
        self._holds: Holds = lambda _key, _turn: False
        self._held: set[str] = set()
        self._gate = asyncio.Event()
        self._changed = asyncio.Condition()

    def know(self, tasks: Iterable[Task]) -> None:
        self._tasks |= {task.rollout_id: task for task in tasks}

    def pace(self, slowest_s: float, seed: int = 0) -> None:
        """Take a random time for each answer."""
        self.slowest_s = slowest_s
        self._random = random.Random(seed)

    def hold(self, holds: Holds) -> None:
        """Keep the answers back to which `holds(key, turn)` is true; a judge's turn is -1."""
        self._holds, self._gate, self._held = holds, asyncio.Event(), set()

    def let_go(self) -> None:
        self._holds = lambda _key, _turn: False
        self._gate.set()

    async def wait_until_held(self, keys: Iterable[str]) -> None:
        """Until an answer to each of these episodes is kept back."""
        wanted = set(keys)
        await self._wait_until(lambda: wanted <= self._held)

    async def wait_until_judged(self, key: str, times: int) -> None:
        """Until the judge was asked so often about an episode."""
        await self._wait_until(lambda: self.judged[key] >= times)

    async def _wait_until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(holds)

    async def handle(self, asked: Asked) -> None:
        body = asked.json
        messages = body["messages"]
        found = _KEY.search(orjson.dumps(messages).decode())
        assert found is not None, body
        key = found[1]
        judge = body["model"] == JUDGE
        turn = -1 if judge else sum(message["role"] == "assistant" for message in messages)
        if judge:
            self.judged[key] += 1
        else:
            self.turns[key][turn] += 1
        self._journal.note("the model is asked", key=key, turn=turn)
        await self._take_time(key, turn)
        self._answers += 1
        number = self._answers
        await asked.write(_completion(number, self._message(self._task_of(key), turn, number)))
        gone = asked.gone.is_set()
        self._journal.note("the model has answered", key=key, turn=turn, number=number, gone=gone)
        if not judge and not gone:
            self.served[key].add(number)

    async def _take_time(self, key: str, turn: int) -> None:
        gate, held = self._gate, self._holds(key, turn)
        async with self._changed:
            if held:
                self._held.add(key)
            self._changed.notify_all()
        if held:
            await gate.wait()
        if self.slowest_s:
            await asyncio.sleep(self._random.uniform(0.0, self.slowest_s))

    def _task_of(self, key: str) -> Task:
        return self._tasks[re.sub(r"-a\d+$", "", key)]

    @staticmethod
    def _message(task: Task, turn: int, number: int) -> dict[str, Any]:
        if turn == -1:
            return {"content": EQUAL_LABEL if task.right else DIFFERENT_LABEL}
        cities = CITIES if task.right else OTHER_CITIES
        if task.kind == "weather" and turn < len(cities):
            function = {"name": "get_weather", "arguments": orjson.dumps({"city": cities[turn]}).decode()}
            return {"content": None, "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}]}
        right = task.right and task.kind != "judged"
        return {"content": rf"\boxed{{{EXPECTED if right else OTHER}}} {told(number)}"}


def told(number: int) -> str:
    """How an answer says which one it is."""
    return f"(answer {number})"


def numbers_in(text: str) -> set[int]:
    return {int(number) for number in re.findall(r"\(answer (\d+)\)", text)}


def _completion(number: int, message: dict[str, Any]) -> bytes:
    finish = "tool_calls" if "tool_calls" in message else "stop"
    return json_body(
        {
            "id": f"chatcmpl-{number}",
            "object": "chat.completion",
            "created": 1_700_000_000,
            "model": "up",
            "choices": [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}],
            "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9},
        }
    )


@asynccontextmanager
async def model_server(journal: Journal) -> AsyncIterator[Model]:
    model = Model(journal)
    async with raw_upstream(model.handle) as upstream:
        model.url = upstream.url
        yield model
