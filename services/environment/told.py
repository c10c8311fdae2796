"""What has happened in an episode so far: facts that its answer is made of."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from services.environment.budgets import AgentLimit
from shared.clients.resources import Verified
from shared.contracts.agent import CloseReceipt
from shared.contracts.episode import Outcome
from shared.contracts.failure import CleanupError, Stage
from shared.errors import PaddockError


@dataclass(slots=True)
class Told:
    """`response` is the agent's response as it came; `timings_s` the time that each stage took."""

    stage: Stage = Stage.ADMISSION
    response: bytes | None = None
    outcome: Outcome | None = None
    receipt: CloseReceipt | None = None
    timed_out: AgentLimit | None = None
    verified: Verified | None = None
    failure: PaddockError | None = None
    cleanup_errors: tuple[CleanupError, ...] = ()
    gaps: list[str] = field(default_factory=list)
    timings_s: dict[str, float] = field(default_factory=dict)
    _since: float = field(default_factory=time.monotonic)

    def enter(self, stage: Stage) -> None:
        """Stage changes are where time is booked."""
        self._book()
        self.stage = stage

    def _book(self) -> None:
        now = time.monotonic()
        name = self.stage.value
        self.timings_s[name] = self.timings_s.get(name, 0.0) + now - self._since
        self._since = now

    @contextmanager
    def unwinding(self) -> Iterator[None]:
        """Book the unwind as cleanup; the stage that was running stays the episode's."""
        self._book()
        try:
            yield
        finally:
            now = time.monotonic()
            name = "unwind"
            self.timings_s[name] = now - self._since
            self._since = now
