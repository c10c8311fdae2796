"""Runtimes as volumes of the engine, filled once per content and mounted read-only.

A volume is right wherever the engine is: a path of this machine, or of the container that the agent server runs in,
means nothing to a remote engine. A second, empty volume says that the first is complete.
"""

import asyncio
import tarfile
import tempfile
import uuid
from pathlib import Path
from typing import IO, Final

from shared.cleanup import shielded
from shared.ports.sandbox import Runtime
from shared.sandbox.archive import anonymous
from shared.sandbox.docker.engine import Engine, EngineError
from shared.sandbox.docker.removal import remove_container

LABEL: Final = "paddock.runtime"
_FILLED_AT: Final = "/paddock-runtime"


class RuntimeVolumes:
    """Which volumes of the engine hold which runtimes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ready: set[str] = set()
        self._locks: dict[str, asyncio.Lock] = {}

    async def volume_of(self, runtime: Runtime, image: str) -> str:
        """The runtime's volume; `image` is any that the engine has, none of it is run."""
        name = volume_name(runtime)
        async with self._locks.setdefault(name, asyncio.Lock()):
            if name not in self._ready:
                if not await self._is_complete(name):
                    await self._fill(name, runtime, image)
                self._ready.add(name)
        return name

    async def distrust(self) -> None:
        """Fill all again when they are next asked for: somebody removed one, and the engine made it anew, empty."""
        while self._ready:
            await self._unmark(self._ready.pop())

    async def _unmark(self, name: str) -> None:
        try:
            await self._engine.call("remove a volume", lambda api: api.remove_volume(f"{name}-ready"))
        except EngineError as error:
            if error.code != 404:
                raise

    async def _is_complete(self, name: str) -> bool:
        return await self._exists(name) and await self._exists(f"{name}-ready")

    async def _exists(self, volume: str) -> bool:
        try:
            await self._engine.call("inspect a volume", lambda api: api.inspect_volume(volume))
        except EngineError as error:
            if error.code == 404:
                return False
            raise
        return True

    async def _fill(self, name: str, runtime: Runtime, image: str) -> None:
        labels = {LABEL: runtime.digest}
        filler = f"paddock-filler-{uuid.uuid4().hex}"
        await self._engine.call("make a volume", lambda api: api.create_volume(name, labels=labels))
        try:
            await self._engine.call(
                "make a container that fills a volume",
                lambda api: api.create_container(
                    image,
                    ["never-run"],
                    entrypoint=["never-run"],
                    name=filler,
                    labels=labels,
                    host_config=api.create_host_config(network_mode="none", binds=[f"{name}:{_FILLED_AT}"]),
                ),
            )
            with tempfile.TemporaryFile() as spool:
                await asyncio.to_thread(_pack, runtime.path, spool)
                await self._engine.call("fill a volume", lambda api: api.put_archive(filler, _FILLED_AT, spool))
        finally:
            await shielded(remove_container(self._engine, filler))
        ready = f"{name}-ready"
        await self._engine.call("make a volume", lambda api: api.create_volume(ready, labels=labels))


def volume_name(runtime: Runtime) -> str:
    return f"paddock-{runtime.name}-{runtime.digest[:16]}"


def _pack(folder: Path, into: IO[bytes]) -> None:
    with tarfile.open(fileobj=into, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name, filter=anonymous)
    into.seek(0)
