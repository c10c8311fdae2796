"""INT and TERM while a run goes: the first asks it to stop, the second leaves at once."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def told_by_signals(stop: asyncio.Event) -> Iterator[list[int]]:
    """The first signal sets `stop`; yields which came. Only the main thread hears signals.

    The second one raises SystemExit wherever the program is, so that nothing can hold it up. What it cuts short
    is safe: every line is written whole, and what has no line is asked for again by a resumed run.
    """
    received: list[int] = []
    loop = asyncio.get_running_loop()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if received:
            raise SystemExit(128 + number)
        received.append(number)
        loop.call_soon_threadsafe(stop.set)

    before: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, on_signal)
    except ValueError:
        yield received
        return
    try:
        yield received
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
