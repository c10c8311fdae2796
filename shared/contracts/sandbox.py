"""How a sandbox is lent: a connection that another process can attach to, and the work folder in it."""

from typing import Annotated, Any, Literal

from pydantic import Field

from shared.contracts.contract import Contract

Network = Literal["none", "proxy", "open"]
"""`proxy`: the model proxy is reachable and nothing else is."""


class SandboxConnection(Contract):
    """`descriptor` is what the provider's `attach` needs; only kind `direct` exists."""

    kind: Literal["direct"]
    provider: Annotated[str, Field(min_length=1)]
    descriptor: dict[str, Any]


class SandboxAccess(Contract):
    connection: SandboxConnection
    workdir: Annotated[str, Field(pattern=r"^/")]


class SandboxLabels(Contract):
    """Whose a sandbox is. They are set in the call that makes it, so that it can be found whatever happens next.

    `created_at` and `expires_at` are Unix seconds; after `expires_at` anyone may remove it.
    """

    mesh: Annotated[str, Field(min_length=1)]
    service: Annotated[str, Field(min_length=1)]
    session: Annotated[str, Field(min_length=1)]
    created_at: float
    expires_at: float


class SandboxPlace(Contract):
    """What a sandbox is like inside. Paths are as a command in it sees them.

    `uid` and `gid` are those that commands run under. `state_dir` is a folder that any of its users may write to
    and that is no tmpfs. `supervisor` is the supervisor's program. `model_base_url` is where the model proxy is
    reached from inside, without a path; null where it is not.
    """

    workdir: Annotated[str, Field(pattern=r"^/")]
    home: str
    temporary: str
    state_dir: str
    supervisor: str
    uid: int
    gid: int
    model_base_url: str | None = None
