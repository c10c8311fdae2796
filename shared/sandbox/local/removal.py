"""Ending a local sandbox: every process of it, then its files. Blocks; callers use a thread."""

import signal
from pathlib import Path
from typing import Final

from shared.errors import ProviderError
from shared.ports.sandbox import StopReceipt
from shared.sandbox.local.folder import BoxFolder, BoxRecord
from shared.sandbox.local.launch import keepers
from shared.sandbox.local.processes import Process, every_process, has_variable, kill_all, runs_as

KEEPER_STOP_S: Final = 12.0
"""A plain keeper kills its tree itself, and takes up to 10 s for a fork storm."""
KILL_S: Final = 10.0
BOX_VARIABLE: Final = "PADDOCK_SANDBOX"


def remove_box(directory: Path, box_id: str) -> StopReceipt:
    """End it and delete its folder.

    Raises:
        ProviderError: some process or file of it is left. It may be tried again.
    """
    folder = BoxFolder(directory, box_id)
    if not folder.path.exists():
        return StopReceipt("already_absent")
    record = folder.read()
    if record is not None:
        _end(folder, record)
    try:
        folder.remove()
    except FileNotFoundError:
        return StopReceipt("already_absent")  # somebody else was removing it, too
    except OSError as error:
        raise ProviderError(f"The files of the sandbox {box_id} cannot be removed: {error}.") from error
    return StopReceipt("stopped")


def _end(folder: BoxFolder, record: BoxRecord) -> None:
    """Under bubblewrap the keeper is the first process of a namespace that ends with it; else it ends its tree."""
    keeper = folder.keeper()
    if keeper is not None:
        keeper.send(signal.SIGKILL if record.isolated else signal.SIGTERM)
        if record.isolated is False:
            keeper.send(signal.SIGCONT)  # it may have been paused
        keeper.wait(KILL_S if record.isolated else KEEPER_STOP_S)
    if not kill_all(lambda: _left(folder.id, record), KILL_S):
        raise ProviderError(f"Processes of the sandbox {folder.id} could not be killed.")


def _left(box_id: str, record: BoxRecord) -> list[Process]:
    """What is alive of a box: its keepers, what carries its mark, and whatever runs as its own user."""
    mark = f"{BOX_VARIABLE}={box_id}".encode()
    own = [
        one
        for one in every_process()
        if (record.uid is not None and runs_as(one, record.uid)) or has_variable(one, mark)
    ]
    return own + keepers(box_id)
