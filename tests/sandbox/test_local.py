"""What is particular to local sandboxes: their user, their end without an owner, what they refuse."""

import asyncio
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared.contracts.sandbox import SandboxConnection
from shared.errors import ProviderError, SandboxRefusedError
from shared.ports.sandbox import Limits, Runtime, SandboxSpec
from shared.sandbox.box import Box
from shared.sandbox.context import ProviderContext
from shared.sandbox.local.processes import every_process, has_variable
from shared.sandbox.local.removal import BOX_VARIABLE
from shared.sandbox.open import isolation_problems, sandbox_problems
from shared.sandbox.providers.local import LocalProvider, Options
from shared.settings import LoadedSettings, Settings
from tests.sandbox.docker_rig import MESH, new_spec

SOON_S = 20.0
ISOLATIONS = ["none", pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)]


@pytest.fixture
def directory() -> Iterator[Path]:
    """Below /tmp pytest's own folders are closed to the other user that a plain local sandbox runs as."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="paddock-test-") as name:
        yield Path(name)


def open_local(directory: Path, state_dir: Path, **options: Any) -> LocalProvider:
    context = ProviderContext("local", state_dir, None, "http://127.0.0.1:8300")
    return LocalProvider(Options.model_validate({"directory": str(directory), **options}), context)


@pytest.fixture(params=ISOLATIONS)
async def provider(request: pytest.FixtureRequest, directory: Path, state_dir: Path) -> AsyncIterator[LocalProvider]:
    opened = open_local(directory, state_dir, isolation=request.param)
    yield opened
    for left in await opened.list(mesh=MESH):
        await opened.remove(left.id)


def _spec(**asked: Any) -> SandboxSpec:
    """With the provider's own network."""
    return new_spec(network=None, **asked)


async def _until(what: str, held: Any) -> None:
    end = time.monotonic() + SOON_S
    while not await held():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.05)


def _alive(box_id: str) -> int:
    return sum(has_variable(one, f"{BOX_VARIABLE}={box_id}".encode()) for one in every_process())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives sandboxes users of their own")
async def test_sandboxes_have_different_users_that_are_not_root(provider: LocalProvider) -> None:
    first, second = await provider.create(_spec()), await provider.create(_spec())
    users = [(await box.exec(["id", "-u"])).stdout.text().strip() for box in (first, second)]
    assert len({*users, "0"}) == 3
    assert not (await second.exec(["cat", "/etc/shadow"])).ok
    assert not (await second.exec(["ls", str(provider.directory)])).ok
    victim = f"{provider.directory}/{first.id}/root/work/x"
    await first.upload(b"secret", f"{first.place.workdir}/x", mode=0o600)
    assert not (await second.exec(["cat", victim])).ok


@pytest.mark.bubblewrap
async def test_under_bubblewrap_the_machines_files_are_out_of_sight(directory: Path, state_dir: Path) -> None:
    provider = open_local(directory, state_dir, isolation="bubblewrap")
    box = await provider.create(_spec())
    told = await box.exec(["sh", "-c", "ls -A /root /var /home /srv /mnt 2>/dev/null; ls /proc | grep -c '^[0-9]'"])
    *seen, count = told.stdout.text().split()
    assert set(seen) <= {"/home:", "agent"}, seen
    assert int(count) <= 5  # the keeper, the supervisor, sh, ls, grep
    assert not (await box.exec(["touch", "/usr/x"])).ok
    await box.stop()


async def test_everything_ends_with_the_sandbox_however_it_hides(provider: LocalProvider) -> None:
    box = await provider.create(_spec())
    mark = f"{secrets.randbelow(10**6) + 10**6}.{secrets.randbelow(10**6)}"
    hidden = (
        f"env -i setsid sh -c 'sleep {mark} & sleep {mark}' >/dev/null 2>&1 & setsid sleep {mark} >/dev/null 2>&1 &"
    )
    assert (await box.exec(["sh", "-c", hidden])).ok
    assert isinstance(box, Box)
    await box.interfere("kill")  # the keeper: without a namespace its children are now strangers
    await box.stop()
    words = [Path(f"/proc/{one.pid}/cmdline") for one in every_process()]
    assert not [path for path in words if path.exists() and mark.encode() in path.read_bytes()]


async def test_a_sandbox_ends_by_itself_when_it_expires(provider: LocalProvider) -> None:
    spec = _spec()
    soon = replace(spec, labels=spec.labels.model_copy(update={"expires_at": time.time() + 1.5}))
    box = await provider.create(soon)
    assert (await box.exec(["sh", "-c", "sleep 300 >/dev/null 2>&1 &"])).ok

    async def ended() -> bool:
        return (await box.status()).state == "stopped" and _alive(box.id) == 0

    await _until("it did not end", ended)
    assert (await box.stop()).status == "stopped"


async def test_a_sandbox_outlives_the_process_that_made_it(provider: LocalProvider, state_dir: Path) -> None:
    program = (
        "import asyncio, json, sys\n"
        "from pathlib import Path\n"
        "from tests.sandbox.test_local import open_local, _spec\n"
        "async def main():\n"
        "    provider = open_local(Path(sys.argv[1]), Path(sys.argv[2]), isolation=sys.argv[3])\n"
        "    box = await provider.create(_spec())\n"
        "    await box.upload(b'left', f'{box.place.workdir}/left')\n"
        "    print(box.access.model_dump_json())\n"
        "asyncio.run(main())\n"
    )
    isolation = "bubblewrap" if provider.features.isolated else "none"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(provider.directory), str(state_dir), isolation, stdout=-1
    )
    told, _ = await asyncio.wait_for(process.communicate(), 60)
    connection = json.loads(told)["connection"]
    (found,) = await provider.list()
    box = await provider.attach(SandboxConnection.model_validate(connection))
    assert found.id == box.id
    assert await box.download(f"{box.place.workdir}/left") == b"left"
    await box.stop()


async def test_what_a_local_sandbox_cannot_be_is_said_before_it_is_made(provider: LocalProvider) -> None:
    for asked, word in (
        ({"image": "debian"}, "image"),
        ({"user": "root"}, "user"),
        ({"limits": Limits(memory_mib=64)}, "limit"),
        ({"read_only_root": True}, "read-only"),
        ({"no_new_privileges": False}, "sudo"),
    ):
        with pytest.raises(SandboxRefusedError, match=word):
            await provider.create(_spec(**asked))
    with pytest.raises(SandboxRefusedError, match="proxy"):
        await provider.create(new_spec(network="proxy"))
    assert await provider.list(mesh=MESH) == []


async def test_a_runtime_is_seen_and_cannot_be_changed(provider: LocalProvider, directory: Path) -> None:
    tree = directory / "tree"
    tree.mkdir(mode=0o755)
    (tree / "tool").write_bytes(b"#!/bin/sh\necho ran\n")
    (tree / "tool").chmod(0o755)
    box = await provider.create(_spec(runtimes=[Runtime("tool", "0" * 64, tree)]))
    folder = box.runtime("tool")
    assert (await box.exec([f"{folder}/tool"])).stdout.data == b"ran\n"
    if provider.features.isolated or os.geteuid() == 0:
        assert not (await box.exec(["sh", "-c", f"echo x > {folder}/tool"])).ok
    with pytest.raises(LookupError, match="other"):
        box.runtime("other")
    await box.stop()


async def test_more_sandboxes_than_fit_wait_for_each_other(directory: Path, state_dir: Path) -> None:
    provider = open_local(directory, state_dir, isolation="none", max_sandboxes=2)

    async def one() -> None:
        box = await provider.create(_spec())
        try:
            assert len([found for found in await provider.list() if found.state == "running"]) <= 2
        finally:
            await box.stop()

    await asyncio.gather(*(one() for _ in range(8)))


async def test_who_waits_too_long_for_room_gets_a_retryable_failure(directory: Path, state_dir: Path) -> None:
    provider = open_local(directory, state_dir, isolation="none", max_sandboxes=1, wait_s=0.3)
    box = await provider.create(_spec())
    with pytest.raises(ProviderError, match="no room for another sandbox") as caught:
        await provider.create(_spec())
    assert not caught.value.terminal
    await box.stop()


def test_without_isolation_a_loud_notice_is_given_once(directory: Path, state_dir: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom tests.sandbox.test_local import open_local\n"
        "for _ in range(2): open_local(Path(sys.argv[1]), Path(sys.argv[2]), isolation='none')\n"
    )
    words = [sys.executable, "-c", program, str(directory), str(state_dir)]
    told = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stderr
    assert told.count("NOT isolated") == 1


def test_what_has_to_be_guarded_needs_isolation_or_consent() -> None:
    guarded = [("plain", "the model `policy` has a real key")]
    entry: dict[str, Any] = {"provider": "local", "isolation": "none"}
    for consent, count in ((False, 1), (True, 0)):
        settings = Settings.model_validate({"sandboxes": {"plain": {**entry, "allow_unisolated": consent}}})
        loaded = LoadedSettings(settings, {})
        assert sandbox_problems(loaded) == []
        problems = isolation_problems(loaded, guarded)
        assert len(problems) == count
        assert all("real key" in str(problem) for problem in problems)
    assert "real key" in str(
        isolation_problems(LoadedSettings(Settings.model_validate({"sandboxes": {"plain": entry}}), {}), guarded)[0]
    )


def test_a_wrong_option_is_told_with_its_key() -> None:
    settings = Settings.model_validate({"sandboxes": {"box": {"provider": "local", "isolaton": "none"}}})
    (problem,) = sandbox_problems(LoadedSettings(settings, {"sandboxes.box": "mesh.yaml"}))
    assert str(problem).startswith("mesh.yaml: sandboxes.box.isolaton")
