"""Removing a container, with the engine's word that it is gone."""

import asyncio
from typing import Final

from shared.deadline import Deadline
from shared.errors import ProviderError
from shared.ports.sandbox import StopReceipt
from shared.sandbox.docker.engine import Engine, EngineError

CONFIRM_S: Final = 30.0
FIRST_PAUSE_S: Final = 0.01
LONGEST_PAUSE_S: Final = 0.5


async def remove_container(engine: Engine, name: str) -> StopReceipt:
    """Kill and remove a container with its own volumes; a container that is not there is removed already.

    Raises:
        ProviderError: the engine did not do it, or still has it after a while. It may be tried again.
    """
    try:
        await engine.call("remove a container", lambda api: api.remove_container(name, force=True, v=True))
    except EngineError as error:
        if error.code == 404:
            return StopReceipt("already_absent")
        if error.code != 409:  # 409: somebody else is removing it right now
            raise
    await _confirm(engine, name)
    return StopReceipt("stopped")


async def _confirm(engine: Engine, name: str) -> None:
    deadline = Deadline.after(CONFIRM_S)
    pause_s = FIRST_PAUSE_S
    while not await _absent(engine, name):
        if deadline.passed:
            raise ProviderError(f"The Docker engine still has the container {name} {CONFIRM_S:g} s after its removal.")
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def _absent(engine: Engine, name: str) -> bool:
    try:
        await engine.call("inspect a container", lambda api: api.inspect_container(name))
    except EngineError as error:
        if error.code == 404:
            return True
        raise
    return False
