"""A harness whose sessions hold something: every step can be made to wait or to fail by the test."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict

from services.agent.hosting import HarnessContext
from shared.contracts.agent import SeedAgentRequest
from shared.contracts.failure import FailureKind
from shared.errors import PaddockError
from shared.ports.harness import Activation, HarnessEnd


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass
class Holding:
    """What it did is in `log`; `gate` holds the setup and `run_gate` the run, `failures` counts what is to fail."""

    model: str
    log: list[str] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    run_gate: asyncio.Event = field(default_factory=asyncio.Event)
    in_setup: asyncio.Event = field(default_factory=asyncio.Event)
    in_run: asyncio.Event = field(default_factory=asyncio.Event)
    stubborn: bool = False
    failures: dict[str, int] = field(default_factory=dict)

    def validate(self, request: dict[str, Any]) -> None:
        return

    async def setup(self, seed: SeedAgentRequest) -> dict[str, Any]:
        self.log.append("setup")
        self.in_setup.set()
        await self.gate.wait()
        self._fail("setup")
        self.held.add(seed.agent_session_id)
        return {"box": seed.agent_session_id}

    async def teardown(self, seed: SeedAgentRequest, held: dict[str, Any]) -> None:
        self.log.append(f"teardown {held.get('box')}")
        self._fail("teardown")
        self.held.discard(seed.agent_session_id)

    async def run(self, activation: Activation) -> HarnessEnd:
        self.log.append("run")
        self.in_run.set()
        while True:
            try:
                await self.run_gate.wait()
                break
            except asyncio.CancelledError:
                if not self.stubborn:
                    raise
        self._fail("run")
        return HarnessEnd(status="completed")

    def _fail(self, step: str) -> None:
        if self.failures.get(step, 0) > 0:
            self.failures[step] -= 1
            error = PaddockError(f"no {step} today")
            error.kind, error.status, error.terminal = FailureKind.PROVIDER_UNAVAILABLE, 503, False
            raise error

    async def close(self) -> None:
        return


CREATED: list[Holding] = []


def create(_options: Options, context: HarnessContext) -> Holding:
    harness = Holding(context.entry.model)
    harness.gate.set()
    harness.run_gate.set()
    CREATED.append(harness)
    return harness
