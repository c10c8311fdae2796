"""Where a task's files live and its commands run. A provider is a plug-in in `shared/sandbox/providers/`.

`paddock selfcheck PROVIDER` runs the suite that every provider passes. An error of the family `ProviderError`
tells of the sandbox or of who provides it; how a *command* ended stands in `ExecResult` and is never an error.
Every call on a sandbox may raise `ProviderError` (the engine does not answer) and `ProviderLostError` (the
sandbox is dead, gone, or not the one that was made: a restarted or replaced one is never used in silence).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from shared.contracts.sandbox import Network, SandboxAccess, SandboxConnection, SandboxLabels, SandboxPlace

EXEC_TIMEOUT_S = 180.0
OUTPUT_LIMIT_BYTES = 1 << 20
DOWNLOAD_LIMIT_BYTES = 1 << 30

SandboxState = Literal["starting", "running", "paused", "stopped", "error", "gone", "replaced", "unknown"]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Features:
    """What a provider can do. `isolated`: what runs inside can read no file and reach no process of the machine."""

    isolated: bool
    images: bool
    users: bool
    read_only_root: bool
    pauses: bool
    restarts: bool
    networks: frozenset[Network]
    limits: frozenset[str]


@dataclass(frozen=True, slots=True)
class Limits:
    """Null: as the provider is configured."""

    memory_mib: int | None = None
    pids: int | None = None
    cpus: float | None = None


@dataclass(frozen=True, slots=True)
class Runtime:
    """A folder of programs that sandboxes see read-only at `/opt/paddock/NAME`, or where `Sandbox.runtime` says.

    `digest` is that of its content: the same digest is the same content for ever.
    """

    name: str
    digest: str
    path: Path


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What is asked for. Null: as the provider is configured, then as the image says.

    `workdir` is made where it is missing. `user` is `UID`, `UID:GID` or a name that the image knows. `tmpfs` maps
    paths to mount options as Docker writes them. Where `no_new_privileges` is off, sudo can work in the sandbox.
    """

    labels: SandboxLabels
    image: str | None = None
    workdir: str | None = None
    user: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    network: Network | None = None
    limits: Limits = Limits()
    read_only_root: bool = False
    tmpfs: Mapping[str, str] = field(default_factory=dict)
    no_new_privileges: bool | None = None
    runtimes: Sequence[Runtime] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """One stream of a command: its beginning and its end; `dropped` bytes between them were not kept."""

    head: bytes
    tail: bytes = b""
    dropped: int = 0

    @property
    def data(self) -> bytes:
        return self.head + self.tail

    def text(self) -> str:
        """Readable text; says where something was dropped."""
        gap = f"\n[… {self.dropped} bytes dropped …]\n" if self.dropped else ""
        return self.head.decode(errors="replace") + gap + self.tail.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended: exactly one of `exit_code`, `signal` and `timed_out` is set.

    `oom_kills` counts what the sandbox's memory limit killed meanwhile, null where nobody tells: a bare SIGKILL
    is not called an out-of-memory kill. `duration_s` includes what the provider added.
    """

    exit_code: int | None
    signal: int | None
    timed_out: bool
    stdout: Output
    stderr: Output
    oom_kills: int | None
    duration_s: float

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


@dataclass(frozen=True, slots=True)
class SandboxStatus:
    """What the provider tells of a sandbox; `replaced`: one runs in its place that is not the one that was made."""

    state: SandboxState
    exit_code: int | None = None
    oom_killed: bool = False
    restarts: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class StopReceipt:
    """Proof that a sandbox is gone. `status` tells whether this stop ended it or found nothing."""

    status: Literal["stopped", "already_absent"]


@dataclass(frozen=True, slots=True)
class FoundSandbox:
    """A sandbox as `list` finds it, also one that was only half made."""

    id: str
    labels: SandboxLabels
    state: SandboxState


class Sandbox(Protocol):
    """One sandbox, from the process that made it or from one that attached to it."""

    @property
    def id(self) -> str: ...

    @property
    def access(self) -> SandboxAccess:
        """Plain data from which any process that uses the same provider attaches."""

    @property
    def place(self) -> SandboxPlace: ...

    def runtime(self, name: str) -> str:
        """The path of a runtime's folder inside.

        Raises:
            LookupError: the sandbox was made without it.
        """

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
        """Run a command to its end; no shell is involved.

        `env` is added to the sandbox's own; it is on no command line and in no engine's record. Without `cwd` it
        runs in the work folder, in `/` when that was deleted. At the time limit, or when the caller is cancelled,
        the command dies with everything that it started. A command that ends by itself may leave processes.
        Of each stream at most `output_limit_bytes` are kept.

        Raises:
            CommandNotStartedError: no such program or folder, with what is missing.
            ExitUnknownError: the sandbox lives, and how the command ended cannot be told.
            SandboxRefusedError: `user`, where the provider has only one.
        """

    async def upload(
        self, source: bytes | Path, target: str, *, mode: int | None = None, user: str | None = None
    ) -> None:
        """Put a file (bytes, or a path here) or a folder with all that is in it at the absolute path `target`.

        What is put belongs to `user`, by default the one that commands run under, whatever its owner was here.
        Modes and symbolic links are kept; `mode` sets a file's. An existing file is replaced in one step, a
        folder is merged. Parents are made.

        Raises:
            SandboxFileError: it cannot be written there, with the reason.
        """

    async def download(self, source: str, *, user: str | None = None, limit_bytes: int = OUTPUT_LIMIT_BYTES) -> bytes:
        """One regular file.

        Raises:
            SandboxFileError: it is missing, unreadable, no regular file, or larger than the limit.
        """

    async def download_to(
        self, source: str, target: Path, *, user: str | None = None, limit_bytes: int = DOWNLOAD_LIMIT_BYTES
    ) -> None:
        """A file or a folder, to a path here that does not exist yet. Links that lead out of the folder, devices
        and special modes do not get here.

        Raises:
            SandboxFileError: as for `download`.
        """

    async def status(self) -> SandboxStatus:
        """How it stands; a sandbox that is gone is a status, not an error."""

    async def detach(self) -> None:
        """End this process's use and leave the sandbox as it is; idempotent."""

    async def stop(self) -> StopReceipt:
        """Remove it with everything in it. Returns when the provider confirmed that it is gone; may be called
        again, at once or later, and then gives the same receipt. A failed stop may be tried again.
        """


class SandboxProvider(Protocol):
    features: Features

    async def check(self) -> None:
        """Return when sandboxes can be made here.

        Raises:
            ProviderError: they cannot, with what is missing and how to get it.
        """

    async def prepare(self, images: Sequence[str], progress: Progress) -> None:
        """Get images before they are needed; `progress` is given sentences.

        Raises:
            SandboxRefusedError: an image cannot be had.
        """

    async def create(self, spec: SandboxSpec, progress: Progress | None = None) -> Sandbox:
        """Make a sandbox that can run commands. Waits while the engine has no room. When it fails or is
        cancelled, nothing stays behind.

        Raises:
            SandboxRefusedError: the image or the provider cannot give what was asked for.
            ProviderQuotaError: there was no room for too long.
        """

    async def attach(self, connection: SandboxConnection) -> Sandbox:
        """Use a sandbox that another process made.

        Raises:
            ProviderLostError: it is dead, gone, or not the same any more.
        """

    async def list(self, **labels: str) -> list[FoundSandbox]:
        """Sandboxes of this provider whose labels (`mesh`, `service`, `session`) are as given, ended ones too."""

    async def remove(self, sandbox_id: str) -> StopReceipt:
        """As `Sandbox.stop`, for one that was found."""

    async def close(self) -> None:
        """End what this process holds; sandboxes stay. Idempotent."""
