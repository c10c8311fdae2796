"""A toolset with a sum as its state, tools that refuse, break or wait, and a release that may fail."""

import asyncio
from typing import Any

from pydantic import BaseModel, ConfigDict

from shared.ports.toolset import ToolError, ToolSpec

FAILING_RELEASES: set[str] = set()
RELEASED: list[str] = []
STARTED: dict[str, asyncio.Event] = {}
GATES: dict[str, asyncio.Event] = {}


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Amount(BaseModel):
    model_config = ConfigDict(extra="forbid")

    amount: int


class Nothing(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Ledger:
    tools = (
        ToolSpec("add", "Add an amount to the sum.", Amount),
        ToolSpec("refuse", "Say no.", Nothing),
        ToolSpec("break_down", "Fail by its own fault.", Nothing),
        ToolSpec("wait", "Wait at a gate, then add one.", Nothing),
    )

    def initial_state(self, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"sum": 0, "name": task_data["name"]}

    async def call(self, name: str, arguments: Any, state: dict[str, Any]) -> str:
        if name == "refuse":
            state["sum"] = -1
            raise ToolError("The ledger is closed on Sundays.")
        if name == "break_down":
            raise RuntimeError("ink is out")
        if name == "wait":
            STARTED[state["name"]].set()
            await GATES[state["name"]].wait()
        state["sum"] += arguments.amount if isinstance(arguments, Amount) else 1
        return f"The sum is {state['sum']}."

    async def release(self, state: dict[str, Any]) -> None:
        if state["name"] in FAILING_RELEASES:
            raise ConnectionError("the bank does not answer")
        RELEASED.append(state["name"])


def create(options: Options) -> Ledger:
    return Ledger()
