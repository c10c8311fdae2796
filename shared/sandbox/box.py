"""What is the same in every sandbox: commands, files and errors over the supervisor's programs inside.

A provider's own class says how a program is started in its sandbox, how that stands, and how it is removed.
"""

import asyncio
import tarfile
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from shared.cleanup import shielded
from shared.contracts.sandbox import SandboxAccess, SandboxConnection, SandboxPlace
from shared.errors import (
    CleanupUnprovenError,
    CommandNotStartedError,
    ExitUnknownError,
    ProviderError,
    ProviderLostError,
    ProviderOomError,
    SandboxFileError,
)
from shared.ports.sandbox import (
    DOWNLOAD_LIMIT_BYTES,
    EXEC_TIMEOUT_S,
    OUTPUT_LIMIT_BYTES,
    ExecResult,
    SandboxStatus,
    StopReceipt,
)
from shared.sandbox.archive import Archive, parted
from shared.sandbox.command import Command, CommandOutputs, CommandSilentError, CommandStream, one_input
from shared.sandbox.identity import Accident, BoxIdentity
from shared.sandbox.output import CappedOutput
from shared.sandbox.probe import Probe
from shared.sandbox.wire import CommandRequest, End, refusal

TRANSFER_TIMEOUT_S: Final = 900.0
SAID_LIMIT_BYTES: Final = 4096
TAR_OVERHEAD_BYTES: Final = 1 << 20


class _TooMuchError(Exception):
    pass


class Box(ABC):
    """A sandbox in use by this process."""

    def __init__(self, identity: BoxIdentity) -> None:
        self._identity = identity
        self._detached = False
        self._stopping: asyncio.Task[StopReceipt] | None = None

    @abstractmethod
    async def _open(self, user: str | None) -> CommandStream:
        """Start `once` in the sandbox.

        Raises:
            ProviderError: it cannot be started, or the sandbox is not there.
        """

    @abstractmethod
    def _descriptor(self) -> dict[str, Any]: ...

    @abstractmethod
    async def _remove(self) -> StopReceipt: ...

    @abstractmethod
    async def interfere(self, accident: Accident) -> None:
        """Do from outside what happens to sandboxes; for the checks of the contract.

        Raises:
            LookupError: that cannot happen to sandboxes of this provider.
        """

    @abstractmethod
    async def status(self) -> SandboxStatus: ...

    @property
    def id(self) -> str:
        return self._identity.id

    @property
    def place(self) -> SandboxPlace:
        return self._identity.place

    @property
    def access(self) -> SandboxAccess:
        connection = SandboxConnection(kind="direct", provider=self._identity.provider, descriptor=self._descriptor())
        return SandboxAccess(connection=connection, workdir=self.place.workdir)

    def runtime(self, name: str) -> str:
        if name not in self._identity.runtimes:
            raise LookupError(f"this sandbox was made without the runtime '{name}'")
        return self._identity.runtimes[name]

    async def exec(
        self,
        command: Sequence[str],
        *,
        timeout_s: float = EXEC_TIMEOUT_S,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
    ) -> ExecResult:
        began = time.monotonic()
        stdout, stderr = CappedOutput(output_limit_bytes), CappedOutput(output_limit_bytes)
        request = self._request(command, timeout_s=timeout_s, env=env or {}, cwd=cwd, user=user)
        end = await self._run(request, one_input(stdin), CommandOutputs(stdout.add, stderr.add), user)
        return ExecResult(
            exit_code=end.value if end.how == "exit" else None,
            signal=end.value if end.how == "signal" else None,
            timed_out=end.how == "timeout",
            stdout=stdout.output(),
            stderr=stderr.output(),
            oom_kills=end.oom_kills,
            duration_s=time.monotonic() - began,
        )

    def _request(
        self, command: Sequence[str], *, timeout_s: float, env: Mapping[str, str], cwd: str | None, user: str | None
    ) -> CommandRequest:
        own = self._identity.env if user is None else {}
        return CommandRequest.of(
            command,
            boot=self._identity.boot,
            timeout_s=timeout_s,
            cwd=cwd or self.place.workdir,
            cwd_optional=cwd is None,
            env={**own, **env},
        )

    async def _run(
        self, request: CommandRequest, stdin: AsyncIterator[bytes], outputs: CommandOutputs, user: str | None
    ) -> End:
        if self._detached:
            raise ProviderError(f"The sandbox {self.id} was detached from in this process; attach to it again.")
        stream = await self._open(user)
        command = Command(stream, request, outputs)
        try:
            end = await command.run(stdin)
        except CommandSilentError as error:
            raise ProviderError(
                f"The sandbox {self.id} did not tell the end of a command although its time was over."
            ) from error
        if end is None:
            raise await self._lost(self._engine_words(command.first_words))
        self._check(end)
        if refused := refusal(end, request):
            raise CommandNotStartedError(refused[1], reason=refused[0])
        return end

    def _check(self, end: End) -> None:
        if end.how == "replaced":
            raise ProviderLostError(f"The sandbox {self.id} was restarted: it is not the one that was made.")
        if end.how == "unkillable":
            raise CleanupUnprovenError(f"Processes of a command in the sandbox {self.id} could not be killed.")

    def _engine_words(self, first_words: bytes) -> str:
        """What the provider itself said where a command's output would stand; empty when it is the command's own."""
        return ""

    async def _lost(self, said: str = "") -> ProviderError:
        """Why a command's streams ended without its end."""
        status = await self.status()
        detail = f" {status.detail or said}".rstrip()
        if status.oom_killed:
            return ProviderOomError(f"The sandbox {self.id} ran out of memory and was killed.{detail}")
        if status.state not in {"running", "starting", "unknown"}:
            return ProviderLostError(f"The sandbox {self.id} is {status.state}.{detail}")
        if said:
            return ProviderError(f"A command was not started in the sandbox {self.id}: {said}")
        return ExitUnknownError(f"How a command ended in the sandbox {self.id} cannot be told.{detail}")

    async def look(self, paths: Sequence[str]) -> Probe:
        """What it is like inside, with its own user.

        Raises:
            SandboxRefusedError: the supervisor does not run there.
        """
        said = CappedOutput(SAID_LIMIT_BYTES)
        end = await self._own_command(["check", *paths], one_input(), None, CommandOutputs(said.add, said.add))
        return Probe.parse(said.output().text(), end.boot)

    async def make_folder(self, path: str, probe: Probe) -> None:
        """Make a folder for the sandbox's own user, as root where the provider has users."""
        await self._on_files(["mkdir", str(probe.uid), str(probe.gid), "755", path], one_input(), "root", path)

    async def upload(
        self, source: bytes | Path, target: str, *, mode: int | None = None, user: str | None = None
    ) -> None:
        folder, name = _parted(target)
        try:
            archive = await Archive.of(source, name, mode)
        except OSError as error:
            raise SandboxFileError(f"{source!s:.200} cannot be read for an upload: {error.strerror}.") from error
        try:
            await self._on_files(["unpack", target if archive.of_folder else folder], archive.pieces(), user, target)
        finally:
            archive.close()

    async def download(self, source: str, *, user: str | None = None, limit_bytes: int = OUTPUT_LIMIT_BYTES) -> bytes:
        archive = await self._pack(source, user, limit_bytes)
        try:
            return await archive.only_file()
        except tarfile.TarError as error:
            raise SandboxFileError(f"'{source}' in the sandbox is no regular file.") from error
        finally:
            archive.close()

    async def download_to(
        self, source: str, target: Path, *, user: str | None = None, limit_bytes: int = DOWNLOAD_LIMIT_BYTES
    ) -> None:
        archive = await self._pack(source, user, limit_bytes)
        try:
            await archive.unpack(target)
        except (OSError, tarfile.TarError) as error:
            raise SandboxFileError(f"'{source}' cannot be taken out of the sandbox: {error}.") from error
        finally:
            archive.close()

    async def _pack(self, source: str, user: str | None, limit_bytes: int) -> Archive:
        _parted(source)
        archive = Archive()

        def take(data: bytes) -> None:
            archive.add(data)
            if archive.size > limit_bytes + TAR_OVERHEAD_BYTES:
                raise _TooMuchError

        try:
            await self._on_files(["pack", source], one_input(), user, source, take)
        except _TooMuchError as error:
            archive.close()
            raise SandboxFileError(f"'{source}' in the sandbox is larger than {limit_bytes} bytes.") from error
        except BaseException:
            archive.close()
            raise
        return archive

    async def _on_files(
        self,
        arguments: Sequence[str],
        stdin: AsyncIterator[bytes],
        user: str | None,
        told: str,
        take: Callable[[bytes], None] | None = None,
    ) -> None:
        said = CappedOutput(SAID_LIMIT_BYTES)
        end = await self._own_command(arguments, stdin, user, CommandOutputs(take or said.add, said.add))
        if (end.how, end.value) != ("exit", 0):
            why = said.output().text().strip() or f"{arguments[0]} ended with {end.how} {end.value}"
            raise SandboxFileError(f"'{told}' in the sandbox: {why}.")

    async def _own_command(
        self, arguments: Sequence[str], stdin: AsyncIterator[bytes], user: str | None, outputs: CommandOutputs
    ) -> End:
        """Run one of the supervisor's own commands."""
        request = CommandRequest.of(
            [self.place.supervisor, *arguments],
            boot=self._identity.boot,
            timeout_s=TRANSFER_TIMEOUT_S,
            cwd="/",
            cwd_optional=True,
            env={},
        )
        return await self._run(request, stdin, outputs, user)

    async def detach(self) -> None:
        self._detached = True

    async def stop(self) -> StopReceipt:
        if self._stopping is None or _failed(self._stopping):
            self._stopping = asyncio.create_task(self._remove())
        receipt = await shielded(asyncio.shield(self._stopping))
        self._detached = True
        return receipt


def _failed(task: "asyncio.Task[StopReceipt]") -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _parted(path: str) -> tuple[str, str]:
    try:
        return parted(path)
    except ValueError as error:
        raise SandboxFileError(f"{error}.") from error
