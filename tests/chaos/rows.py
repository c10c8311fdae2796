"""Rows whose reward is known before they are run, since the model that is asked is the tests' own."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from tests.mesh.rows import WEATHER_TOOL

Kind = Literal["math", "queued", "judged", "weather"]
KINDS: tuple[Kind, ...] = get_args(Kind)
EXPECTED = "12"
OTHER = "13"
CITIES = ("Oslo", "Lima")
OTHER_CITIES = ("Oslo", "Rome")


@dataclass(frozen=True)
class Task:
    """A row of the environment `kind`, which the model does `right` or wrong.

    In `judged` the library finds every answer wrong, so that the judge has the last word.
    """

    rollout_id: str
    kind: Kind
    right: bool

    @property
    def reward(self) -> float:
        return 1.0 if self.right else 0.0

    def key(self, attempt: int = 0) -> str:
        return f"{self.rollout_id}-a{attempt}" if attempt else self.rollout_id

    def request(self, attempt: int = 0) -> dict[str, Any]:
        """As it is posted. The prompt names the episode's key, so that the model can tell attempts apart."""
        return {
            "episode_id": {"rollout_id": self.rollout_id, "attempt": attempt},
            "task": {
                "task_id": {"taskset": "chaos", "task_id": self.rollout_id},
                "task_input": {
                    "responses_create_params": self._params(self.key(attempt)),
                    "task_data": self._data(self.key(attempt)),
                },
            },
            "environment": self.kind,
        }

    def flat_row(self) -> dict[str, Any]:
        """As it stands in a file. All attempts have one prompt, which names the first one's key."""
        return {
            "responses_create_params": self._params(self.rollout_id), **self._data(self.rollout_id),
            "environment": self.kind,
        }  # fmt: skip

    def _params(self, key: str) -> dict[str, Any]:
        params: dict[str, Any] = {"input": [{"role": "user", "content": _question(key)}]}
        return params | {"tools": [WEATHER_TOOL]} if self.kind == "weather" else params

    def _data(self, key: str) -> dict[str, Any]:
        if self.kind == "weather":
            return {"expected_calls": [{"name": "get_weather", "arguments": {"city": city}} for city in CITIES]}
        return {"question": _question(key), "expected_answer": EXPECTED}


def _question(key: str) -> str:
    return f"#{key}# What is it?"


def tasks(name: str, count: int, *kinds: Kind) -> list[Task]:
    """As many of each kind, half of them to be done wrong."""
    of = kinds or KINDS
    return [Task(f"{name}-{number}", of[number % len(of)], number // len(of) % 2 == 0) for number in range(count)]
