"""Files as tar streams, made and read off the event loop. Owners are left out: what is put belongs to who puts it."""

import asyncio
import os
import shutil
import tarfile
import tempfile
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import IO, Final

IN_MEMORY_BYTES: Final = 1 << 20
PIECE_BYTES: Final = 256 << 10
DEFAULT_MODE: Final = 0o644


def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


class Archive:
    """A tar file that lives until `close`: in memory while it is small, else on disk."""

    def __init__(self) -> None:
        # It is closed by `close`, in whatever task that is.
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES)  # noqa: SIM115
        self.size = 0
        self.of_folder = False

    @classmethod
    async def of(cls, source: bytes | Path, name: str, mode: int | None) -> "Archive":
        """An archive of one file under `name`, or of all that is in a folder (`of_folder`).

        Raises:
            OSError: `source` cannot be read.
        """
        archive = cls()
        try:
            await asyncio.to_thread(archive._pack, source, name, mode)
        except BaseException:
            archive.close()
            raise
        return archive

    def _pack(self, source: bytes | Path, name: str, mode: int | None) -> None:
        with tarfile.open(fileobj=self._file, mode="w", format=tarfile.GNU_FORMAT) as tar:
            if isinstance(source, bytes):
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(source), DEFAULT_MODE if mode is None else mode
                tar.addfile(entry, BytesIO(source))
            elif source.is_dir():
                self.of_folder = True
                for path in sorted(source.iterdir()):
                    tar.add(path, path.name, filter=anonymous)
            else:
                entry = tar.gettarinfo(str(source.resolve(strict=True)), name)
                entry.mode = entry.mode if mode is None else mode
                with source.open("rb") as file:
                    tar.addfile(anonymous(entry), file)
        self._file.seek(0)

    def add(self, data: bytes) -> None:
        self._file.write(data)
        self.size += len(data)

    async def pieces(self) -> AsyncIterator[bytes]:
        while data := await asyncio.to_thread(self._file.read, PIECE_BYTES):
            yield data

    async def unpack(self, target: Path) -> None:
        """Put its one file or folder at `target`, which must not exist; nothing lands outside.

        Raises:
            OSError, tarfile.TarError: it cannot be written, or what it holds is refused.
        """
        await asyncio.to_thread(self._unpack, target)

    def _unpack(self, target: Path) -> None:
        self._file.seek(0)
        if os.path.lexists(target):
            raise FileExistsError(f"{target} exists already")
        folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=".paddock-"))
        try:
            with tarfile.open(fileobj=self._file, mode="r") as tar:
                tar.extractall(folder, filter=_safe)
            (only,) = folder.iterdir()
            only.rename(target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def only_file(self) -> bytes:
        """The content of its one regular file.

        Raises:
            tarfile.TarError: it holds something else.
        """
        return await asyncio.to_thread(self._only_file)

    def _only_file(self) -> bytes:
        self._file.seek(0)
        with tarfile.open(fileobj=self._file, mode="r") as tar:
            entry = tar.next()
            file = tar.extractfile(entry) if entry is not None and entry.isreg() else None
            if file is None:
                raise tarfile.TarError("it is not a regular file")
            return file.read()

    def close(self) -> None:
        self._file.close()


def _safe(entry: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    """What came out of a sandbox is not trusted: the filter refuses links and names that lead out of the folder."""
    return tarfile.data_filter(entry, folder)


def parted(target: str) -> tuple[str, str]:
    """Folder and name of an absolute path in a sandbox.

    Raises:
        ValueError: it is not absolute, or names no file.
    """
    path = PurePosixPath(target)
    if not path.is_absolute() or ".." in path.parts or not path.name or "\0" in target:
        raise ValueError(f"'{target}' is no absolute path of a file in a sandbox")
    return str(path.parent), path.name
