"""Starting a local sandbox's keeper: in namespaces of its own under bubblewrap, or as a plain process."""

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from shared.contracts.sandbox import Network
from shared.errors import SandboxRefusedError
from shared.ports.sandbox import Runtime
from shared.sandbox.context import MODEL_PORT
from shared.sandbox.local.folder import BoxFolder
from shared.sandbox.local.processes import Process, every_process, has_argument, process

BUBBLEWRAP_TIMEOUT_S: Final = 20.0
CONNECTIONS_WAITING: Final = 128
RUNTIMES_DIR: Final = "/opt/paddock"
STATE_DIR: Final = "/run/paddock-state"
MODEL_DIR: Final = "/run/paddock-model"
HOME_DIR: Final = "/home/agent"
PROGRAM: Final = "paddock-supervisor"
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@cache
def bubblewrap_problem() -> str | None:
    """Why sandboxes cannot be isolated here; None when they can. Asked once."""
    if shutil.which("bwrap") is None:
        return "there is no bwrap command; on Debian `apt-get install bubblewrap`"
    probe = [
        "bwrap",
        "--ro-bind",
        "/",
        "/",
        "--unshare-pid",
        "--unshare-net",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "true",
    ]
    try:
        done = subprocess.run(
            probe, stdin=subprocess.DEVNULL, capture_output=True, timeout=BUBBLEWRAP_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"bwrap gave no answer in {BUBBLEWRAP_TIMEOUT_S:g} s"
    if done.returncode == 0:
        return None
    said = done.stderr.decode(errors="replace").strip()
    return (
        f"bwrap does not work here ({said}): user namespaces may be switched off, or this is a container without them"
    )


@dataclass(frozen=True, slots=True)
class KeeperPlan:
    """What a keeper is started with. `user` is the box's own where we are root."""

    folder: BoxFolder
    program: Path
    boot: str
    expires_at: float
    user: int | None
    isolated: bool
    network: Network
    env: Mapping[str, str]
    runtimes: Sequence[Runtime]
    model_socket: Path | None
    system_paths: Sequence[str]
    tmpfs: Mapping[str, str]

    def supervisor(self) -> str:
        """The supervisor's program as the box sees it."""
        return f"{RUNTIMES_DIR}/supervisor/{PROGRAM}" if self.isolated else str(self.folder.path / PROGRAM)

    def keep(self, listener: int) -> list[str]:
        words = [self.supervisor(), "keep", f"listen={listener}", f"boot={self.boot}", f"expires={self.expires_at:.0f}"]
        if self.user is not None:
            words += [f"uid={self.user}", f"gid={self.user}"]
        if self.model_socket is not None and self.isolated:
            words.append(f"relay={MODEL_PORT}:{MODEL_DIR}/{self.model_socket.name}")
        return words


def launch(plan: KeeperPlan) -> Process:
    """Start the keeper and return it; it listens on the control socket. Blocks for some milliseconds.

    Raises:
        SandboxRefusedError: it ended at once, with what it said.
    """
    told, telling = os.pipe()
    try:
        with _listener(plan.folder.control) as listener, plan.folder.log.open("wb") as log:
            keep = plan.keep(listener.fileno())
            around = _bubblewrap(plan, telling) if plan.isolated else []
            started = subprocess.run(
                [str(plan.program), "detach", *around, *keep],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd="/",
                env=dict(plan.env),
                pass_fds=[listener.fileno(), telling],
                check=True,
            )
        os.close(telling)
        telling = -1
        keeper = process(_inner_pid(told) if plan.isolated else int(started.stdout))
    finally:
        os.close(told)
        if telling >= 0:
            os.close(telling)
    if keeper is None or keeper.state() is None:
        said = plan.folder.said() or "it said nothing"
        raise SandboxRefusedError(f"The sandbox's first process ended at once: {said}")
    return keeper


def _inner_pid(told: int) -> int:
    """The keeper's pid as bubblewrap tells it; 0 when it ended without."""
    with os.fdopen(os.dup(told), "rb") as file:
        text = file.read()
    return int(json.loads(text)["child-pid"]) if text else 0


def keepers(boot: str) -> list[Process]:
    """All processes that were started to keep this box: the keeper, and bubblewrap around it."""
    return [one for one in every_process() if has_argument(one, f"boot={boot}".encode())]


@contextmanager
def _listener(control: Path) -> Iterator[socket.socket]:
    """The control socket. Bound through its folder's descriptor: a socket's path may have 107 bytes only."""
    folder = os.open(control.parent, os.O_PATH | os.O_DIRECTORY)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(f"/proc/self/fd/{folder}/{control.name}")
        finally:
            os.close(folder)
        control.chmod(0o600)
        listener.listen(CONNECTIONS_WAITING)
        yield listener


def _bubblewrap(plan: KeeperPlan, telling: int) -> list[str]:
    words = [str(shutil.which("bwrap")), "--as-pid-1", "--info-fd", str(telling)]
    words += ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--hostname", "sandbox"]
    if plan.network != "open":
        words.append("--unshare-net")
    if os.geteuid() == 0:
        # Its own user needs nothing; the keeper needs these two until it has become that user.
        words += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    words += ["--bind", str(plan.folder.root), "/"]
    for path in plan.system_paths:
        words += _shown(path)
    words += ["--ro-bind", str(plan.folder.path / "passwd"), "/etc/passwd"]
    words += ["--ro-bind", str(plan.folder.path / "group"), "/etc/group"]
    words += ["--proc", "/proc", "--dev", "/dev"]
    for path, options in plan.tmpfs.items():
        words += [*_tmpfs_options(path, options), "--tmpfs", path]
    words += ["--ro-bind", str(plan.program.parent), f"{RUNTIMES_DIR}/supervisor"]
    for runtime in plan.runtimes:
        words += ["--ro-bind", str(runtime.path), f"{RUNTIMES_DIR}/{runtime.name}"]
    if plan.model_socket is not None:
        words += ["--ro-bind", str(plan.model_socket.parent), MODEL_DIR]
    return [*words, "--chdir", "/", "--"]


def _shown(path: str) -> list[str]:
    """A path of the machine, read-only; a link such as /bin stays a link."""
    if os.path.islink(path):
        return ["--symlink", os.readlink(path), path]
    return ["--ro-bind", path, path] if os.path.exists(path) else []


def _tmpfs_options(path: str, options: str) -> list[str]:
    words = ["--perms", "1777"]
    for option in filter(None, options.split(",")):
        name, _, value = option.partition("=")
        if name == "mode":
            words = ["--perms", value]
        elif name == "size" and value.isdigit():
            words += ["--size", value]
        elif name not in {"rw", "exec"}:
            raise SandboxRefusedError(
                f"The local provider cannot mount a tmpfs with the option '{option}' at {path}; it knows mode and size"
                " in bytes."
            )
    return words
