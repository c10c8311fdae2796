"""Making a container that can run commands, or leaving nothing behind.

The container's name is chosen before the engine is asked, so that it can be removed although its id was never
learned: by a caller that was cancelled, or after an answer that did not come.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

from shared.cleanup import shielded
from shared.contracts.sandbox import SandboxPlace
from shared.errors import ExitUnknownError, ProviderError, SandboxRefusedError
from shared.sandbox.context import MODEL_PORT, TRUSTING_GIT
from shared.sandbox.docker.box import DockerBox, DockerDescriptor
from shared.sandbox.docker.creation import (
    HOME_DIR,
    RUNTIMES_DIR,
    STATE_DIR,
    SUPERVISOR,
    TEMPORARY_DIR,
    ContainerPlan,
)
from shared.sandbox.docker.engine import Engine, EngineError
from shared.sandbox.docker.removal import remove_container
from shared.sandbox.probe import Probe

LOG_TAIL_LINES: Final = 20
UNDO_EVERY_S: Final = 2.0
UNDO_TRIES: Final = 150
"""What an engine makes later than this is removed when it expires by its label."""
_log = logging.getLogger(__name__)


class Maker:
    """Makes containers on one engine, a few starts at a time."""

    def __init__(self, engine: Engine, starts_at_once: int, freed: Callable[[], None]) -> None:
        self._engine = engine
        self._freed = freed
        self._starts = asyncio.Semaphore(starts_at_once)
        self._undoing: set[asyncio.Task[None]] = set()

    async def make(self, plan: ContainerPlan) -> DockerBox:
        """Create, start, look inside.

        Raises:
            SandboxRefusedError: the image or the engine cannot give what the plan asks for.
            ProviderError: the engine failed; it may be tried again.
        """
        try:
            container = await self._engine.call("make a container", plan.create)
        except EngineError as error:
            raise _refused(plan, error) from error
        except ProviderError:
            # No answer: the engine may still make it, now or later.
            self._undo_later(plan)
            raise
        except BaseException:
            await shielded(self._undo(plan))
            raise
        try:
            return await self._begin(plan, container)
        except BaseException:
            await shielded(self._undo(plan))
            raise

    async def _begin(self, plan: ContainerPlan, container: str) -> DockerBox:
        async with self._starts:
            await self._start(plan, container)
            told = await self._engine.call("inspect a container", lambda api: api.inspect_container(container))
            descriptor = DockerDescriptor(
                id=plan.id,
                container=container,
                started_at=told["State"]["StartedAt"],
                boot="",
                user=plan.user,
                place=_unseen_place(plan),
                env={},
                runtimes={},
            )
            probe = await self._look(plan, DockerBox(self._engine, descriptor, self._freed))
        return DockerBox(self._engine, _seen(plan, descriptor, probe), self._freed)

    async def _start(self, plan: ContainerPlan, container: str) -> None:
        try:
            await self._engine.call("start a container", lambda api: api.start(container))
        except EngineError as error:
            raise _refused(plan, error) from error

    async def _look(self, plan: ContainerPlan, box: DockerBox) -> Probe:
        paths = [plan.workdir, "/tmp", STATE_DIR, *plan.tmpfs()]
        try:
            probe = await box.look(paths)
        except ProviderError as error:
            raise await self._dead_start(plan, box, error) from error
        for path in plan.tmpfs():
            if probe.kinds.get(path) != "w":
                options = plan.tmpfs()[path] or "none"
                raise SandboxRefusedError(
                    f"The tmpfs {path} (options: {options}) is closed to user {probe.uid}, under which commands run:"
                    f" give it `uid={probe.uid}` or a mode such as 1777."
                )
        if probe.kinds.get(plan.workdir) == "-":
            await box.make_folder(plan.workdir, probe)
        return probe

    async def _dead_start(self, plan: ContainerPlan, box: DockerBox, error: ProviderError) -> ProviderError:
        """What is known of a container that runs nothing: its state, its exit code, the end of its log."""
        status = await box.status()
        if status.state == "running" and isinstance(error, ExitUnknownError):
            return error
        log = await self._engine.call(
            "read a container's log", lambda api: api.logs(box.container, tail=LOG_TAIL_LINES)
        )
        said = log.decode(errors="replace").strip() or "empty"
        return SandboxRefusedError(
            f"A container of the image '{plan.image_name}' ran no command ({error.message}). It is {status.state}, exit"
            f" code {status.exit_code}, {status.detail or 'no further reason'}; log tail: {said}"
        )

    async def _undo(self, plan: ContainerPlan) -> None:
        """Remove what there is; where the engine does not answer, go on in the background."""
        try:
            await remove_container(self._engine, plan.name)
        except ProviderError as error:
            _log.warning("the container %s is not removed yet: %s", plan.name, error.message)
            self._undo_later(plan)

    def _undo_later(self, plan: ContainerPlan) -> None:
        task = asyncio.create_task(self._watch_for(plan))
        self._undoing.add(task)
        task.add_done_callback(self._undoing.discard)

    async def _watch_for(self, plan: ContainerPlan) -> None:
        """Remove the container when it turns up; that it is not there yet proves nothing."""
        for _ in range(UNDO_TRIES):
            await asyncio.sleep(UNDO_EVERY_S)
            with contextlib.suppress(ProviderError):
                if (await remove_container(self._engine, plan.name)).status == "stopped":
                    return

    async def close(self) -> None:
        for task in list(self._undoing):
            task.cancel()
        await asyncio.gather(*self._undoing, return_exceptions=True)


def _refused(plan: ContainerPlan, error: EngineError) -> ProviderError:
    """A request that the engine refuses stays refused; its own troubles may pass."""
    if error.code == 404 and "volume" not in error.said:
        return SandboxRefusedError(f"The engine cannot make a sandbox of the image '{plan.image_name}': {error.said}")
    if error.code == 400:
        return SandboxRefusedError(f"The engine refuses a sandbox of the image '{plan.image_name}': {error.said}")
    return error


def _unseen_place(plan: ContainerPlan) -> SandboxPlace:
    return SandboxPlace(
        workdir=plan.workdir,
        home="/",
        temporary=TEMPORARY_DIR,
        state_dir=STATE_DIR,
        supervisor=SUPERVISOR,
        uid=0,
        gid=0,
        model_base_url=None,
    )


def _seen(plan: ContainerPlan, descriptor: DockerDescriptor, probe: Probe) -> DockerDescriptor:
    home = probe.home if probe.home_kind == "w" else HOME_DIR
    temporary = "/tmp" if probe.kinds.get("/tmp") == "w" else TEMPORARY_DIR
    env = {**TRUSTING_GIT, **({} if home == probe.home else {"HOME": home})}
    if temporary != "/tmp":
        env["TMPDIR"] = temporary
    place = SandboxPlace(
        workdir=plan.workdir,
        home=home,
        temporary=temporary,
        state_dir=STATE_DIR,
        supervisor=SUPERVISOR,
        uid=probe.uid,
        gid=probe.gid,
        model_base_url=f"http://127.0.0.1:{MODEL_PORT}" if plan.model_socket else plan.model_url,
    )
    return descriptor.model_copy(
        update={
            "boot": probe.boot,
            "place": place,
            "env": env,
            "runtimes": {name: f"{RUNTIMES_DIR}/{name}" for name in plan.volumes},
        }
    )
