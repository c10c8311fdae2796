"""Containers of a Docker engine: on this machine's socket, or wherever DOCKER_HOST or `host` says."""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.contracts.sandbox import Network, SandboxConnection
from shared.errors import ProviderLostError, SandboxRefusedError
from shared.ports.sandbox import Features, FoundSandbox, Progress, Runtime, Sandbox, SandboxSpec, StopReceipt
from shared.sandbox.admission import Admission
from shared.sandbox.context import ProviderContext, check_socket_folder
from shared.sandbox.docker.box import DockerBox, DockerDescriptor, state_of
from shared.sandbox.docker.creation import (
    SANDBOX_LABEL,
    SUPERVISOR,
    ContainerPlan,
    ModelSocket,
    container_name,
    read_labels,
)
from shared.sandbox.docker.engine import Engine, EngineError
from shared.sandbox.docker.images import Images, ImageTraits
from shared.sandbox.docker.making import Maker
from shared.sandbox.docker.removal import remove_container
from shared.sandbox.docker.volumes import RuntimeVolumes
from shared.supervisor.build import supervisor_program

UNLIMITED_BOXES: Final = 64
OVERCOMMIT: Final = 4
"""Boxes seldom use their limit: their limits may add up to this many times the engine's memory."""
_ARCHITECTURES: Final = {"amd64": "x86_64", "arm64": "aarch64"}


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    host: str | None = None
    """Address of the engine; that of DOCKER_HOST, else the machine's own socket."""
    image: str | None = None
    """Image of sandboxes for which the task names none."""
    pull: Literal["missing", "always", "never"] = "missing"
    """When images are pulled; `always`: once per process."""
    images: tuple[str, ...] = ()
    """Images that are made available before the first episode needs them."""
    workdir: str | None = None
    """Work folder; that of the image, else `/`. It is made where it is missing."""
    user: str | None = None
    """User of commands: `UID`, `UID:GID` or a name in the image; that of the image."""
    env: dict[str, str] = {}
    """Variables of every command; the engine keeps them, so no secrets."""
    network: Network = "proxy"
    """`none`; `proxy`: the model proxy and nothing else; `open`: the internet, but no other sandbox."""
    open_network: Annotated[str, Field(min_length=1)] = "paddock-open"
    """Engine network of `open` sandboxes; made when missing, with traffic between its containers switched off."""
    model_socket: str | None = None
    """Where the engine finds the folder of the model proxy's socket: a path on its machine or a volume's name. The
    folder of `services.model_proxy.socket_path` when left out."""
    sandbox_url: str | None = None
    """Address of the model proxy as `open` sandboxes reach it where the engine cannot mount its socket."""
    memory_mib: Annotated[int, Field(ge=6)] | None = 2048
    """Memory of one sandbox, swap included; null is no limit."""
    pids: Annotated[int, Field(ge=16)] | None = 4096
    """Processes and threads of one sandbox; null is no limit."""
    cpus: Annotated[float, Field(gt=0)] | None = None
    """Processors of one sandbox; null is no limit."""
    no_new_privileges: bool = True
    """Off only for tasks that need sudo inside: a process that gains privileges may outlive its supervisor's stop."""
    max_sandboxes: Annotated[int, Field(gt=0)] | None = None
    """Sandboxes of all that use the engine; by default as many as fit four times into its memory."""
    wait_s: Annotated[float, Field(gt=0)] = 600.0
    """How long a sandbox waits for room."""
    call_timeout_s: Annotated[float, Field(ge=1)] = 60.0
    """How long one answer of the engine is waited for."""
    starts_at_once: Annotated[int, Field(gt=0)] = 4
    """Containers that are started at the same time; engines slow down under more."""


def create(options: Options, context: ProviderContext) -> "DockerProvider":
    return DockerProvider(options, context)


class DockerProvider:
    features = Features(
        isolated=True,
        images=True,
        users=True,
        read_only_root=True,
        pauses=True,
        restarts=True,
        networks=frozenset({"none", "proxy", "open"}),
        limits=frozenset({"memory_mib", "pids", "cpus"}),
    )

    def __init__(self, options: Options, context: ProviderContext) -> None:
        self._options = options
        self._context = context
        self.engine = Engine(options.host, call_timeout_s=options.call_timeout_s)
        self.images = Images(self.engine, options.pull)
        self._volumes = RuntimeVolumes(self.engine)
        self._admission = Admission(self._running, self._capacity, options.wait_s)
        self._maker = Maker(self.engine, options.starts_at_once, self._admission.freed)
        self._known_capacity: int | None = options.max_sandboxes
        self._network_lock = asyncio.Lock()
        self._network_made = False

    async def check(self) -> None:
        await self.engine.call("say its version", lambda api: api.version())

    async def prepare(self, images: Sequence[str], progress: Progress) -> None:
        await asyncio.gather(*(self.images.get(image, progress) for image in images))

    async def create(self, spec: SandboxSpec, progress: Progress | None = None) -> Sandbox:
        tell = progress or (lambda _: None)
        image_name = spec.image or self._options.image
        if image_name is None:
            raise SandboxRefusedError(
                f"The sandbox '{self._context.name}' has no `image` configured, and the task names none."
            )
        image = await self.images.get(image_name, tell)
        async with self._admission.admitted():
            try:
                return await self._maker.make(await self._plan(spec, image, image_name))
            except SandboxRefusedError as error:
                if SUPERVISOR not in error.message:
                    raise
                # Somebody removed the volume with the supervisor since it was last asked for.
                await self._volumes.distrust()
            return await self._maker.make(await self._plan(spec, image, image_name))

    async def _plan(self, spec: SandboxSpec, image: ImageTraits, image_name: str) -> ContainerPlan:
        options = self._options
        network = spec.network or options.network
        limits = spec.limits
        relayed = self._model_socket(network)
        if network == "open":
            await self._make_network()
        return ContainerPlan(
            id=secrets.token_hex(16),
            spec=spec,
            image=image,
            image_name=image_name,
            network=network,
            open_network=options.open_network,
            memory_mib=limits.memory_mib or options.memory_mib,
            pids=limits.pids or options.pids,
            cpus=limits.cpus or options.cpus,
            no_new_privileges=options.no_new_privileges if spec.no_new_privileges is None else spec.no_new_privileges,
            user=spec.user or options.user or image.user or "0:0",
            workdir=spec.workdir or options.workdir or image.workdir or "/",
            env={**options.env, **spec.env},
            volumes=await self._runtime_volumes(spec, image),
            model_socket=relayed,
            model_url=options.sandbox_url if network == "open" else None,
        )

    async def _runtime_volumes(self, spec: SandboxSpec, image: ImageTraits) -> dict[str, str]:
        """Volumes by the name of their runtime, the supervisor's among them."""
        architecture = _ARCHITECTURES.get(image.architecture, image.architecture)
        try:
            program = await supervisor_program(self._context.state_dir / "runtimes", architecture)
        except (FileNotFoundError, RuntimeError) as error:
            raise SandboxRefusedError(f"There is no supervisor for images of {architecture}: {error}") from error
        supervisor = Runtime("supervisor", program.parent.name.rpartition("-")[2], program.parent)
        return {
            runtime.name: await self._volumes.volume_of(runtime, image.id) for runtime in (supervisor, *spec.runtimes)
        }

    def _model_socket(self, network: Network) -> ModelSocket | None:
        """What is mounted so that the model proxy can be reached; `open` does without where nothing is configured."""
        path = self._context.model_socket
        if network == "none" or (path is None and network == "open"):
            return None
        if path is None:
            raise SandboxRefusedError(
                "A sandbox of network `proxy` reaches the model proxy over its Unix socket, and"
                " `services.model_proxy.socket_path` names none."
            )
        if self._options.model_socket is not None:
            return ModelSocket(self._options.model_socket, path.name)
        check_socket_folder(path)
        return ModelSocket(str(path.parent), path.name)

    async def _make_network(self) -> None:
        name = self._options.open_network
        async with self._network_lock:
            if self._network_made:
                return
            quiet = {"com.docker.network.bridge.enable_icc": "false"}
            try:
                await self.engine.call("inspect a network", lambda api: api.inspect_network(name))
            except EngineError as error:
                if error.code != 404:
                    raise
                await self.engine.call(
                    "make a network",
                    lambda api: api.create_network(name, driver="bridge", options=quiet, check_duplicate=True),
                )
            self._network_made = True

    async def _running(self) -> int:
        found = await self.engine.call(
            "list containers", lambda api: api.containers(filters={"label": [SANDBOX_LABEL], "status": "running"})
        )
        return len(found)

    async def _capacity(self) -> int:
        if self._known_capacity is None:
            memory_mib = self._options.memory_mib
            info = await self.engine.call("describe itself", lambda api: api.info())
            fitting = OVERCOMMIT * (info["MemTotal"] >> 20) // memory_mib if memory_mib else UNLIMITED_BOXES
            self._known_capacity = max(1, fitting)
        return self._known_capacity

    async def attach(self, connection: SandboxConnection) -> Sandbox:
        box = DockerBox(self.engine, DockerDescriptor.read(connection.descriptor), self._admission.freed)
        status = await box.status()
        if status.state not in {"running", "paused"}:
            raise ProviderLostError(f"The sandbox {box.id} is {status.state}. {status.detail}".strip())
        return box

    async def list(self, **labels: str) -> list[FoundSandbox]:
        wanted = [SANDBOX_LABEL, *(f"paddock.{name}={value}" for name, value in labels.items())]
        found = await self.engine.call(
            "list containers", lambda api: api.containers(all=True, filters={"label": wanted})
        )
        return [
            FoundSandbox(entry["Labels"][SANDBOX_LABEL], told, state_of(entry["State"]))
            for entry in found
            if (told := read_labels(entry["Labels"])) is not None
        ]

    async def remove(self, sandbox_id: str) -> StopReceipt:
        receipt = await remove_container(self.engine, container_name(sandbox_id))
        self._admission.freed()
        return receipt

    async def close(self) -> None:
        await self._maker.close()
        self.engine.close()
