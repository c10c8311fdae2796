"""Files in and out over stdio: whole or not at all, with their modes, and never outside the folder that is named."""

import io
import os
import random
import socket
import stat
import tarfile
from pathlib import Path

import pytest

from shared.supervisor.protocol import Commands, ExitStatus
from tests.needs import probe
from tests.supervisor.rig import Activation

BIG_BYTES = (300 if probe("full") is None else 40) << 20


@pytest.fixture
def commands(activation: Activation) -> Commands:
    activation.prepare()
    return activation.commands


def _tar(*entries: tuple[tarfile.TarInfo, bytes], format: int = tarfile.GNU_FORMAT) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=format) as tar:
        for entry, content in entries:
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def _entry(name: str, *, kind: bytes = tarfile.REGTYPE, mode: int = 0o644, link: str = "") -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.linkname = kind, mode, link
    return entry


def _unpack(activation: Activation, target: Path | str, tar: bytes, *more: str) -> str:
    """What was said on stderr; empty when it was unpacked."""
    done = activation.call([str(activation.program), "unpack", str(target), *more], tar)
    assert done.stdout == b""
    assert (done.returncode == ExitStatus.DONE) == (done.stderr == b""), done.stderr
    return done.stderr.decode()


def _packed(activation: Activation, source: Path | str) -> dict[str, tarfile.TarInfo]:
    done = activation.call([str(activation.program), "pack", str(source)])
    assert (done.returncode, done.stderr) == (0, b"")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        return {entry.name: entry for entry in tar.getmembers()}


def test_what_is_put_is_what_is_got(activation: Activation, commands: Commands, place: Path) -> None:
    content = random.Random(1).randbytes(1_000_003)
    path = place / "new" / "folders" / "file"
    done = activation.call(commands.put(str(path), mode=0o640, size=len(content)), content)
    assert (done.returncode, done.stderr) == (0, b"")
    assert path.read_bytes() == content
    about = path.stat()
    assert (stat.S_IMODE(about.st_mode), about.st_uid) == (0o640, activation.uid)
    assert activation.call(commands.get(str(path))).stdout == content
    assert activation.call(commands.get(str(path), offset=1_000_000)).stdout == content[-3:]
    assert activation.call(commands.get(str(path), offset=5, length=7)).stdout == content[5:12]
    assert activation.call(commands.get(str(path), offset=2_000_000)).stdout == b""


def test_a_put_that_is_cut_off_leaves_the_old_file_and_no_trace(
    activation: Activation, commands: Commands, place: Path
) -> None:
    path = place / "file"
    assert activation.call(commands.put(str(path), mode=0o600, size=3), b"old").returncode == 0
    done = activation.call(commands.put(str(path), mode=0o600, size=10), b"too short")
    assert done.returncode == ExitStatus.FAILED
    assert b"the input ended before its 10 bytes" in done.stderr
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in place.iterdir() if entry.name.startswith("file")] == ["file"]


def test_a_put_takes_no_more_than_its_size(activation: Activation, commands: Commands, place: Path) -> None:
    assert activation.call(commands.put(str(place / "file"), mode=0o600, size=3), b"abcdef").returncode == 0
    assert (place / "file").read_bytes() == b"abc"
    assert activation.call(commands.put(str(place / "empty"), mode=0o755, size=0)).returncode == 0
    assert (place / "empty").stat().st_size == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_root_puts_files_for_another_owner(activation: Activation, place: Path) -> None:
    if activation.uid != 0:
        done = activation.call([str(activation.program), "put", f"{place}/file", "600", "1", "0:0"], b"x")
        assert done.returncode == ExitStatus.FAILED
        return
    activation.prepare()
    path = place / "file"
    argv = activation.commands.put(str(path), mode=0o4755, size=1, owner=(1234, 4321))
    assert activation.call(argv, b"x").returncode == 0
    about = path.stat()
    assert (about.st_uid, about.st_gid, stat.S_IMODE(about.st_mode)) == (1234, 4321, 0o4755)


def test_what_cannot_be_got_or_put_is_named_with_the_reason(
    activation: Activation, commands: Commands, place: Path
) -> None:
    os.mkfifo(place / "fifo", 0o666)
    (place / "fifo").chmod(0o666)
    (place / "folder").mkdir(0o777)
    for argv, sentence in (
        (commands.get(f"{place}/none"), f"cannot read {place}/none: No such file or directory"),
        (commands.get(str(place)), "is not a regular file"),
        (commands.get(f"{place}/fifo"), "is not a regular file"),
        (commands.put(f"{place}/folder", mode=0o600, size=1), f"cannot write {place}/folder: "),
        (commands.put("/proc/x/y", mode=0o600, size=1), "cannot create /proc/x/y"),
    ):
        done = activation.call(argv, b"x")
        assert done.returncode == ExitStatus.FAILED, argv
        assert sentence in done.stderr.decode()


def test_a_folder_goes_in_and_out_with_modes_links_and_long_names(activation: Activation, place: Path) -> None:
    long = "/".join(["a-long-name-" + "x" * 80] * 4) + "/file"
    files = {
        "run": (0o755, b"#!/bin/sh\n"),
        "data/secret": (0o600, b"\0" * 70_000),
        "empty": (0o644, b""),
        long: (0o644, b"l"),
    }
    target = place / "target"
    for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        entries = [(_entry("data", kind=tarfile.DIRTYPE, mode=0o750), b"")]
        entries += [(_entry(name, mode=mode), content) for name, (mode, content) in files.items()]
        entries += [(_entry("link", kind=tarfile.SYMTYPE, link="data/secret"), b"")]
        entries += [(_entry("same", kind=tarfile.LNKTYPE, link="run"), b"")]
        entries += [(_entry("long-link", kind=tarfile.SYMTYPE, link="y" * 300), b"")]
        entries += [(_entry("ünï"), b"u")]
        assert _unpack(activation, target, _tar(*entries, format=kind)) == ""
    for name, (mode, content) in files.items():
        assert (target / name).read_bytes() == content
        assert stat.S_IMODE((target / name).stat().st_mode) == mode
    assert stat.S_IMODE((target / "data").stat().st_mode) == 0o750
    assert os.readlink(target / "link") == "data/secret"
    assert (target / "same").stat().st_ino == (target / "run").stat().st_ino
    packed = _packed(activation, target)
    assert {name for name, entry in packed.items() if entry.isreg()} == {
        f"target/{name}" for name in [*files, "same", "ünï"]
    }
    assert packed[f"target/{long}"].size == 1
    assert packed["target/long-link"].linkname == "y" * 300
    assert packed["target/run"].mode == 0o755
    assert packed["target/data"].isdir()


def test_a_folder_is_merged_and_a_file_is_replaced_in_one_step(activation: Activation, place: Path) -> None:
    target = place / "target"
    _unpack(activation, target, _tar((_entry("kept"), b"1"), (_entry("folder/old"), b"2"), (_entry("file"), b"3")))
    with (target / "file").open("rb") as reading:
        assert _unpack(activation, target, _tar((_entry("folder/new"), b"4"), (_entry("file"), b"5"))) == ""
        assert reading.read() == b"3"
    found = {str(path.relative_to(target)): path.read_bytes() for path in target.rglob("*") if path.is_file()}
    assert found == {"kept": b"1", "folder/old": b"2", "folder/new": b"4", "file": b"5"}


def test_a_folder_that_may_not_be_written_to_is_filled_first(activation: Activation, place: Path) -> None:
    sealed = _entry("sealed", kind=tarfile.DIRTYPE, mode=0o555)
    assert _unpack(activation, place / "target", _tar((sealed, b""), (_entry("sealed/file"), b"x"))) == ""
    assert stat.S_IMODE((place / "target" / "sealed").stat().st_mode) == 0o555
    assert (place / "target" / "sealed" / "file").read_bytes() == b"x"
    (place / "target" / "sealed").chmod(0o755)


@pytest.mark.parametrize("name", ["../outside", "a/../../outside", "/outside", "..", "a/.."])
def test_an_entry_that_leads_out_is_refused(activation: Activation, place: Path, name: str) -> None:
    assert "leads out of the folder" in _unpack(activation, place / "target", _tar((_entry(name), b"x")))
    assert not (place / "outside").exists()


def test_links_in_the_folder_do_not_lead_out_of_it(activation: Activation, place: Path) -> None:
    (place / "outside").mkdir(0o777)
    (place / "outside" / "file").write_text("untouched")
    for entries in (
        [(_entry("way", kind=tarfile.SYMTYPE, link="../outside"), b""), (_entry("way/file"), b"x")],
        [(_entry("hard", kind=tarfile.LNKTYPE, link="../outside/file"), b"")],
    ):
        assert "cannot unpack" in _unpack(activation, place / "target", _tar(*entries))
    _unpack(activation, place / "target", _tar((_entry("file", kind=tarfile.SYMTYPE, link="../outside/file"), b"")))
    assert _unpack(activation, place / "target", _tar((_entry("file"), b"new"))) == ""
    assert (place / "target" / "file").read_bytes() == b"new"
    assert (place / "outside" / "file").read_text() == "untouched"


def test_a_stream_that_is_cut_off_or_damaged_is_an_error(activation: Activation, place: Path) -> None:
    whole = _tar((_entry("one"), b"1" * 600), (_entry("two"), b"2" * 600))
    for cut in (0, 100, 512, 700, 1536, 2048, 3000):
        assert "the stream ended" in _unpack(activation, place / f"cut-{cut}", whole[:cut]), cut
    assert not (place / "cut-700" / "one").exists()
    assert (place / "cut-2048" / "one").read_bytes() == b"1" * 600
    damaged = bytearray(whole)
    damaged[0] ^= 1
    assert "no tar stream" in _unpack(activation, place / "damaged", bytes(damaged))
    assert "no tar stream" in _unpack(activation, place / "noise", random.Random(2).randbytes(2048))
    fifo = _tar((_entry("fifo", kind=tarfile.FIFOTYPE), b""))
    assert "cannot unpack fifo: Operation not supported" in _unpack(activation, place / "fifo", fifo)
    assert not list(place.rglob(".paddock-*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_what_root_unpacks_can_belong_to_another_user(activation: Activation, place: Path) -> None:
    if activation.uid != 0:
        pytest.skip("only root may give files away")
    entries = [(_entry("new/file", mode=0o600), b"x"), (_entry("new/link", kind=tarfile.SYMTYPE, link="file"), b"")]
    assert _unpack(activation, place / "target", _tar(*entries), "1234:4321") == ""
    for path in ("new", "new/file", "new/link"):
        about = (place / "target" / path).lstat()
        assert (about.st_uid, about.st_gid) == (1234, 4321)


def test_packing_follows_a_link_at_the_top_and_leaves_out_what_is_no_file(activation: Activation, place: Path) -> None:
    folder = place / "real"
    folder.mkdir(0o755)
    (folder / "file").write_text("x")
    (folder / "inner").symlink_to("/etc")
    os.mkfifo(folder / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
    (place / "link").symlink_to(folder)
    assert set(_packed(activation, place / "link")) == {"link", "link/file", "link/inner"}
    assert set(_packed(activation, f"{place}/real/")) == {"real", "real/file", "real/inner"}
    assert set(_packed(activation, folder / "file")) == {"file"}
    for source, why in ((place / "none", "No such file"), (folder / "fifo", "neither a file nor a folder")):
        done = activation.call([str(activation.program), "pack", str(source)])
        assert done.returncode == ExitStatus.FAILED
        assert why in done.stderr.decode()


def test_a_big_file_goes_through_in_little_memory(activation: Activation, commands: Commands, place: Path) -> None:
    content = random.Random(3).randbytes(1 << 20) * (BIG_BYTES >> 20)
    script = 'exec "$@"'
    limited = ["sh", "-c", f"ulimit -v 30000; {script}", "sh"]
    assert (
        activation.call([*limited, *commands.put(f"{place}/big", mode=0o644, size=BIG_BYTES)], content).returncode == 0
    )
    assert activation.call([*limited, *commands.get(f"{place}/big")]).stdout == content
    packed = activation.call([*limited, str(activation.program), "pack", f"{place}/big"]).stdout
    assert packed[512 : 512 + BIG_BYTES] == content
    assert activation.call([*limited, str(activation.program), "unpack", f"{place}/again"], packed).returncode == 0
    assert (place / "again" / "big").read_bytes() == content
