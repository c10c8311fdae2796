"""Sandboxes of this machine, without images: under bubblewrap with namespaces of their own, else plain processes.

Plain processes are no isolation: they can read what this user, or anybody, may read. Where we are root each sandbox
is at least another user.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.cleanup import shielded
from shared.contracts.sandbox import Network, SandboxConnection
from shared.errors import ProviderError, ProviderLostError, SandboxRefusedError
from shared.ports.sandbox import Features, FoundSandbox, Progress, Sandbox, SandboxSpec, StopReceipt
from shared.sandbox.admission import Admission
from shared.sandbox.context import ProviderContext, check_socket_folder
from shared.sandbox.local.box import LocalBox, LocalDescriptor, state_of
from shared.sandbox.local.folder import BoxFolder, box_ids, open_directory
from shared.sandbox.local.launch import bubblewrap_problem
from shared.sandbox.local.making import LocalRequest, make_box
from shared.sandbox.local.removal import remove_box
from shared.supervisor.build import supervisor_program

SYSTEM_PATHS: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc")
BOXES_PER_CPU: Final = 32
UNISOLATED: Final = (
    "Sandboxes of the `local` provider are NOT isolated here (%s). What runs in them can read whatever %s, keys and"
    " hidden tests included. Use it for trusted tasks only."
)
_log = logging.getLogger(__name__)


@cache
def _warn(problem: str) -> None:
    """Once per process and reason, loudly."""
    _log.warning(UNISOLATED, problem, "anybody may" if os.geteuid() == 0 else "this user may")


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    isolation: Literal["auto", "bubblewrap", "none"] = "auto"
    """`bubblewrap`: refuse to run without; `none`: plain processes; `auto`: bubblewrap where it works."""
    network: Network | None = None
    """`none`; `proxy`: the model proxy and nothing else; `open`: the machine's own network, its loopback included.
    `proxy` with bubblewrap and a socket of the model proxy, `none` without that socket, `open` without bubblewrap."""
    directory: Path | None = None
    """Folder of the sandboxes' files; `/var/tmp/paddock-UID` when left out."""
    workdir: str | None = None
    """Work folder inside; `/work` when left out. Without bubblewrap it lies in the sandbox's own folder."""
    env: dict[str, str] = {}
    """Variables of every command."""
    read_only_paths: tuple[str, ...] = ()
    """Folders of the machine that sandboxes see beside its system's, such as `/opt/conda`. Needs bubblewrap."""
    max_sandboxes: Annotated[int, Field(gt=0)] | None = None
    """Sandboxes at once; 32 per processor when left out."""
    wait_s: Annotated[float, Field(gt=0)] = 600.0
    """How long a sandbox waits for room."""


def create(options: Options, context: ProviderContext) -> "LocalProvider":
    return LocalProvider(options, context)


class LocalProvider:
    def __init__(self, options: Options, context: ProviderContext) -> None:
        self._options = options
        self._context = context
        self._problem = "`isolation: none` is configured" if options.isolation == "none" else bubblewrap_problem()
        self._isolated = self._problem is None
        self.features = Features(
            isolated=self._isolated,
            images=False,
            users=False,
            read_only_root=False,
            pauses=True,
            restarts=False,
            networks=frozenset({"none", "proxy", "open"}) if self._isolated else frozenset({"open"}),
            limits=frozenset(),
        )
        self.directory = options.directory or Path(f"/var/tmp/paddock-{os.geteuid()}")
        self._admission = Admission(self._running, self._capacity, options.wait_s)
        if self._problem is not None and options.isolation != "bubblewrap":
            _warn(self._problem)

    async def check(self) -> None:
        if not self._isolated and self._options.isolation == "bubblewrap":
            raise ProviderError(f"The local provider is configured to need bubblewrap, and {self._problem}.")
        await self._program()
        try:
            await asyncio.to_thread(open_directory, self.directory)
        except OSError as error:
            raise ProviderError(f"Local sandboxes cannot be kept in {self.directory}: {error}.") from error

    async def _program(self) -> Path:
        try:
            return await supervisor_program(self._context.state_dir / "runtimes")
        except (FileNotFoundError, RuntimeError) as error:
            raise ProviderError(f"The local provider has no supervisor: {error}") from error

    async def prepare(self, images: Sequence[str], progress: Progress) -> None:
        if images:
            raise SandboxRefusedError(f"The local provider runs no images, and '{images[0]}' was asked for.")

    async def create(self, spec: SandboxSpec, progress: Progress | None = None) -> Sandbox:
        self._refuse(spec)
        await self.check()
        program = await self._program()
        async with self._admission.admitted():
            box_id = secrets.token_hex(16)
            try:
                return await self._make(spec, program, box_id)
            except BaseException:
                await shielded(asyncio.to_thread(remove_box, self.directory, box_id))
                raise

    def _refuse(self, spec: SandboxSpec) -> None:
        """What this provider cannot give is said before anything is made."""
        limits = spec.limits
        asked: dict[str, object] = {
            "an image": spec.image,
            "another user": spec.user,
            "a read-only root": spec.read_only_root,
            "a limit of memory, processes or processors": limits.memory_mib or limits.pids or limits.cpus,
            "sudo": spec.no_new_privileges is False,
        }
        if not self._isolated:
            asked["a work folder of a given name (that needs bubblewrap)"] = spec.workdir
            asked["a tmpfs (that needs bubblewrap)"] = spec.tmpfs
            asked[f"the network `{spec.network}` (that needs bubblewrap)"] = spec.network in {"none", "proxy"}
        refused = [what for what, wanted in asked.items() if wanted]
        if refused:
            raise SandboxRefusedError(f"The local provider cannot give {refused[0]}; use `docker`.")
        if self._network(spec) == "proxy":
            if self._context.model_socket is None:
                raise SandboxRefusedError(
                    "A sandbox of network `proxy` reaches the model proxy over its Unix socket, and"
                    " `services.model_proxy.socket_path` names none."
                )
            check_socket_folder(self._context.model_socket)

    def _network(self, spec: SandboxSpec) -> Network:
        asked = spec.network or self._options.network
        if asked is not None:
            return asked
        if not self._isolated:
            return "open"
        return "none" if self._context.model_socket is None else "proxy"

    async def _make(self, spec: SandboxSpec, program: Path, box_id: str) -> LocalBox:
        request = LocalRequest(
            id=box_id,
            labels=spec.labels,
            directory=self.directory,
            program=program,
            isolated=self._isolated,
            network=self._network(spec),
            workdir=(spec.workdir or self._options.workdir) if self._isolated else None,
            env={**self._options.env, **spec.env},
            tmpfs=spec.tmpfs,
            runtimes=spec.runtimes,
            model_socket=self._context.model_socket,
            model_url=self._context.model_url,
            system_paths=(*SYSTEM_PATHS, *self._options.read_only_paths),
        )
        box = LocalBox(await shielded(asyncio.to_thread(make_box, request)), self._admission.freed)
        await self._look(box, request)
        return box

    async def _look(self, box: LocalBox, request: LocalRequest) -> None:
        """Whether it can run commands, and work where it is told to."""
        paths = [box.place.workdir, *request.tmpfs]
        try:
            probe = await box.look(paths)
        except ProviderLostError as error:
            said = BoxFolder(self.directory, box.id).said() or "it said nothing"
            raise SandboxRefusedError(f"A local sandbox ran no command: {said}") from error
        for path in paths:
            if probe.kinds.get(path) != "w":
                raise SandboxRefusedError(f"The folder {path} of a local sandbox is closed to its user {probe.uid}.")

    async def attach(self, connection: SandboxConnection) -> Sandbox:
        box = LocalBox(LocalDescriptor.read(connection.descriptor), self._admission.freed)
        status = await box.status()
        if status.state not in {"running", "paused"}:
            raise ProviderLostError(f"The sandbox {box.id} is {status.state}. {status.detail}".strip())
        return box

    async def list(self, **labels: str) -> list[FoundSandbox]:
        return [
            found
            for found in await asyncio.to_thread(self._found)
            if all(getattr(found.labels, name) == value for name, value in labels.items())
        ]

    def _found(self) -> Sequence[FoundSandbox]:
        found = []
        for box_id in box_ids(self.directory):
            folder = BoxFolder(self.directory, box_id)
            record = folder.read()
            if record is not None:
                found.append(FoundSandbox(box_id, record.labels, state_of(folder, folder.keeper())))
        return found

    async def _running(self) -> int:
        return sum(found.state in {"running", "paused"} for found in await asyncio.to_thread(self._found))

    async def _capacity(self) -> int:
        return self._options.max_sandboxes or BOXES_PER_CPU * (os.cpu_count() or 1)

    async def remove(self, sandbox_id: str) -> StopReceipt:
        receipt = await asyncio.to_thread(remove_box, self.directory, sandbox_id)
        self._admission.freed()
        return receipt

    async def close(self) -> None:
        """Nothing of a local sandbox belongs to this process."""
