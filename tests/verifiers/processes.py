"""What the kernel and the event loop tell about processes: used by tests of what starts and kills them."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

GONE_WITHIN_S = 10.0


@asynccontextmanager
async def heartbeat() -> AsyncIterator[list[float]]:
    """For how long something held the event loop at each beat, in seconds.

    That is the beat's delay without the time that this thread was ready and waited for a processor: on a
    busy machine it waits whatever this process does. A lock that another thread holds, or a call that
    blocks, is no such waiting and counts in full.
    """
    held: list[float] = []

    async def beat() -> None:
        while True:
            began, waited_s = time.monotonic(), _waited_for_processor_s()
            await asyncio.sleep(0.01)
            held.append(time.monotonic() - began - 0.01 - (_waited_for_processor_s() - waited_s))

    task = asyncio.create_task(beat())
    try:
        yield held
    finally:
        task.cancel()


def _waited_for_processor_s() -> float:
    """The kernel's count for the calling thread."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def children_of_this_process() -> list[int]:
    """Zombies, too."""
    tasks = Path("/proc/self/task").glob("*/children")
    return [int(pid) for task in tasks for pid in task.read_text().split()]


def stat(pid: int) -> list[str]:
    """The fields of `/proc/<pid>/stat` from the state on; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def runs(pid: int) -> bool:
    fields = stat(pid)
    return bool(fields) and fields[0] != "Z"


def ticks(pid: int) -> int:
    """Processor time that was used, in clock ticks."""
    fields = stat(pid)
    return int(fields[11]) + int(fields[12]) if fields else 0


def resident_mib(pid: int) -> float:
    fields = stat(pid)
    return int(fields[21]) * os.sysconf("SC_PAGESIZE") / 2**20 if fields else 0.0


def variables(pid: int) -> set[str]:
    """The names in the environment that the process was started with."""
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return {entry.partition("=")[0] for entry in entries if entry}


async def gone(pids: list[int]) -> bool:
    """Whether all processes end in time; a zombie has ended."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while any(runs(pid) for pid in pids) and time.monotonic() < deadline:  # noqa: ASYNC110 - /proc sends no events
        await asyncio.sleep(0.02)
    return not any(runs(pid) for pid in pids)
