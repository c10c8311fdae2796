"""A real proxy in front of the Docker engine's socket that answers late, wrongly, or only when it is told to."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

ENGINE = urlsplit(os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")).path


@dataclass(slots=True)
class Rule:
    """What happens to requests whose first line has `pattern` in it. Seconds; `reply` is given instead of the engine's.

    `times` bounds how often it applies. `seen` is set when such a request has come.
    """

    pattern: str
    hold_request_s: float = 0.0
    hold_answer_s: float = 0.0
    reply: tuple[int, str] | None = None
    times: int = 1_000_000
    seen: asyncio.Event = field(default_factory=asyncio.Event)


class EngineProxy:
    def __init__(self, path: Path) -> None:
        self.host = f"unix://{path}"
        self.rules: list[Rule] = []
        self.requests: list[str] = []
        self._open: set[asyncio.Task[None]] = set()

    def _rule_of(self, line: str) -> Rule | None:
        for rule in self.rules:
            if rule.pattern in line and rule.times > 0:
                rule.times -= 1
                rule.seen.set()
                return rule
        return None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._open.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine_reader, engine_writer = await asyncio.open_unix_connection(ENGINE)
        answer_at = [0.0]
        answering = asyncio.create_task(_copy(engine_reader, writer, lambda: answer_at[0]))
        try:
            while data := await reader.read(65_536):
                line = data.split(b"\r\n", 1)[0].decode(errors="replace")
                rule = self._rule_of(line) if " HTTP/1." in line else None
                if " HTTP/1." in line:
                    self.requests.append(line)
                if rule is None:
                    engine_writer.write(data)
                    continue
                await self._apply(rule, data, writer, engine_writer, answer_at)
            engine_writer.write_eof()
            await answering
        finally:
            answering.cancel()
            engine_writer.close()

    async def _apply(
        self,
        rule: Rule,
        data: bytes,
        writer: asyncio.StreamWriter,
        engine_writer: asyncio.StreamWriter,
        answer_at: list[float],
    ) -> None:
        if rule.reply is not None:
            status, body = rule.reply
            head = f"HTTP/1.1 {status} Told\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body.encode())
            return
        if rule.hold_request_s:
            # The engine gets it although the client has gone meanwhile.
            asyncio.get_running_loop().call_later(rule.hold_request_s, _send_alone, data)
            await asyncio.sleep(rule.hold_request_s)
            return
        answer_at[0] = asyncio.get_running_loop().time() + rule.hold_answer_s
        engine_writer.write(data)

    async def close(self) -> None:
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)


_ALONE: set["asyncio.Task[None]"] = set()


def _send_alone(data: bytes) -> None:
    task = asyncio.ensure_future(_ask_alone(data))
    _ALONE.add(task)
    task.add_done_callback(_ALONE.discard)


async def _ask_alone(data: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(ENGINE)
    writer.write(data)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5):
            await reader.read(65_536)
    writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, not_before: Callable[[], float]) -> None:
    while data := await reader.read(65_536):
        await asyncio.sleep(not_before() - asyncio.get_running_loop().time())
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()


@asynccontextmanager
async def engine_proxy(folder: Path) -> AsyncIterator[EngineProxy]:
    """A proxy for the length of a test."""
    path = folder / "engine.sock"
    proxy = EngineProxy(path)
    server = await asyncio.start_unix_server(proxy.serve, path)
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
