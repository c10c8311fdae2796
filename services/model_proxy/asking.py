"""The upstream's side of a call: sent, repeated where both sides want it so, and its errors passed on as they came."""

import asyncio
import logging
from typing import Final

import orjson

from services.model_proxy.bridge.capabilities import Profile
from services.model_proxy.failures import category_of
from services.model_proxy.models import ServedModel
from services.model_proxy.outgoing import Outgoing
from services.model_proxy.record import Record
from shared.deadline import Deadline
from shared.http.problems import excerpt, retry_after_s
from shared.metrics import Metrics
from shared.ports.upstream import UpstreamCall, UpstreamError, UpstreamReply

_log = logging.getLogger(__name__)

# Everything else of an upstream's head stays here: hop-by-hop headers, cookies, `openai-model`.
_PASSED_HEADERS: Final = ("content-type", "retry-after", "retry-after-ms", "x-request-id", "request-id")
# Some versions of the Codex CLI die on their first 429, so what an upstream itself asks to be repeated is
# repeated here for it, within this time.
_REPEAT_BUDGET_S: Final = {"codex": 30.0}
_REPEATABLE: Final = frozenset({429, 503})
# For servers that ask for a repetition at once, again and again.
_SHORTEST_WAIT_S: Final = 0.5


async def ask(
    call: UpstreamCall, model: ServedModel, profile: Profile, record: Record, metrics: Metrics
) -> UpstreamReply:
    """Send, and again where the caller's profile has it so and the upstream asks for it in time.

    Raises:
        UpstreamError: there is no answer.
    """
    budget = Deadline.after(_REPEAT_BUDGET_S.get(profile.name, 0.0))
    statuses, facts = metrics.upstream_statuses, record.facts
    while True:
        try:
            reply = await model.upstream.send(call)
        except UpstreamError as error:
            facts["attempts"] += error.attempts
            statuses.labels(model.name, "none").inc()
            raise
        facts["attempts"] += reply.attempts
        facts["upstream_status"] = reply.status
        statuses.labels(model.name, str(reply.status)).inc()
        asked_s = retry_after_s(reply.headers.get("retry-after")) if reply.status in _REPEATABLE else None
        if asked_s is None or asked_s >= budget.left_s:
            return reply
        await reply.close()
        await asyncio.sleep(max(asked_s, _SHORTEST_WAIT_S))


async def passed_on(reply: UpstreamReply, model: ServedModel, record: Record) -> Outgoing:
    """The upstream's error, as it came."""
    record.note_first_byte()
    body = await reply.read()
    text, code = excerpt(body), _error_code(body)
    if 400 <= reply.status < 500 and model.capabilities.overflows(code, text):
        # Servers say it in many ways; whoever reads the capture need not know them.
        code = "context_length_exceeded"
    record.fail(category_of(reply.status), code, text)
    _log.warning(
        "upstream answered with an error",
        extra={"model": model.name, "status": reply.status, "code": code},
    )
    return Outgoing(body, reply.status, passed_headers(reply))


def passed_headers(reply: UpstreamReply) -> dict[str, str]:
    given = reply.headers
    return {name: given[name] for name in _PASSED_HEADERS if name in given}


def _error_code(body: bytes) -> str | None:
    """The code in an upstream's error body, where it has OpenAI's form."""
    try:
        error = orjson.loads(body).get("error")
        code = error.get("code")
    except (AttributeError, orjson.JSONDecodeError):
        return None
    return None if code is None else str(code)
