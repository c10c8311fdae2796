"""What a check of the contract has in hand, and how checks are written down."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from shared.contracts.sandbox import SandboxLabels
from shared.errors import PaddockError
from shared.ports.sandbox import ExecResult, Features, Sandbox, SandboxProvider, SandboxSpec
from shared.sandbox.box import Box

MESH: Final = "selfcheck"
EXPIRES_S: Final = 900.0
SOON_S: Final = 20.0


class CheckFailedError(Exception):
    """The contract is not kept; the message says what was seen."""


class NotApplicableError(Exception):
    """The provider does not claim to do what is checked."""


def expect(held: object, seen: str) -> None:
    if not held:
        raise CheckFailedError(seen)


@asynccontextmanager
async def expecting(kind: type[PaddockError], *words: str) -> AsyncIterator[None]:
    """The block raises an error of `kind` whose message has all `words` in it."""
    try:
        yield
    except kind as error:
        missing = [word for word in words if word not in error.message]
        expect(not missing, f"the error does not name {missing}: {error.message}")
    except PaddockError as error:
        raise CheckFailedError(f"{type(error).__name__} instead of {kind.__name__}: {error.message}") from error
    else:
        raise CheckFailedError(f"no {kind.__name__} was raised")


@dataclass(slots=True)
class Rig:
    """One provider under check. `box` is a sandbox that all checks share which leave it as it was."""

    provider: SandboxProvider
    image: str | None
    session: str
    box: Sandbox
    model_told: list[bytes]
    reattach: Callable[[dict[str, Any]], Awaitable[str]]

    @property
    def features(self) -> Features:
        return self.provider.features

    def need(self, has: bool, what: str) -> None:
        if not has:
            raise NotApplicableError(what)

    def spec(self, session: str | None = None, **asked: Any) -> SandboxSpec:
        return replace(plain_spec(self.image, session or self.session, self.features), **asked)

    @asynccontextmanager
    async def fresh(self, **asked: Any) -> AsyncIterator[Box]:
        """A sandbox of one check's own."""
        box = await self.provider.create(self.spec(**asked))
        if not isinstance(box, Box):
            raise CheckFailedError(f"{type(box).__name__} is not built on shared.sandbox.box.Box")
        try:
            yield box
        finally:
            await box.stop()

    async def sh(self, script: str, box: Sandbox | None = None, **more: Any) -> ExecResult:
        return await (box or self.box).exec(["sh", "-c", script], **more)

    async def out(self, script: str, box: Sandbox | None = None, **more: Any) -> str:
        """What a script that has to succeed writes, without blanks around."""
        result = await self.sh(script, box, **more)
        expect(result.ok, f"`{script}` ended with {result.exit_code}, signal {result.signal}: {result.stderr.text()}")
        return result.stdout.text().strip()

    async def processes(self, mark: str, box: Sandbox | None = None) -> list[str]:
        """Pids and command lines in the sandbox that have `mark` in them."""
        script = "for p in /proc/[0-9]*; do printf '%s ' ${p#/proc/}; tr '\\0' ' ' <$p/cmdline; echo; done 2>/dev/null"
        return [line for line in (await self.out(script, box)).splitlines() if mark in line]

    async def end(self, mark: str, box: Sandbox | None = None) -> None:
        """Kill what `processes` finds."""
        pids = " ".join(line.split()[0] for line in await self.processes(mark, box))
        await self.out(f"kill -9 {pids} 2>/dev/null; :", box)

    async def until(self, what: str, held: Callable[[], Awaitable[bool]], within_s: float = SOON_S) -> None:
        end = time.monotonic() + within_s
        while not await held():
            expect(time.monotonic() < end, f"not within {within_s:g} s: {what}")
            await asyncio.sleep(0.05)

    async def stays(self, box: Sandbox, command: Sequence[str]) -> None:
        """Run a command that ends by itself and leaves something behind."""
        result = await box.exec(command)
        expect(result.ok, f"{command} ended with {result.exit_code}: {result.stderr.text()}")


def plain_spec(image: str | None, session: str, features: Features) -> SandboxSpec:
    """No network where the provider can do without."""
    now = time.time()
    labels = SandboxLabels(mesh=MESH, service="selfcheck", session=session, created_at=now, expires_at=now + EXPIRES_S)
    return SandboxSpec(labels, image=image, network="none" if "none" in features.networks else None)


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    run: Callable[[Rig], Awaitable[None]]


class Checks(list[Check]):
    """The checks of one file; a check's name is its function's, as a sentence."""

    def __call__(self, run: Callable[[Rig], Awaitable[None]]) -> Callable[[Rig], Awaitable[None]]:
        self.append(Check(run.__name__.replace("_", " "), run))
        return run
