"""Checks of `upload` and `download`."""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Final

from shared.errors import SandboxFileError
from shared.sandbox.selfcheck.rig import Checks, Rig, expect, expecting

CHECKS = Checks()
LARGE_BYTES: Final = 24 << 20


def _path(rig: Rig, name: str) -> str:
    return f"{rig.box.place.workdir.rstrip('/')}/{name}"


@CHECKS
async def a_file_comes_back_as_it_was_put(rig: Rig) -> None:
    for name, data in (("empty", b""), ("bytes", bytes(range(256)) * 3), ("block", bytes(512))):
        await rig.box.upload(data, _path(rig, name))
        back = await rig.box.download(_path(rig, name))
        expect(back == data, f"{name}: {len(back)} bytes came back, {len(data)} were put")


@CHECKS
async def modes_are_kept_and_programs_run(rig: Rig) -> None:
    path = _path(rig, "program")
    await rig.box.upload(b"#!/bin/sh\necho ran\n", path, mode=0o750)
    expect(await rig.out(f"stat -c %a {path}") == "750", "the mode is another")
    expect(await rig.out(path) == "ran", "it does not run")
    await rig.box.upload(b"", path, mode=0o604)
    expect(await rig.out(f"stat -c %a {path}") == "604", "the mode of a replaced file is another")


@CHECKS
async def what_is_put_belongs_to_who_runs_commands(rig: Rig) -> None:
    path = _path(rig, "private")
    await rig.box.upload(b"hi\n", path, mode=0o600)
    place = rig.box.place
    expect(await rig.out(f"cat {path}") == "hi", "it cannot be read")
    expect(await rig.out(f"stat -c %u:%g {path}") == f"{place.uid}:{place.gid}", "it belongs to somebody else")


@CHECKS
async def what_is_put_for_another_user_belongs_to_that_user(rig: Rig) -> None:
    rig.need(rig.features.users, "has one user")
    folder = f"{rig.box.place.state_dir}/of-another"
    await rig.box.upload(b"x", f"{folder}/file", user="4321:1234")
    expect(await rig.out(f"stat -c %u:%g {folder}/file") == "4321:1234", "it belongs to somebody else")


@CHECKS
async def a_large_file_is_not_changed_on_its_way(rig: Rig) -> None:
    block = os.urandom(1 << 20)
    data = block * (LARGE_BYTES >> 20)
    with tempfile.TemporaryDirectory() as name:
        source, target = Path(name) / "source", Path(name) / "target"
        source.write_bytes(data)
        await rig.box.upload(source, _path(rig, "large"))
        told = await rig.out(f"sha256sum < {_path(rig, 'large')}")
        expect(told.split()[0] == hashlib.sha256(data).hexdigest(), "it arrived changed")
        await rig.box.download_to(_path(rig, "large"), target)
        expect(target.read_bytes() == data, "it came back changed")
    await rig.out(f"rm {_path(rig, 'large')}")


@CHECKS
async def a_folder_keeps_its_shape(rig: Rig) -> None:
    deep = "/".join(["a-folder-with-a-long-name-of-fifty-characters-more-less"] * 4)
    with tempfile.TemporaryDirectory() as name:
        source, target = Path(name) / "source", Path(name) / "target"
        (source / deep).mkdir(parents=True)
        (source / deep / "ünïcode name").write_bytes(b"deep")
        (source / "empty folder").mkdir()
        (source / "run").write_bytes(b"#!/bin/sh\n")
        (source / "run").chmod(0o755)
        (source / "link").symlink_to("run")
        await rig.box.upload(source, _path(rig, "tree"))
        expect(await rig.out(f"readlink {_path(rig, 'tree')}/link") == "run", "the link is no link")
        await rig.box.download_to(_path(rig, "tree"), target)
        expect((target / deep / "ünïcode name").read_bytes() == b"deep", "a deep file is gone")
        expect((target / "empty folder").is_dir(), "an empty folder is gone")
        expect(os.access(target / "run", os.X_OK), "a program lost its mode")
        expect(os.readlink(target / "link") == "run", "a link changed")


@CHECKS
async def a_folder_is_merged_into_what_is_there(rig: Rig) -> None:
    await rig.box.upload(b"old", _path(rig, "merged/kept"))
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "new").write_bytes(b"new")
        await rig.box.upload(Path(name), _path(rig, "merged"))
    expect(await rig.out(f"cat {_path(rig, 'merged')}/*") == "oldnew", "the folder was not merged")


@CHECKS
async def a_file_takes_the_place_of_a_link(rig: Rig) -> None:
    await rig.out(f"echo untouched > {_path(rig, 'victim')}; ln -s victim {_path(rig, 'planted')}")
    await rig.box.upload(b"new", _path(rig, "planted"))
    expect(await rig.out(f"cat {_path(rig, 'victim')}") == "untouched", "it was written through the link")
    expect(await rig.out(f"cat {_path(rig, 'planted')}") == "new", "it did not take the link's place")


@CHECKS
async def parents_are_made(rig: Rig) -> None:
    await rig.box.upload(b"x", _path(rig, "not/there/yet"))
    expect(await rig.box.download(_path(rig, "not/there/yet")) == b"x", "it is not there")


@CHECKS
async def a_download_that_cannot_be_is_an_error_with_a_reason(rig: Rig) -> None:
    async with expecting(SandboxFileError, "nothing-here", "No such file"):
        await rig.box.download(_path(rig, "nothing-here"))
    async with expecting(SandboxFileError, rig.box.place.state_dir, "no regular file"):
        await rig.box.download(rig.box.place.state_dir)
    async with expecting(SandboxFileError, "relative"):
        await rig.box.download("relative/path")


@CHECKS
async def a_download_has_a_limit(rig: Rig) -> None:
    await rig.out(f"head -c 8000000 /dev/zero > {_path(rig, 'long')}")
    async with expecting(SandboxFileError, "larger than 1000 bytes"):
        await rig.box.download(_path(rig, "long"), limit_bytes=1000)
    expect(len(await rig.box.download(_path(rig, "long"), limit_bytes=8_000_000)) == 8_000_000, "it was cut")


@CHECKS
async def links_that_lead_out_do_not_get_here(rig: Rig) -> None:
    folder = _path(rig, "trap")
    await rig.out(f"mkdir {folder}; ln -s /etc/passwd {folder}/out; ln -s ../../../../etc {folder}/up")
    with tempfile.TemporaryDirectory() as name:
        async with expecting(SandboxFileError):
            await rig.box.download_to(folder, Path(name) / "target")
        expect(not os.listdir(name), f"something was left here: {os.listdir(name)}")


@CHECKS
async def an_upload_that_cannot_be_is_an_error_with_a_reason(rig: Rig) -> None:
    async with expecting(SandboxFileError, "/proc/nothing/x"):
        await rig.box.upload(b"x", "/proc/nothing/x")
    async with expecting(SandboxFileError, "cannot be read"):
        await rig.box.upload(Path("/nonesuch/source"), _path(rig, "x"))


@CHECKS
async def the_state_folder_is_writable_and_no_tmpfs(rig: Rig) -> None:
    folder = rig.box.place.state_dir
    await rig.out(f"touch {folder}/mine; rm {folder}/mine")
    kind = await rig.out(f"stat -f -c %T {folder}")
    expect(kind != "tmpfs", "it is a tmpfs")


@CHECKS
async def home_and_the_temporary_folder_can_be_written_to(rig: Rig) -> None:
    place = rig.box.place
    expect(await rig.out("echo $HOME") == place.home, "HOME is another")
    await rig.out(f"touch $HOME/x {place.temporary}/x; rm $HOME/x {place.temporary}/x")


@CHECKS
async def a_tmpfs_takes_uploads(rig: Rig) -> None:
    rig.need(rig.features.isolated, "mounts nothing")
    async with rig.fresh(tmpfs={"/fast": "mode=1777"}) as box:
        await box.upload(b"x", "/fast/file")
        expect(await rig.out("cat /fast/file", box) == "x", "the command does not see it")
        expect(await box.download("/fast/file") == b"x", "it does not come back")


@CHECKS
async def a_read_only_root_has_places_to_write(rig: Rig) -> None:
    rig.need(rig.features.read_only_root, "has no read-only root")
    async with rig.fresh(read_only_root=True) as box:
        result = await rig.sh("touch /usr/x", box)
        expect(not result.ok, "the root can be written to")
        for folder in (box.place.temporary, box.place.state_dir, box.place.home):
            await box.upload(b"x", f"{folder}/file")
            expect(await rig.out(f"cat {folder}/file", box) == "x", f"nothing can be put into {folder}")
        async with expecting(SandboxFileError, "/usr/file"):
            await box.upload(b"x", "/usr/file")
