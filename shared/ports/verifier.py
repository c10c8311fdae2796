"""What grades a response. A verifier is a plug-in: a module in `services/resources/verifiers/` with `create`."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel

from shared.contracts.resources import ReverifyMode, Verdict


@dataclass(frozen=True, slots=True)
class ToolCallRecord:
    """One call of a lent tool, as the resources server served it."""

    name: str
    arguments: dict[str, Any]
    ok: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """What a verifier looks at. `response` is the agent's Responses object, `params` the row's request."""

    params: dict[str, Any]
    response: dict[str, Any]
    tool_calls: tuple[ToolCallRecord, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)


class Judge(Protocol):
    """Asks a model through the model proxy, under the episode's own key, in phase `verify`."""

    async def ask(self, prompt: str, *, system: str | None = None, timeout_s: float | None = None) -> str:
        """The text of the model's answer.

        Raises:
            JudgeError: the call failed, or the answer was cut off.
        """


class Verifier(Protocol):
    """One configured verifier, shared by all sessions of its resources entry.

    `task_data` is the model that the row's task fields must fit; fields that it does not declare are
    allowed and ignored. `needs_session` tells whether a verdict needs what the live session holds.
    """

    task_data: type[BaseModel]
    reverify_mode: ReverifyMode
    needs_session: bool

    async def verify(self, task: Any, answer: Answer, judge: Judge | None) -> Verdict:
        """Grade. Called at most once per session; the verdict is stored and replayed.

        Raises:
            JudgeError: the judge could not be asked; the sample is masked.
            Exception: anything else is a failure of the verifier, never a reward.
        """

    async def close(self) -> None:
        """End what the verifier started; idempotent."""
