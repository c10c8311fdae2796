"""One container in use."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from shared.errors import ProviderError
from shared.ports.sandbox import SandboxState, SandboxStatus, StopReceipt
from shared.sandbox.box import Box
from shared.sandbox.command import CommandStream
from shared.sandbox.docker.engine import Engine, EngineError
from shared.sandbox.docker.removal import remove_container
from shared.sandbox.docker.stream import DockerStream
from shared.sandbox.identity import Accident, BoxDescriptor

if TYPE_CHECKING:
    from docker import APIClient

_ENGINE_WORDS: Final = ("OCI runtime exec failed", "unable to find user", "unable to find group")
_STATES: Final[dict[str, SandboxState]] = {
    "created": "starting",
    "restarting": "starting",
    "running": "running",
    "paused": "paused",
    "removing": "stopped",
    "exited": "stopped",
    "dead": "error",
}


class DockerDescriptor(BoxDescriptor):
    """`user` is what commands run under, as the engine is told; `started_at` the engine's record of the start."""

    kind_of_box = "container"

    container: str
    started_at: str
    user: str


def state_of(engine_state: str) -> SandboxState:
    return _STATES.get(engine_state, "unknown")


class DockerBox(Box):
    """`freed` is called when its place on the engine is free again."""

    def __init__(self, engine: Engine, descriptor: DockerDescriptor, freed: Callable[[], None]) -> None:
        super().__init__(descriptor.identity("docker"))
        self._engine = engine
        self._told = descriptor
        self._freed = freed

    @property
    def container(self) -> str:
        return self._told.container

    def _descriptor(self) -> dict[str, Any]:
        return self._told.model_dump()

    async def _open(self, user: str | None) -> CommandStream:
        argv = [self.place.supervisor, "once"]
        try:
            connection, early = await self._engine.open_exec(self._told.container, argv, user or self._told.user)
        except EngineError as error:
            raise await self._unusable(error) from error
        return await DockerStream.over(connection, early)

    async def _unusable(self, error: EngineError) -> ProviderError:
        """Why the engine starts nothing in the container."""
        if error.code not in {404, 409}:
            return error
        status = await self.status()
        if status.state == "paused":
            return ProviderError(f"The sandbox {self.id} is paused.")
        return error if status.state == "running" else await self._lost()

    async def status(self) -> SandboxStatus:
        try:
            told = await self._engine.call(
                "inspect a container", lambda api: api.inspect_container(self._told.container)
            )
        except EngineError as error:
            if error.code == 404:
                return SandboxStatus("gone")
            raise
        state = told["State"]
        seen = state_of(state["Status"])
        if seen in {"running", "paused"} and state["StartedAt"] != self._told.started_at:
            seen = "replaced"
        return SandboxStatus(
            seen,
            exit_code=state["ExitCode"] if seen in {"stopped", "error"} else None,
            oom_killed=bool(state.get("OOMKilled")),
            restarts=int(told.get("RestartCount") or 0),
            detail=str(state.get("Error") or ""),
        )

    def _engine_words(self, first_words: bytes) -> str:
        words = first_words.decode(errors="replace").strip()
        return words if words.startswith(_ENGINE_WORDS) else ""

    async def interfere(self, accident: Accident) -> None:
        container = self._told.container
        accidents: dict[Accident, Callable[[APIClient], object]] = {
            "pause": lambda api: api.pause(container),
            "resume": lambda api: api.unpause(container),
            "kill": lambda api: api.kill(container),
            "restart": lambda api: api.restart(container, timeout=1),
        }
        await self._engine.call(f"{accident} a container", accidents[accident])

    async def _remove(self) -> StopReceipt:
        receipt = await remove_container(self._engine, self._told.container)
        self._freed()
        return receipt
