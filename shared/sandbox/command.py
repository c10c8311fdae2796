"""Running one command over a provider's byte streams: input in, output out, the end told by the supervisor.

Whoever stops waiting (a cancellation, an engine that is silent) closes the input; the supervisor in the sandbox
takes that as the order to end the command with all that it started.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from shared.cleanup import shielded
from shared.sandbox.wire import END_OF_INPUT, CommandRequest, End, StreamReader, input_frames

END_GRACE_S: Final = 25.0
"""How long after its time limit a command's end is waited for: the supervisor may need 10 s to kill a fork storm."""
ABANDON_S: Final = 12.0
FIRST_WORDS_BYTES: Final = 500
OutputName = Literal["stdout", "stderr"]


class CommandStream(Protocol):
    """A started `once`, as a provider reaches it. Raises OSError when the connection breaks."""

    async def write(self, data: bytes) -> None: ...

    async def end_input(self) -> None:
        """Close the input: what still runs is ended."""

    async def read(self) -> tuple[OutputName, bytes] | None:
        """Some output; None when nothing more can come."""

    async def close(self) -> None:
        """Let everything go; idempotent."""


class CommandSilentError(Exception):
    """Nothing told the command's end in time."""


@dataclass(slots=True)
class CommandOutputs:
    """Where output goes, piece by piece; called in the event loop."""

    stdout: Callable[[bytes], None]
    stderr: Callable[[bytes], None]


class Command:
    """One request on one stream."""

    def __init__(self, stream: CommandStream, request: CommandRequest, outputs: CommandOutputs) -> None:
        self._stream = stream
        self._request = request
        self._sinks = {"stdout": outputs.stdout, "stderr": outputs.stderr}
        self._readers = {name: StreamReader(request.nonce) for name in ("stdout", "stderr")}
        self.first_words = b""
        """The beginning of all output, so that an engine's own words can be told from a command's."""

    async def run(self, stdin: AsyncIterator[bytes]) -> End | None:
        """Run to the end; None when the streams ended without telling it.

        Raises:
            CommandSilentError: neither the command nor the streams ended.
        """
        feeding = asyncio.create_task(self._feed(stdin))
        try:
            return await self._read_until(self._request.timeout_s + END_GRACE_S)
        except BaseException:
            await shielded(self._abandon())
            raise
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
            await self._stream.close()

    async def _feed(self, stdin: AsyncIterator[bytes]) -> None:
        """A command may end without reading its input; that the pipe is closed then is no error."""
        with contextlib.suppress(OSError):
            await self._stream.write(self._request.encoded())
            async for data in stdin:
                for frame in input_frames(data):
                    await self._stream.write(frame)
            await self._stream.write(END_OF_INPUT)

    async def _read_until(self, timeout_s: float) -> End | None:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._read()
        except TimeoutError as error:
            raise CommandSilentError from error

    async def _read(self) -> End | None:
        while not all(reader.ended for reader in self._readers.values()):
            try:
                piece = await self._stream.read()
            except OSError:
                piece = None
            if piece is None:
                for name, reader in self._readers.items():
                    self._sinks[name](reader.rest())
                break
            name, data = piece
            if len(self.first_words) < FIRST_WORDS_BYTES:
                self.first_words += data[:FIRST_WORDS_BYTES]
            self._sinks[name](self._readers[name].feed(data))
        return End.parse(self._readers["stderr"].end_text) if self._readers["stderr"].ended else None

    async def _abandon(self) -> None:
        """The command's processes are gone when its end is told; more than a while is not waited for that."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(ABANDON_S):
                await self._stream.end_input()
                while not self._readers["stderr"].ended and (piece := await self._stream.read()) is not None:
                    self._readers[piece[0]].feed(piece[1])


async def one_input(data: bytes = b"") -> AsyncIterator[bytes]:
    if data:
        yield data
