"""`paddock selfcheck PROVIDER`: every check of the contract on a real provider, with progress and a table."""

import asyncio
import os
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import orjson
import yaml

from shared.errors import PaddockError
from shared.ports.sandbox import SandboxProvider
from shared.sandbox.context import ProviderContext
from shared.sandbox.open import PROVIDERS
from shared.sandbox.selfcheck import commands, files, lifecycle, networks, states
from shared.sandbox.selfcheck.rig import MESH, Check, CheckFailedError, NotApplicableError, Rig, plain_spec
from shared.settings import Settings

CHECKS: Final[Sequence[Check]] = (
    *lifecycle.CHECKS,
    *commands.CHECKS,
    *files.CHECKS,
    *states.CHECKS,
    *networks.CHECKS,
)
CHECK_TIMEOUT_S: Final = 90.0
Verdict = Literal["ok", "FAILED", "not offered"]


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    verdict: Verdict
    told: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Subject:
    """What is checked: a provider by name with its options, and the image of its sandboxes."""

    provider: str
    options: dict[str, Any]
    image: str | None
    state_dir: Path

    @classmethod
    def of(cls, name: str, settings: Settings, more: Mapping[str, str], image: str | None) -> "Subject":
        """A configured sandbox, or a provider with its defaults; `more` are further options.

        Raises:
            LookupError: there is neither.
            ValueError: the options do not fit.
        """
        entry = settings.sandboxes.get(name)
        provider, configured = (name, {}) if entry is None else (entry.provider, entry.options)
        options = {**configured, **{key: yaml.safe_load(value) for key, value in more.items()}}
        checked = PROVIDERS.options(provider, options)
        return cls(provider, options, image or getattr(checked, "image", None), settings.state_dir.absolute())


@asynccontextmanager
async def open_rig(subject: Subject) -> AsyncIterator[Rig]:
    """A rig with one shared sandbox; everything it made is gone afterwards.

    Raises:
        PaddockError: the provider cannot work here.
    """
    with tempfile.TemporaryDirectory(prefix="paddock-selfcheck-") as name:
        # Only for the socket: a sandbox's user passes through it.
        os.chmod(name, 0o755)
        told: list[bytes] = []
        async with _model(Path(name) / "model.sock", told) as socket_path:
            provider = _provider(subject, socket_path)
            session = secrets.token_hex(8)
            try:
                box = await provider.create(plain_spec(subject.image, session, provider.features))
                try:
                    yield Rig(provider, subject.image, session, box, told, _reattach(subject, socket_path))
                finally:
                    await box.stop()
                    for left in await provider.list(mesh=MESH, session=session):
                        await provider.remove(left.id)
            finally:
                await provider.close()


def _provider(subject: Subject, socket_path: Path) -> SandboxProvider:
    module = PROVIDERS.module(subject.provider)
    context = ProviderContext(subject.provider, subject.state_dir, socket_path, "http://127.0.0.1:8300")
    provider: SandboxProvider = module.create(module.Options.model_validate(subject.options), context)
    return provider


@asynccontextmanager
async def _model(path: Path, told: list[bytes]) -> AsyncIterator[Path]:
    """Something that answers where the model proxy's socket would be."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        told.append(await reader.read(4096))
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nthe model")
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, path)
    os.chmod(path, 0o666)
    try:
        yield path
    finally:
        server.close()


def _reattach(subject: Subject, socket_path: Path) -> Callable[[dict[str, Any]], Any]:
    """Read a file in a sandbox from a fresh process that knows nothing but the descriptor."""

    async def reattach(asked: dict[str, Any]) -> str:
        question = {
            **asked,
            "provider": subject.provider,
            "options": subject.options,
            "state_dir": str(subject.state_dir),
            "socket": str(socket_path),
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "shared.sandbox.selfcheck.other_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        answer, _ = await process.communicate(orjson.dumps(question))
        return answer.decode()

    return reattach


async def run_checks(rig: Rig, tell: Callable[[Outcome], None], chosen: Sequence[Check] = CHECKS) -> list[Outcome]:
    """Run checks one after the other; `tell` is given each outcome."""
    outcomes = []
    for check in chosen:
        outcome = await run_check(rig, check)
        tell(outcome)
        outcomes.append(outcome)
    return outcomes


async def run_check(rig: Rig, check: Check) -> Outcome:
    began = time.monotonic()
    verdict: Verdict = "ok"
    told = ""
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            await check.run(rig)
    except NotApplicableError as error:
        verdict, told = "not offered", f"the provider {error}"
    except CheckFailedError as error:
        verdict, told = "FAILED", str(error)
    except TimeoutError:
        verdict, told = "FAILED", f"no end within {CHECK_TIMEOUT_S:g} s"
    except PaddockError as error:
        verdict, told = "FAILED", f"{type(error).__name__}: {error.message}"
    return Outcome(check.name, verdict, told, time.monotonic() - began)
