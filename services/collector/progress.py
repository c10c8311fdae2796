"""The progress of a run on standard error: two steady lines on a terminal, elsewhere a plain line when it changes."""

import asyncio
import time
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from services.collector.standing import Standing, duration

BAR_WIDTH: Final = 24
DRAW_EVERY_S: Final = 0.25
LINE_EVERY_S: Final = 5.0
# A sign of life where nothing changes.
SAME_LINE_EVERY_S: Final = 300.0


class Progress:
    """Shows `standing` until it is closed; nothing where no row is due. Needs a running event loop."""

    def __init__(self, console: Console, standing: Standing) -> None:
        self._console = console
        self._standing = standing
        self._began = time.monotonic()
        self._live: Live | None = None
        self._ticker: asyncio.Task[None] | None = None
        if not standing.due:
            return
        if console.is_terminal:
            # Drawn by the event loop itself, so that no thread reads what it changes.
            self._live = Live(get_renderable=self._lines, console=console, auto_refresh=False, transient=True)
            self._live.start(refresh=True)
            self._ticker = asyncio.create_task(self._draw(self._live))
        else:
            self._ticker = asyncio.create_task(self._tell())

    def close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        if self._live is not None:
            self._live.stop()
            self._live = None

    async def _draw(self, live: Live) -> None:
        while True:
            await asyncio.sleep(DRAW_EVERY_S)
            live.refresh()

    async def _tell(self) -> None:
        told, told_at = "", time.monotonic()
        while True:
            await asyncio.sleep(LINE_EVERY_S)
            line = ", ".join(filter(None, (self._standing.counts(), self._standing.places())))
            now = time.monotonic()
            if line != told or now - told_at > SAME_LINE_EVERY_S:
                told, told_at = line, now
                pace = self._standing.pace()
                self._console.print(Text(f"{line}, {pace}" if pace else line), soft_wrap=True)

    def _lines(self) -> RenderableType:
        """Always two, and cut at the edge: lines that come and go are what flickers."""
        standing = self._standing
        counts = ", ".join(filter(None, (standing.counts(), standing.pace())))
        first = Table.grid(padding=(0, 1), expand=True)
        first.add_column(width=BAR_WIDTH)
        first.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        first.add_column(no_wrap=True)
        first.add_row(
            ProgressBar(total=standing.due, completed=standing.done, width=BAR_WIDTH),
            Text(counts),
            Text(duration(time.monotonic() - self._began)),
        )
        return Group(first, Text(standing.places(), no_wrap=True, overflow="ellipsis"))
