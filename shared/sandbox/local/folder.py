"""The folder of one local sandbox: who owns it, its private root, its control socket.

DIRECTORY/ID/box.json    labels, and the keeper's process once it runs
             control     Unix socket on which the keeper takes commands
             log         what bubblewrap or the keeper said
             root/       the sandbox's own files
"""

import fcntl
import json
import os
import pwd
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from shared.contracts.contract import Contract
from shared.contracts.sandbox import SandboxLabels
from shared.sandbox.local.processes import Process, every_process, runs_as

FIRST_UID: Final = 52_000
"""Above what people and systems hand out, below what a container's user namespace may end at. Each sandbox gets a
number of its own where we are root."""
UIDS: Final = 8_000


class BoxRecord(Contract):
    """`pid` and `start` are the keeper's, null until it runs; `uid` is the box's own user, null where it is ours."""

    labels: SandboxLabels
    isolated: bool
    uid: int | None = None
    pid: int | None = None
    start: int | None = None


class BoxFolder:
    def __init__(self, directory: Path, box_id: str) -> None:
        self.id = box_id
        self.path = directory / box_id
        self.root = self.path / "root"
        self.control = self.path / "control"
        self.log = self.path / "log"

    def read(self) -> BoxRecord | None:
        """None when there is no such box, or it was not made to the end of its first step."""
        try:
            return BoxRecord.model_validate_json((self.path / "box.json").read_bytes())
        except (FileNotFoundError, NotADirectoryError, ValidationError):
            return None

    def write(self, record: BoxRecord) -> None:
        draft = self.path / "box.json.part"
        draft.write_text(record.model_dump_json(), encoding="utf-8")
        draft.rename(self.path / "box.json")

    def keeper(self) -> Process | None:
        record = self.read()
        if record is None or record.pid is None or record.start is None:
            return None
        return Process(record.pid, record.start)

    def said(self, limit: int = 2000) -> str:
        try:
            return self.log.read_text(encoding="utf-8", errors="replace")[-limit:].strip()
        except FileNotFoundError:
            return ""

    def remove(self) -> None:
        """Remove it with all files, also those in folders that were closed to their owner."""
        shutil.rmtree(self.path, onerror=_open_and_retry)


def _open_and_retry(function: Any, path: str, error: Any) -> None:
    if isinstance(error[1], FileNotFoundError):
        return
    parent = os.path.dirname(path)
    os.chmod(parent, stat.S_IRWXU)
    if os.path.isdir(path) and not os.path.islink(path):
        os.chmod(path, stat.S_IRWXU)
        shutil.rmtree(path, onerror=_open_and_retry) if function is not os.rmdir else os.rmdir(path)
    elif os.path.lexists(path):
        os.unlink(path)


def open_directory(directory: Path) -> None:
    """Make the folder of all boxes. Where we are root, other users pass through it and see nothing.

    Raises:
        PermissionError: it is somebody else's.
    """
    directory.mkdir(parents=True, exist_ok=True)
    about = directory.stat()
    if about.st_uid != os.geteuid():
        raise PermissionError(f"{directory} belongs to user {about.st_uid}, not to this one ({os.geteuid()})")
    mode = 0o711 if os.geteuid() == 0 else 0o700
    if stat.S_IMODE(about.st_mode) != mode:
        directory.chmod(mode)


def box_ids(directory: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in directory.iterdir() if entry.is_dir())
    except FileNotFoundError:
        return []


def _known(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


@contextmanager
def free_uid(directory: Path) -> Iterator[int]:
    """A user number that no box has and no process runs under; it is taken once the box's record names it."""
    with (directory / ".uids").open("a+") as ledger:
        fcntl.flock(ledger, fcntl.LOCK_EX)
        taken = {record.uid for name in box_ids(directory) if (record := BoxFolder(directory, name).read())}
        ledger.seek(0)
        last = json.loads(ledger.read() or "0")
        for number in range(last + 1, last + 1 + UIDS):
            uid = FIRST_UID + number % UIDS
            if uid not in taken and not _known(uid) and not any(runs_as(one, uid) for one in every_process()):
                ledger.truncate(0)
                ledger.write(json.dumps(number % UIDS))
                ledger.flush()
                yield uid
                return
    raise RuntimeError(f"all {UIDS} user numbers for sandboxes are in use")
