"""What drives a model to do a task. A harness is a plug-in: a module or folder in `services/agent/harnesses/`.

The session layer (`services/agent/sessions.py`) owns deadlines, joins, replay, close and receipts; a
harness never does. Harnesses that run inside a sandbox follow a second form of this port.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from shared.contracts.agent import SeedAgentRequest, ToolAccess
from shared.contracts.failure import FailureCause


@dataclass(slots=True)
class Progress:
    """What a run has produced so far; the session layer reads it when it has to stop the run.

    `output` are Responses output items, `tools` the tools that the model was offered, `tool_observations`
    one record per tool call: `{name, call_id, started_at, ended_at, ok}`. `usages` has one entry per
    model call, null where the model gave no counts. `resources_cookies` are what the tools' server set.
    """

    output: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_observations: list[dict[str, Any]] = field(default_factory=list)
    usages: list[dict[str, Any] | None] = field(default_factory=list)
    model: str | None = None
    resources_cookies: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelAccess:
    """Where the harness reaches its model: an OpenAI-style base address and the one token it may use."""

    base_url: str
    token: str
    model: str


@dataclass(frozen=True, slots=True)
class Activation:
    """The single run of a harness in a session. `request` is the Responses request, its set fields only."""

    key: str
    request: dict[str, Any]
    tools: Sequence[ToolAccess]
    model: ModelAccess
    progress: Progress


@dataclass(frozen=True, slots=True)
class HarnessEnd:
    """How a run ended. `status` and `incomplete_reason` are those of the Responses API.

    `incomplete_reason`: `max_output_tokens`, `context_window`, `max_steps` or `content_filter`.
    """

    status: str
    incomplete_reason: str | None = None
    cause: FailureCause | None = None


class InProcessHarness(Protocol):
    """A harness that runs in the agent server itself."""

    model: str

    def validate(self, request: dict[str, Any]) -> None:
        """Refuse a request that this harness cannot serve.

        Raises:
            BadRowError: with the field path.
        """

    async def run(self, activation: Activation) -> HarnessEnd:
        """Run to the end, keeping `activation.progress` true at every await.

        Raises:
            PaddockError: the run could not be done and nothing is worth grading.
        """

    async def close(self) -> None:
        """End what the harness holds; idempotent."""


@runtime_checkable
class SettingUp(Protocol):
    """A harness whose sessions hold something from the seed to the close implements this, too."""

    async def setup(self, seed: SeedAgentRequest) -> dict[str, Any]:
        """Get ready for one session; what is returned is kept in its record and given to `teardown`.

        Raises:
            PaddockError: with what went wrong; `teardown` is then called with an empty mapping.
        """

    async def teardown(self, seed: SeedAgentRequest, held: dict[str, Any]) -> None:
        """Give back what the session holds; idempotent. Raises when that fails; it is then tried again."""
