"""Making a local sandbox: folder, user, private root, keeper. Blocks; callers use a thread."""

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shared.contracts.sandbox import Network, SandboxLabels, SandboxPlace
from shared.errors import SandboxRefusedError
from shared.ports.sandbox import Runtime
from shared.sandbox.context import MODEL_PORT, TRUSTING_GIT
from shared.sandbox.local.box import LocalDescriptor
from shared.sandbox.local.folder import BoxFolder, BoxRecord, free_uid
from shared.sandbox.local.launch import (
    HOME_DIR,
    MODEL_DIR,
    PATH,
    PROGRAM,
    RUNTIMES_DIR,
    STATE_DIR,
    KeeperPlan,
    launch,
)
from shared.sandbox.local.removal import BOX_VARIABLE

WORK_DIR: Final = "/work"
_TEMPORARY_DIR: Final = "/tmp"


@dataclass(frozen=True, slots=True)
class LocalRequest:
    """What is asked for, with everything decided that the configuration decides."""

    id: str
    labels: SandboxLabels
    directory: Path
    program: Path
    isolated: bool
    network: Network
    workdir: str | None
    env: Mapping[str, str]
    tmpfs: Mapping[str, str]
    runtimes: Sequence[Runtime]
    model_socket: Path | None
    model_url: str | None
    system_paths: Sequence[str]


def make_box(request: LocalRequest) -> LocalDescriptor:
    """Make it and start its keeper.

    Raises:
        SandboxRefusedError: it cannot be as it was asked for.
    """
    folder = BoxFolder(request.directory, request.id)
    own_user = free_uid(request.directory) if os.geteuid() == 0 else nullcontext(None)
    with own_user as uid:
        folder.path.mkdir(mode=0o711 if uid is not None else 0o700)
        folder.write(BoxRecord(labels=request.labels, isolated=request.isolated, uid=uid))
    place = _place(request, folder, uid)
    _furnish(request, folder, place, uid)
    keeper = launch(_plan(request, folder, place, uid))
    folder.write(
        BoxRecord(labels=request.labels, isolated=request.isolated, uid=uid, pid=keeper.pid, start=keeper.start)
    )
    return LocalDescriptor(
        id=request.id,
        directory=str(request.directory),
        boot=request.id,
        pid=keeper.pid,
        start=keeper.start,
        place=place,
        env={},
        runtimes={runtime.name: _runtime_path(request, runtime) for runtime in request.runtimes},
    )


def _place(request: LocalRequest, folder: BoxFolder, uid: int | None) -> SandboxPlace:
    """Under bubblewrap paths are the box's own; without it they are those of its folder."""
    root = "" if request.isolated else str(folder.root)
    supervisor = f"{RUNTIMES_DIR}/supervisor/{PROGRAM}" if request.isolated else str(folder.path / PROGRAM)
    return SandboxPlace(
        workdir=request.workdir or f"{root}{WORK_DIR}",
        home=f"{root}{HOME_DIR}",
        temporary=f"{root}{_TEMPORARY_DIR}",
        state_dir=f"{root}{STATE_DIR}",
        supervisor=supervisor,
        uid=os.geteuid() if uid is None else uid,
        gid=os.getegid() if uid is None else uid,
        model_base_url=_model_base_url(request),
    )


def _model_base_url(request: LocalRequest) -> str | None:
    if request.network == "none":
        return None
    relayed = request.isolated and request.model_socket is not None and request.network == "proxy"
    return f"http://127.0.0.1:{MODEL_PORT}" if relayed else request.model_url


def _furnish(request: LocalRequest, folder: BoxFolder, place: SandboxPlace, uid: int | None) -> None:
    for path in ("", WORK_DIR, HOME_DIR, _TEMPORARY_DIR, STATE_DIR):
        _own(folder.root / path.lstrip("/"), folder.root, uid)
    if request.isolated:
        # bubblewrap would make these closed to everyone but its own user.
        mounted = [f"{RUNTIMES_DIR}/supervisor", *(f"{RUNTIMES_DIR}/{runtime.name}" for runtime in request.runtimes)]
        for path in (place.workdir, MODEL_DIR, *mounted, *request.tmpfs, *request.system_paths):
            _own(folder.root / str(Path(path).parent).lstrip("/"), folder.root, uid)
        _own(folder.root / place.workdir.lstrip("/"), folder.root, uid)
        (folder.path / "passwd").write_text(_passwd(place), encoding="utf-8")
        (folder.path / "group").write_text(f"root:x:0:\nagent:x:{place.gid}:\n", encoding="utf-8")
    else:
        shutil.copy2(request.program, folder.path / PROGRAM)
        for runtime in request.runtimes:
            _check_reachable(runtime, uid)
    (folder.root / _TEMPORARY_DIR.lstrip("/")).chmod(0o1777)


def _own(path: Path, root: Path, uid: int | None) -> None:
    """Make a folder and what is missing above it, all of it the box's user's."""
    missing = [one for one in (path, *path.parents) if not one.exists() and (one == root or root in one.parents)]
    for one in reversed(missing):
        one.mkdir(mode=0o755)
        if uid is not None:
            os.chown(one, uid, uid)


def _passwd(place: SandboxPlace) -> str:
    return f"root:x:0:0:root:/root:/bin/sh\nagent:x:{place.uid}:{place.gid}:agent:{place.home}:/bin/sh\n"


def _check_reachable(runtime: Runtime, uid: int | None) -> None:
    """Another user has to get through all folders above a runtime that cannot be mounted elsewhere."""
    closed = [folder for folder in runtime.path.absolute().parents if not folder.stat().st_mode & 0o001]
    if uid is not None and closed:
        raise SandboxRefusedError(
            f"Without bubblewrap the runtime '{runtime.name}' is used where it lies, and {closed[-1]} is closed to"
            " other users: choose a `state_dir` elsewhere, or install bubblewrap."
        )


def _runtime_path(request: LocalRequest, runtime: Runtime) -> str:
    return f"{RUNTIMES_DIR}/{runtime.name}" if request.isolated else str(runtime.path.absolute())


def _plan(request: LocalRequest, folder: BoxFolder, place: SandboxPlace, uid: int | None) -> KeeperPlan:
    env = {
        "PATH": PATH,
        "HOME": place.home,
        "TMPDIR": place.temporary,
        "USER": "agent",
        "LOGNAME": "agent",
        "LANG": "C.UTF-8",
        **TRUSTING_GIT,
        **request.env,
        BOX_VARIABLE: request.id,
    }
    return KeeperPlan(
        folder=folder,
        program=request.program,
        boot=request.id,
        expires_at=request.labels.expires_at,
        user=uid,
        isolated=request.isolated,
        network=request.network,
        env=env,
        runtimes=request.runtimes,
        model_socket=request.model_socket if request.network == "proxy" else None,
        system_paths=request.system_paths,
        tmpfs=request.tmpfs,
    )
