"""The pure parts: the wire to the supervisor, capped output, archives."""

import asyncio
import os
import tarfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.sandbox.archive import Archive, parted
from shared.sandbox.output import CappedOutput
from shared.sandbox.wire import CommandRequest, End, StreamReader, input_frames, refusal


def _request(argv: list[str], **more: object) -> CommandRequest:
    given_parts = {"boot": "b", "timeout_s": 1.5, "cwd": "/", "cwd_optional": False, "env": {}, **more}
    return CommandRequest.of(argv, **given_parts)  # type: ignore[arg-type]


@given(st.binary(max_size=60), st.binary(max_size=20), st.lists(st.integers(0, 100), max_size=6))
def test_output_is_told_from_its_end_wherever_it_is_cut(own: bytes, behind: bytes, cuts: list[int]) -> None:
    nonce = "ab" * 16
    whole = own + b"\0PDK" + nonce.encode() + b" exit 0 0 boot\0" + behind
    at = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    reader = StreamReader(nonce)
    got = b"".join(reader.feed(whole[a:b]) for a, b in pairwise(at))
    assert (got, reader.ended, reader.end_text) == (own, True, b"exit 0 0 boot")


def test_what_looks_like_the_beginning_of_an_end_is_given_when_none_comes() -> None:
    reader = StreamReader("ab" * 16)
    assert reader.feed(b"text\0PDKab") + reader.rest() == b"text\0PDKab"
    assert not reader.ended


@pytest.mark.parametrize("text", [b"", b"exit", b"exit x 0 b", b"nonsense 1 0 b", b"exit 1 0 b more"])
def test_an_end_that_is_malformed_is_none(text: bytes) -> None:
    assert End.parse(text) is None


def test_an_end_without_a_count_of_kills_has_none() -> None:
    assert End.parse(b"signal 9 -1 b") == End("signal", 9, None, "b")


@pytest.mark.parametrize(
    ("argv", "env"), [([], {}), ([""], {}), (["a\0b"], {}), (["a"], {"x=y": "1"}), (["a"], {"": "1"})]
)
def test_what_no_system_takes_is_refused_here(argv: list[str], env: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        _request(argv, env=env)


def test_a_request_that_is_too_large_is_refused_here() -> None:
    with pytest.raises(ValueError, match="8 MiB"):
        _request(["x" * (9 << 20)]).encoded()


def test_a_refusal_names_what_is_missing() -> None:
    request = _request(["tool"], cwd="/gone")
    assert refusal(End("exec", 2, None, "b"), request) == (
        "command_missing",
        "There is no program 'tool' in the sandbox, or not what it needs to run.",
    )
    told = refusal(End("cwd", 2, None, "b"), request)
    assert told is not None
    assert "'/gone'" in told[1]
    assert refusal(End("exit", 2, None, "b"), request) is None


@given(st.binary(max_size=300_000))
def test_frames_carry_the_input(data: bytes) -> None:
    got = b""
    for frame in input_frames(data):
        assert int.from_bytes(frame[:4], "big") == len(frame) - 4 > 0
        got += frame[4:]
    assert got == data


@given(st.lists(st.binary(max_size=50)), st.integers(0, 80))
def test_capped_output_keeps_head_and_tail_and_counts_the_rest(pieces: list[bytes], limit: int) -> None:
    whole = b"".join(pieces)
    capped = CappedOutput(limit)
    for piece in pieces:
        capped.add(piece)
    output = capped.output()
    assert len(output.data) == min(limit, len(whole))
    assert len(output.data) + output.dropped == len(whole)
    assert whole.startswith(output.head)
    assert whole.endswith(output.tail)


@pytest.mark.parametrize("path", ["", "relative", "/", "/a/../b", "/a\0b"])
def test_a_path_that_is_no_file_in_a_sandbox_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="no absolute path"):
        parted(path)


async def test_the_same_folder_gives_the_same_archive(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"2")
    (tmp_path / "a").write_bytes(b"1")
    archives = []
    for _ in range(2):
        archive = await Archive.of(tmp_path, "x", None)
        archives.append(b"".join([piece async for piece in archive.pieces()]))
        archive.close()
    assert archives[0] == archives[1]


async def test_an_archive_that_leads_out_writes_nothing(tmp_path: Path) -> None:
    archive = Archive()
    evil = tmp_path / "evil.tar"
    with tarfile.open(evil, "w") as tar:
        entry = tarfile.TarInfo("../outside")
        tar.addfile(entry)
    archive.add(await asyncio.to_thread(evil.read_bytes))
    with pytest.raises(tarfile.TarError):
        await archive.unpack(tmp_path / "target")
    archive.close()
    assert os.listdir(tmp_path) == ["evil.tar"]
