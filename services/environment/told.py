"""What has happened in an episode so far: facts that its answer is made of, and its journal.

The journal is what another server needs to continue the episode when this one dies: it is written with every
stage, so that no step that counts is lost or done from a guess.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

from services.environment.budgets import AgentLimit
from shared.clients.resources import Verified
from shared.contracts.agent import CloseReceipt
from shared.contracts.episode import Outcome
from shared.contracts.failure import CleanupError, Stage
from shared.errors import CancelledEpisodeError, PaddockError
from shared.http.problems import recorded, restored
from shared.telemetry import current_stage
from shared.tracing import StageSpans


def cancelled_by_client() -> CancelledEpisodeError:
    """Why an episode ends that a client has cancelled, over whatever server."""
    return CancelledEpisodeError("The episode was cancelled by a client.")


@dataclass(slots=True)
class Told:
    """`response` is the agent's response as it came; `timings_s` the time that each stage took.

    `activated_at` (Unix seconds) is when the activation was first asked for, 0 before; `ran` is true once it has
    ended, by itself or at its limit. `takeovers` counts the servers that died, or stopped, in the middle of the
    episode; `given_up` is set when this one leaves it to the next.
    """

    stage: Stage = Stage.ADMISSION
    activated_at: float = 0.0
    ran: bool = False
    response: bytes | None = None
    outcome: Outcome | None = None
    receipt: CloseReceipt | None = None
    resources_cookies: dict[str, str] = field(default_factory=dict)
    timed_out: AgentLimit | None = None
    verified: Verified | None = None
    failure: PaddockError | None = None
    cleanup_errors: tuple[CleanupError, ...] = ()
    gaps: list[str] = field(default_factory=list)
    timings_s: dict[str, float] = field(default_factory=dict)
    takeovers: int = 0
    given_up: bool = False
    spans: StageSpans = field(default_factory=StageSpans)
    _since: float = field(default_factory=time.monotonic)

    def enter(self, stage: Stage) -> None:
        """Stage changes are where time is booked."""
        self._book()
        self.stage = stage
        current_stage.set(stage)
        self.spans.enter(stage)
        if stage is Stage.AGENT:
            self.activated_at = self.activated_at or time.time()

    def fail(self, failure: PaddockError, cause: BaseException) -> None:
        failure.__cause__ = cause
        self.failure = failure

    def _book(self) -> None:
        now = time.monotonic()
        name = self.stage.value
        self.timings_s[name] = self.timings_s.get(name, 0.0) + now - self._since
        self._since = now

    @contextmanager
    def unwinding(self) -> Iterator[None]:
        """Book the unwind as cleanup; the stage that was running stays the episode's."""
        self._book()
        self.spans.enter("unwind")
        try:
            yield
        finally:
            now = time.monotonic()
            name = "unwind"
            self.timings_s[name] = now - self._since
            self._since = now

    def journal(self) -> bytes:
        """What a server that takes the episode over is to know; empty before there is anything."""
        if not self.activated_at and self.failure is None:
            return b""
        return orjson.dumps(
            {
                "activated_at": self.activated_at,
                "ran": self.ran,
                "response": None if self.response is None else orjson.Fragment(self.response),
                "outcome": None if self.outcome is None else self.outcome.model_dump(mode="json"),
                "receipt": None if self.receipt is None else self.receipt.model_dump(mode="json"),
                "resources_cookies": self.resources_cookies,
                "timed_out": self.timed_out,
                "failure": None if self.failure is None else recorded(self.failure),
                "timings_s": self.timings_s,
            }
        )

    @classmethod
    def continued(cls, stage: Stage, journal: bytes, takeovers: int) -> "Told":
        """What the servers before this one had come to know."""
        if not journal:
            return cls(stage=stage, takeovers=takeovers)
        known: dict[str, Any] = orjson.loads(journal)
        response, outcome, receipt = known["response"], known["outcome"], known["receipt"]
        timed_out, failure = known["timed_out"], known["failure"]
        return cls(
            stage=stage,
            activated_at=known["activated_at"],
            ran=known["ran"],
            response=None if response is None else orjson.dumps(response),
            outcome=None if outcome is None else Outcome.model_validate(outcome),
            receipt=None if receipt is None else CloseReceipt.model_validate(receipt),
            resources_cookies=known["resources_cookies"],
            timed_out=None if timed_out is None else AgentLimit(**timed_out),
            failure=None if failure is None else restored(failure),
            timings_s=known["timings_s"],
            takeovers=takeovers,
        )
