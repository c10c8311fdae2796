"""How a sandbox is lent: a connection that another process can attach to, and the work folder in it."""

from typing import Annotated, Any, Literal

from pydantic import Field

from shared.contracts.contract import Contract


class SandboxConnection(Contract):
    """`descriptor` is what the provider's `attach` needs; only kind `direct` exists."""

    kind: Literal["direct"]
    provider: Annotated[str, Field(min_length=1)]
    descriptor: dict[str, Any]


class SandboxAccess(Contract):
    connection: SandboxConnection
    workdir: Annotated[str, Field(pattern=r"^/")]
