"""Images: found, pulled or refused, once each however many boxes wait for one; what an image says of itself."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from shared.errors import SandboxRefusedError
from shared.ports.sandbox import Progress
from shared.sandbox.docker.engine import Engine, EngineError

PullPolicy = Literal["missing", "always", "never"]
PROGRESS_STEPS: Final = 10
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ImageTraits:
    """`user` and `workdir` are empty where the image says nothing."""

    id: str
    user: str
    workdir: str
    env: dict[str, str]
    architecture: str


class Images:
    """The images of one engine. A pull or build that is under way is joined."""

    def __init__(self, engine: Engine, pull: PullPolicy) -> None:
        self._engine = engine
        self._policy = pull
        self._under_way: dict[str, asyncio.Task[ImageTraits]] = {}
        self._pulled: set[str] = set()

    async def get(self, image: str, progress: Progress) -> ImageTraits:
        """Make an image available.

        Raises:
            SandboxRefusedError: it is not there and cannot be had, with the engine's reason.
        """
        task = self._under_way.get(image)
        if task is None:
            task = asyncio.create_task(self._get(image, progress))
            self._under_way[image] = task
            task.add_done_callback(lambda _: self._under_way.pop(image, None))
        # Who leaves does not end the pull for the others.
        return await asyncio.shield(task)

    async def _get(self, image: str, progress: Progress) -> ImageTraits:
        fresh = self._policy != "always" or image in self._pulled
        found = await self._inspect(image) if fresh else None
        if found is not None:
            return found
        if self._policy == "never":
            raise SandboxRefusedError(f"The image '{image}' is not on the engine, and `pull: never` is configured.")
        await self._pull(image, progress)
        self._pulled.add(image)
        found = await self._inspect(image)
        if found is None:
            raise SandboxRefusedError(f"The image '{image}' was pulled, and the engine does not have it.")
        return found

    async def _inspect(self, image: str) -> ImageTraits | None:
        try:
            told = await self._engine.call("inspect an image", lambda api: api.inspect_image(image))  # type: ignore[no-untyped-call]
        except EngineError as error:
            if error.code == 404:
                return None
            raise
        config: dict[str, Any] = told.get("Config") or {}
        env = dict(entry.partition("=")[::2] for entry in config.get("Env") or [])
        workdir = config.get("WorkingDir") or ""
        return ImageTraits(told["Id"], config.get("User") or "", workdir, env, told.get("Architecture") or "")

    async def _pull(self, image: str, progress: Progress) -> None:
        progress(f"pulling the image '{image}'")
        name, tag = _parted(image)
        told = _PullProgress(image, _from_thread(progress))
        try:
            await self._engine.call(
                f"pull the image '{image}'",
                lambda api: told.follow(self._until_closing(api.pull(name, tag=tag, stream=True, decode=True))),
                long=True,
            )
        except EngineError as error:
            raise SandboxRefusedError(
                f"The image '{image}' is not on the engine and cannot be pulled: {error.said}. Build it, load it"
                " (`docker load`), or name one that the engine can reach."
            ) from error
        if told.error:
            raise SandboxRefusedError(f"The image '{image}' cannot be pulled: {told.error}")

    def _until_closing(self, events: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """In the engine's thread, which must not outlive this process's stop by a whole pull."""
        for event in events:
            if self._engine.closing.is_set():
                yield {"error": "this process is stopping"}
                return
            yield event

    async def build(self, folder: Path, tag: str, progress: Progress, *, dockerfile: str = "Dockerfile") -> ImageTraits:
        """Build a folder as `tag`; a build of the same tag that is under way is joined.

        Raises:
            SandboxRefusedError: the build failed, with the end of its log.
        """
        task = self._under_way.get(tag)
        if task is None:
            task = asyncio.create_task(self._build(folder, tag, progress, dockerfile))
            self._under_way[tag] = task
            task.add_done_callback(lambda _: self._under_way.pop(tag, None))
        return await asyncio.shield(task)

    async def _build(self, folder: Path, tag: str, progress: Progress, dockerfile: str) -> ImageTraits:
        if not (folder / dockerfile).is_file():
            raise SandboxRefusedError(f"There is no {dockerfile} in {folder} to build the image '{tag}' from.")
        progress(f"building the image '{tag}' from {folder}")
        log = _BuildLog(_from_thread(progress))
        await self._engine.call(
            f"build the image '{tag}'",
            lambda api: log.follow(
                self._until_closing(
                    api.build(path=str(folder), dockerfile=dockerfile, tag=tag, rm=True, forcerm=True, decode=True)
                )
            ),
            long=True,
        )
        found = await self._inspect(tag) if not log.error else None
        if found is None:
            raise SandboxRefusedError(f"The image '{tag}' cannot be built from {folder}: {log.error}\n{log.tail()}")
        return found


class _PullProgress:
    """Layers as they come; tells a tenth at a time."""

    def __init__(self, image: str, tell: Callable[[str], None]) -> None:
        self._image = image
        self._tell = tell
        self._sizes: dict[str, tuple[int, int]] = {}
        self._told = 0
        self.error = ""

    def follow(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            self.error = str(event.get("error") or self.error)
            detail = event.get("progressDetail") or {}
            if event.get("status") == "Downloading" and detail.get("total"):
                self._sizes[str(event.get("id"))] = (int(detail["current"]), int(detail["total"]))
                self._tell_step()

    def _tell_step(self) -> None:
        total = sum(size for _, size in self._sizes.values())
        done = sum(got for got, _ in self._sizes.values())
        step = PROGRESS_STEPS * done // total
        if step > self._told:
            self._told = step
            mib = total / 2**20
            self._tell(
                f"pulling the image '{self._image}': {100 * step // PROGRESS_STEPS} % of {mib:.1f} MiB so far known"
            )


class _BuildLog:
    KEPT: Final = 30

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._lines: list[str] = []
        self.error = ""

    def follow(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            self.error = str(event.get("error") or self.error)
            for line in str(event.get("stream") or "").splitlines():
                if line.strip():
                    self._lines = [*self._lines[-self.KEPT :], line]
                    if line.startswith("Step "):
                        self._tell(line)

    def tail(self) -> str:
        return "\n".join(self._lines)


def _from_thread(progress: Progress) -> Progress:
    """The same, to be called in an engine's thread."""
    loop = asyncio.get_running_loop()

    def tell(sentence: str) -> None:
        loop.call_soon_threadsafe(progress, sentence)

    return tell


def _parted(image: str) -> tuple[str, str | None]:
    """Name and tag; a digest is part of the name for the SDK's `tag`, too."""
    name, at, digest = image.partition("@")
    if at:
        return name, digest
    head, colon, tag = image.rpartition(":")
    return (head, tag) if colon and "/" not in tag else (image, "latest")
