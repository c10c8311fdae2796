"""Docker providers for tests, and the engine's own word on what is there."""

import asyncio
import json
import os
import secrets
import subprocess
import tarfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from shared.contracts.sandbox import SandboxLabels
from shared.ports.sandbox import SandboxSpec
from shared.sandbox.context import ProviderContext
from shared.sandbox.providers.docker import DockerProvider, Options

IMAGE = os.environ.get("PADDOCK_BASE_IMAGE", "paddock/base:bookworm")
BUSYBOX = Path("/bin/busybox")
GONE_S = 15.0
MESH = f"tests-{os.getpid()}"


def labels_of(session: str) -> SandboxLabels:
    now = time.time()
    return SandboxLabels(mesh=MESH, service="sandbox", session=session, created_at=now, expires_at=now + 600)


def new_spec(session: str | None = None, **asked: Any) -> SandboxSpec:
    return SandboxSpec(labels_of(session or secrets.token_hex(8)), **{"network": "none", **asked})


@asynccontextmanager
async def docker_provider(
    state_dir: Path, *, model_socket: Path | None = None, **options: Any
) -> AsyncIterator[DockerProvider]:
    context = ProviderContext("docker", state_dir, model_socket, "http://127.0.0.1:8300")
    provider = DockerProvider(Options.model_validate({"image": IMAGE, **options}), context)
    try:
        yield provider
    finally:
        # Beside the provider, whose engine may be a proxy that answers wrongly.
        for left in await asyncio.to_thread(containers_of_these_tests):
            await asyncio.to_thread(docker, "rm", "--force", "--volumes", left)
        await provider.close()


def docker(*arguments: str, stdin: bytes = b"") -> str:
    done = subprocess.run(["docker", *arguments], input=stdin, capture_output=True, check=True, timeout=120)
    return done.stdout.decode()


def containers_of_these_tests() -> list[str]:
    return docker("ps", "--all", "--quiet", "--filter", f"label=paddock.mesh={MESH}").split()


def containers_of(session: str) -> list[str]:
    return docker("ps", "--all", "--quiet", "--filter", f"label=paddock.session={session}").split()


def created_since(since: float, session: str) -> list[str]:
    """The containers with the session's label that the engine has made since then (Unix seconds)."""
    bounds = ("--since", f"{since:.3f}", "--until", f"{time.time():.3f}")
    only = ("--filter", "event=create", "--filter", f"label=paddock.session={session}")
    return docker("events", *bounds, *only, "--format", "{{.ID}}").split()


async def expect_none_of(session: str, *, settle_s: float = 0.0) -> None:
    """No container carries the session's label, at the latest after a while, and none turns up for `settle_s`."""
    end = time.monotonic() + GONE_S
    while await asyncio.to_thread(containers_of, session):
        assert time.monotonic() < end, f"a container of {session} was left behind"
        await asyncio.sleep(0.1)
    if settle_s:
        await asyncio.sleep(settle_s)
        await expect_none_of(session)


def make_image(tag: str, files: Mapping[str, bytes | Path | None], *changes: str) -> str:
    """An image of these files (None: a folder) and of Dockerfile instructions, without a base."""
    archive = BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.mode = 0o755
            if content is None:
                entry.type = tarfile.DIRTYPE
                tar.addfile(entry)
                continue
            data = content.read_bytes() if isinstance(content, Path) else content
            entry.size = len(data)
            tar.addfile(entry, BytesIO(data))
    words = [word for change in changes for word in ("--change", change)]
    docker("import", *words, "-", tag, stdin=archive.getvalue())
    return tag


def derived_image(tag: str, base: str, *changes: str) -> str:
    """An image with the content of another and other instructions."""
    container = docker("create", base, "true").strip()
    try:
        words = [word for change in changes for word in ("--change", change)]
        docker("commit", *words, container, tag)
    finally:
        docker("rm", container)
    return tag


def inspected(name: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(docker("inspect", name))[0]
    return told
