"""Who serves a model: a module in `services/model_proxy/upstreams/` with `create`."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

UpstreamDialect = Literal["chat_completions", "responses"]


@dataclass(frozen=True, slots=True)
class UpstreamCall:
    """One request to an upstream, in the upstream's own dialect; `key` gives affinity among base URLs.

    `exact` holds the caller's own bytes where nothing in them had to be changed.
    """

    key: str
    body: dict[str, Any]
    stream: bool
    exact: bytes | None = None


class UpstreamReply(Protocol):
    """An answer whose status and headers are known. Exactly one of `read` and `chunks` is used."""

    status: int
    headers: dict[str, str]
    attempts: int

    async def read(self) -> bytes:
        """The whole body.

        Raises:
            UpstreamBrokenError: the connection ended before the body did.
            UpstreamTimeoutError: no further byte came in time.
        """

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives; raises as `read`."""

    async def close(self) -> None:
        """Let the connection go; a body not read to its end ends it at the upstream, too. Idempotent."""


class Upstream(Protocol):
    """One configured model's server."""

    dialect: UpstreamDialect

    async def send(self, call: UpstreamCall) -> UpstreamReply:
        """Send and wait for status and headers.

        Raises:
            UpstreamUnreachableError, UpstreamTimeoutError, UpstreamBrokenError: see their docstrings.
        """

    async def close(self) -> None: ...


class UpstreamError(Exception):
    """Base of what goes wrong between the proxy and an upstream; `attempts` counts how often it was tried."""

    attempts: int = 1


class UpstreamUnreachableError(UpstreamError):
    """No connection could be made; nothing was sent."""


class UpstreamTimeoutError(UpstreamError):
    """No byte came in time."""


class UpstreamBrokenError(UpstreamError):
    """The connection ended in the middle."""
