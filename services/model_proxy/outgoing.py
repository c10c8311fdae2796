"""What goes out to the caller once a call is recorded."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.types import Send

from services.model_proxy.failures import render_call_error
from shared.contracts.capture import Dialect
from shared.errors import PaddockError


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Without a status it is the end of a stream that has begun."""

    body: bytes
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def outgoing_error(error: PaddockError, dialect: Dialect) -> Outgoing:
    problem = render_call_error(error, dialect)
    return Outgoing(problem.body, problem.status, problem.headers)


async def send_whole(send: Send, outgoing: Outgoing) -> None:
    """Send an answer that is not a stream."""
    pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in outgoing.headers.items()]
    pairs.append((b"content-length", b"%d" % len(outgoing.body)))
    await send({"type": "http.response.start", "status": outgoing.status, "headers": pairs})
    await send({"type": "http.response.body", "body": outgoing.body})
