"""What images are like: each works, or is refused when the sandbox is made, with a sentence that names the trait."""

import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from shared.errors import CommandNotStartedError, SandboxRefusedError
from shared.sandbox.providers.docker import DockerProvider
from tests.sandbox.docker_rig import (
    BUSYBOX,
    IMAGE,
    derived_image,
    docker,
    docker_provider,
    expect_none_of,
    make_image,
    new_spec,
)

pytestmark = [pytest.mark.docker, pytest.mark.busybox]
PASSWD = b"root:x:0:0::/root:/bin/sh\nsolver:x:1234:1234::/nonesuch:/bin/sh\n"


@pytest.fixture
async def provider(state_dir: Path) -> AsyncIterator[DockerProvider]:
    async with docker_provider(state_dir) as opened:
        yield opened


@pytest.fixture
def tag() -> Iterator[str]:
    name = f"paddock-test/{secrets.token_hex(6)}:1"
    yield name
    docker("rmi", "--force", name)


@pytest.mark.parametrize(
    "entrypoint", ['["/bin/bash"]', '["/bin/false"]', '["/nonexistent"]', '["sh", "-c", "exec \\"$@\\"", "--"]']
)
async def test_an_entrypoint_does_not_swallow_commands(provider: DockerProvider, tag: str, entrypoint: str) -> None:
    derived_image(tag, IMAGE, f"ENTRYPOINT {entrypoint}", 'CMD ["sleep", "1"]')
    box = await provider.create(new_spec(image=tag))
    assert (await box.exec(["echo", "ran"])).stdout.data == b"ran\n"
    await box.stop()


async def test_without_a_workdir_commands_run_in_the_root(provider: DockerProvider) -> None:
    box = await provider.create(new_spec())
    assert box.access.workdir == "/"
    assert (await box.exec(["pwd"])).stdout.data == b"/\n"
    await box.stop()


async def test_a_workdir_that_is_not_in_the_image_is_made_for_its_user(provider: DockerProvider, tag: str) -> None:
    derived_image(tag, IMAGE, "WORKDIR /not/there", "USER 1000:1000")
    docker("run", "--rm", "--entrypoint", "true", tag)
    box = await provider.create(new_spec(image=tag))
    assert box.access.workdir == "/not/there"
    assert (await box.exec(["sh", "-c", "touch x && pwd"])).stdout.data == b"/not/there\n"
    await box.stop()


async def test_a_user_without_a_home_gets_one_and_reads_what_is_put(provider: DockerProvider, tag: str) -> None:
    derived_image(tag, IMAGE, "USER 1000:1000", "ENV HOME=/")
    box = await provider.create(new_spec(image=tag))
    assert (box.place.uid, box.place.gid) == (1000, 1000)
    await box.upload(b"hi\n", "/tmp/in.txt", mode=0o600)
    assert (await box.exec(["cat", "/tmp/in.txt"])).stdout.data == b"hi\n"
    assert (await box.exec(["sh", "-c", 'touch "$HOME/x" && id -u'])).stdout.data == b"1000\n"
    await box.stop()


async def test_a_user_by_name_is_the_images_own(provider: DockerProvider, tag: str) -> None:
    make_image(tag, {"bin/sh": BUSYBOX, "etc/passwd": PASSWD}, "USER solver")
    box = await provider.create(new_spec(image=tag))
    assert box.place.uid == 1234
    assert (await box.exec(["sh", "-c", 'echo x > "$HOME/x" && read a < "$HOME/x" && echo $a'])).stdout.data == b"x\n"
    await box.stop()


async def test_a_user_that_the_image_does_not_know_is_refused_by_name(provider: DockerProvider) -> None:
    session = secrets.token_hex(8)
    with pytest.raises(SandboxRefusedError, match="nosuchuser"):
        await provider.create(new_spec(session, user="nosuchuser"))
    await expect_none_of(session)


async def test_a_read_only_root_with_another_user_works(provider: DockerProvider) -> None:
    box = await provider.create(new_spec(read_only_root=True, user="1000:1000", tmpfs={"/work": "mode=1777"}))
    await box.upload(b"x", "/tmp/f")
    result = await box.exec(["sh", "-c", "touch /tmp/x /work/x $HOME/x && ! touch /x 2>/dev/null"])
    assert result.ok, result.stderr.text()
    await box.stop()


async def test_a_tmpfs_that_is_closed_to_the_user_is_refused_with_its_options(provider: DockerProvider) -> None:
    session = secrets.token_hex(8)
    spec = new_spec(session, read_only_root=True, user="1000:1000", tmpfs={"/work": "mode=0700"})
    with pytest.raises(SandboxRefusedError, match=r"/work.*mode=0700.*1000"):
        await provider.create(spec)
    await expect_none_of(session)


async def test_an_image_of_nothing_runs_what_is_put_into_it(provider: DockerProvider, tag: str) -> None:
    make_image(tag, {"empty": None})
    box = await provider.create(new_spec(image=tag))
    with pytest.raises(CommandNotStartedError, match="'sh'") as caught:
        await box.exec(["sh", "-c", "echo ok"])
    assert caught.value.reason == "command_missing"
    await box.upload(BUSYBOX, f"{box.place.state_dir}/busybox", mode=0o755)
    assert (await box.exec([f"{box.place.state_dir}/busybox", "echo", "ok"])).stdout.data == b"ok\n"
    assert await box.download(f"{box.place.state_dir}/busybox", limit_bytes=1 << 24) == BUSYBOX.read_bytes()
    await box.stop()


async def test_an_image_of_busybox_only_works(provider: DockerProvider, tag: str) -> None:
    make_image(tag, {"bin/busybox": BUSYBOX, "bin/sh": BUSYBOX}, "ENV PATH=/bin")
    box = await provider.create(new_spec(image=tag))
    assert (await box.exec(["sh", "-c", "echo ok"])).stdout.data == b"ok\n"
    await box.stop()


async def test_a_program_whose_interpreter_is_missing_is_command_missing(provider: DockerProvider, tag: str) -> None:
    make_image(tag, {"bin/sh": BUSYBOX, "program": b"#!/usr/bin/python3\n"}, "ENV PATH=/bin")
    box = await provider.create(new_spec(image=tag))
    with pytest.raises(CommandNotStartedError, match="'/program'") as caught:
        await box.exec(["/program"])
    assert caught.value.reason == "command_missing"
    await box.stop()


async def test_a_health_check_of_the_image_does_not_run(provider: DockerProvider, tag: str) -> None:
    derived_image(tag, IMAGE, "HEALTHCHECK --interval=1s CMD touch /checked")
    box = await provider.create(new_spec(image=tag))
    told = docker("inspect", "--format", "{{json .Config.Healthcheck}}", f"paddock-{box.id}")
    assert "NONE" in told
    await box.stop()


async def test_an_image_that_is_nowhere_is_refused_with_its_name(provider: DockerProvider) -> None:
    with pytest.raises(SandboxRefusedError, match=r"paddock-test/nowhere:1"):
        await provider.create(new_spec(image="paddock-test/nowhere:1"))


async def test_an_image_may_be_asked_to_be_there_already(state_dir: Path) -> None:
    async with docker_provider(state_dir, pull="never") as provider:
        with pytest.raises(SandboxRefusedError, match="pull: never"):
            await provider.prepare(["paddock-test/nowhere:1"], lambda _: None)


async def test_nothing_of_a_sandbox_outlives_it_in_the_engine(provider: DockerProvider) -> None:
    box = await provider.create(new_spec())
    name = f"paddock-{box.id}"
    told = docker("inspect", "--format", "{{range .Mounts}}{{.Name}}={{.Destination}} {{end}}", name)
    (state,) = [mount.partition("=")[0] for mount in told.split() if mount.endswith("=/run/paddock-state")]
    await box.stop()
    assert state not in docker("volume", "ls", "--quiet").split()


async def test_no_new_privileges_is_on_unless_it_is_asked_for(provider: DockerProvider) -> None:
    for asked, shown in ((None, b"1"), (False, b"0")):
        box = await provider.create(new_spec(no_new_privileges=asked))
        told = await box.exec(["sh", "-c", "sed -n 's/^NoNewPrivs:[[:space:]]*//p' /proc/self/status"])
        assert told.stdout.data.strip() == shown
        await box.stop()


async def test_variables_of_a_command_are_not_in_the_engines_record(provider: DockerProvider) -> None:
    box = await provider.create(new_spec())
    secret = secrets.token_hex(16)
    result = await box.exec(["sh", "-c", "echo $S; cat"], env={"S": secret}, stdin=secret.encode())
    assert result.stdout.data.count(secret.encode()) == 2
    assert secret not in docker("inspect", f"paddock-{box.id}")
    assert secret not in docker("top", f"paddock-{box.id}")
    await box.stop()


async def test_git_sees_a_repository_that_belongs_to_root(provider: DockerProvider, tag: str) -> None:
    """As far as the sandbox decides it: git trusts a folder by what the environment tells it."""
    derived_image(tag, IMAGE, "USER 1000:1000")
    box = await provider.create(new_spec(image=tag))
    told = await box.exec(["sh", "-c", 'echo "$GIT_CONFIG_COUNT $GIT_CONFIG_KEY_0 $GIT_CONFIG_VALUE_0"'])
    assert told.stdout.data == b"1 safe.directory *\n"
    await box.stop()
