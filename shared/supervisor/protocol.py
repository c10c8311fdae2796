"""The supervisor as its callers see it: command lines, exit statuses and the launch frame.

Pure: whoever has a sandbox runs these commands in it and gives the output to `shared/supervisor/receipt.py`. The other
side is `main.c` (commands) and `frame.c` (the frame).
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from shared.contracts.contract import Contract

MARKER = "PADDOCK_SUPERVISOR"
"""Variable in the environment of everything that a harness starts. A harness that filters the environment of its
tools must let it through: by it is found what has left the process tree."""

Survivors = Literal["drain", "keep_services", "keep_all"]
"""What becomes of what a harness leaves running; its own process group always goes. `keep_services`: detached
processes that hold a listening socket live on, with their detached ancestors and their own descendants."""


class ExitStatus(IntEnum):
    """Of the supervisor's commands. Any other status is the sandbox's or the provider's, not the supervisor's."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    FENCED = 3
    """A caller with a higher fence number was there before: this owner has lost the session."""
    UNPROVEN = 4
    """An answer was given, and it is no proof of a cleanup."""
    TAKEN = 5
    """`relay`: something listens on the port already."""


@dataclass(frozen=True, slots=True)
class Commands:
    """The command lines for one activation. `program` and `folder` are paths in the sandbox, `fence` is the number of
    the caller's lease. A provider's own time limit has to be longer than any `wait_s`."""

    program: str
    folder: str
    fence: int

    def prepare(self) -> list[str]:
        """Makes the folder, for its owner only. What the harness reads from stdin goes into the file `stdin` in it."""
        return self._on_folder("prepare")

    def run(self) -> list[str]:
        """Launches what the frame on stdin says, at most once; a repeated call answers how it stands."""
        return self._on_folder("run")

    def status(self) -> list[str]:
        return self._on_folder("status")

    def wait(self, wait_s: float) -> list[str]:
        return self._on_folder("wait", _ms(wait_s))

    def stop(self, wait_s: float, *, sweep: bool = False) -> list[str]:
        """Ends it, or sees to it that it never starts. With `sweep` also what a killed supervisor has left behind."""
        return self._on_folder("stop", _ms(wait_s), *(["sweep"] if sweep else []))

    def sweep(self) -> list[str]:
        """Kills what carries the marker, survivors included; does nothing while a supervisor lives."""
        return self._on_folder("sweep")

    def verify(self) -> list[str]:
        """Looks whether anything is left beside the receipt's survivors and what they started."""
        return self._on_folder("verify")

    def remove(self) -> list[str]:
        return self._on_folder("remove")

    def put(self, path: str, *, mode: int, size: int, owner: tuple[int, int] | None = None) -> list[str]:
        """Exactly `size` bytes from stdin into a file; a shorter input leaves the old file as it was."""
        words = ["put", path, f"{mode:o}", str(size), *([f"{owner[0]}:{owner[1]}"] if owner else [])]
        return self._fenced(words)

    def get(self, path: str, *, offset: int = 0, length: int | None = None) -> list[str]:
        """A regular file, or a part of it, to stdout. Whole only with exit status 0."""
        return self._fenced(["get", path, str(offset), *([] if length is None else [str(length)])])

    def _on_folder(self, command: str, *more: str) -> list[str]:
        return [self.program, command, self.folder, str(self.fence), *more]

    def _fenced(self, words: list[str]) -> list[str]:
        return [self.program, "fenced", self.folder, str(self.fence), *words]


def init_command(program: str) -> list[str]:
    """PID 1 of a sandbox."""
    return [program, "init"]


def relay_command(program: str, port: int, socket: str, *, detach: bool = True) -> list[str]:
    """127.0.0.1:`port` in the sandbox to a Unix socket. Detached, the command ends once the relay listens."""
    return [program, "relay", str(port), socket, *(["detach"] if detach else [])]


def new_key() -> bytes:
    """What one activation's receipt is signed with."""
    return secrets.token_bytes(32)


class LaunchRequest(Contract):
    """What is launched. Goes over stdin, so that nothing of it stands on a command line.

    `activation_id` stands in the receipt. Without `cwd` the harness works where the command was started. `user` is
    (uid, gid); only root may set it. `oom_score_adj` above 0 lets the kernel kill the harness before its supervisor.
    Of each output the first `head_bytes` and the last `tail_bytes` are kept.
    """

    activation_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]
    command: Annotated[tuple[str, ...], Field(min_length=1)]
    env: Mapping[str, str] = {}
    inherit_environment: bool = True
    cwd: Annotated[str, Field(pattern=r"^/")] | None = None
    user: tuple[int, int] | None = None
    groups: Annotated[tuple[int, ...], Field(max_length=64)] = ()
    deadline_s: Annotated[float, Field(gt=0, lt=1e9)] | None = None
    grace_s: Annotated[float, Field(ge=0, lt=1e9)] = 5.0
    kill_s: Annotated[float, Field(gt=0, lt=1e9)] = 10.0
    survivors: Survivors = "drain"
    head_bytes: Annotated[int, Field(ge=0, lt=2**63)] = 64 << 20
    tail_bytes: Annotated[int, Field(ge=0, le=64 << 20)] = 1 << 20
    oom_score_adj: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    no_new_privileges: bool = False

    @model_validator(mode="after")
    def _can_be_told(self) -> Self:
        if not self.command[0]:
            raise ValueError("the command names no program")
        if any(not name or "=" in name for name in self.env):
            raise ValueError("the name of a variable is not empty and holds no '='")
        if any("\0" in text for text in (*self.command, *self.env, *self.env.values(), self.cwd or "")):
            raise ValueError("arguments and variables hold no zero bytes")
        return self

    def frame(self, key: bytes | None) -> bytes:
        """The bytes for the stdin of `run`; without a `key` of 32 bytes the receipt is not signed."""
        fields = [("paddock-run", "1"), ("id", self.activation_id), ("survivors", self.survivors)]
        fields += [("key", key.hex())] if key else []
        fields += [("cwd", self.cwd)] if self.cwd else []
        fields += [("user", f"{self.user[0]}:{self.user[1]}")] if self.user else []
        fields += [("group", str(group)) for group in self.groups]
        fields += [("deadline_ms", _ms(self.deadline_s))] if self.deadline_s else []
        fields += [("oom_score_adj", str(self.oom_score_adj))] if self.oom_score_adj is not None else []
        fields += [("grace_ms", _ms(self.grace_s)), ("kill_ms", _ms(self.kill_s))]
        fields += [("head_bytes", str(self.head_bytes)), ("tail_bytes", str(self.tail_bytes))]
        fields += [("inherit_environment", str(int(self.inherit_environment)))]
        fields += [("no_new_privileges", str(int(self.no_new_privileges)))]
        fields += [("env", f"{name}={value}") for name, value in self.env.items()]
        fields += [("arg", argument) for argument in self.command]
        return b"".join(f"{name}={value}\0".encode(errors="surrogateescape") for name, value in fields) + b"\0"


def _ms(seconds: float) -> str:
    """At least 1: a 0 would mean no deadline."""
    return str(max(1, round(seconds * 1000))) if seconds else "0"
