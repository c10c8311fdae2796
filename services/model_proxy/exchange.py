"""One model call from end to end: ask the upstream, relay its answer, record the call, release the end.

The call is the ASGI response itself, so that one watch on the caller's connection covers every phase. An
upstream's error goes out as it came; the caller's status is decided by the upstream's first bytes; the
record stands in the capture before the last bytes leave.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.model_proxy.access import Caller
from services.model_proxy.capture import Captures
from services.model_proxy.client_watch import ClientWatch
from services.model_proxy.completion import one_event
from services.model_proxy.conversation import Answer, Conversation, Failure, Relay
from services.model_proxy.failures import (
    ClientGoneError,
    CutError,
    ModelCallError,
    category_of,
    render_call_error,
    sealed,
    unreached,
    unusable,
)
from services.model_proxy.models import ServedModel
from services.model_proxy.record import Record
from services.model_proxy.sse_reply import SseReply
from services.model_proxy.under_way import UnderWay
from shared.contracts.capture import ErrorCategory
from shared.deadline import Deadline
from shared.http.problems import JSON_TYPE, excerpt, retry_after_s
from shared.ports.upstream import UpstreamCall, UpstreamError, UpstreamReply
from shared.telemetry import Metrics

_log = logging.getLogger(__name__)

# Everything else of an upstream's head stays here: hop-by-hop headers, cookies, `openai-model`.
_PASSED_HEADERS: Final = ("content-type", "retry-after", "retry-after-ms", "x-request-id", "request-id")
# Some versions of the Codex CLI die on their first 429, so what an upstream itself asks to be repeated is
# repeated here for it, within this time.
_REPEAT_BUDGET_S: Final = {"codex": 30.0}
_REPEATABLE: Final = frozenset({429, 503})
# For servers that ask for a repetition at once, again and again.
_SHORTEST_WAIT_S: Final = 0.5
# After the final event the upstream's end mark usually follows at once; then its connection can be used again.
_DRAIN_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What is sent once the call is recorded. Without a status it is the end of a stream that has begun."""

    body: bytes
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Desk:
    """What all calls of a process share."""

    captures: Captures
    metrics: Metrics
    under_way: UnderWay


class Exchange(Response):
    """See the module's docstring. It is made for one call and awaited once."""

    def __init__(
        self, desk: Desk, caller: Caller, model: ServedModel, conversation: Conversation, record: Record
    ) -> None:
        # Not the base class's initialiser: what it prepares is decided by the call itself.
        self.background = None
        self._desk = desk
        self._caller = caller
        self._model = model
        self._conversation = conversation
        self._record = record
        self._stream: bool = record.facts["stream"]
        self._relay: Relay | None = None
        self._reply: UpstreamReply | None = None
        self._chunks: AsyncIterator[bytes] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = ClientWatch(receive)
        out = SseReply(send)
        self._desk.under_way.enter(self._caller, watch)
        try:
            outgoing = await self._watched(watch, out)
            # The end's number is given: a heartbeat now would come out of turn.
            out.stop_heartbeats()
            await self._recorded(outgoing, out)
            self._desk.under_way.leave(watch)
            if outgoing is not None:
                await self._released(outgoing, out, send)
        finally:
            self._desk.under_way.leave(watch)
            out.stop_heartbeats()
            if self._reply is not None:
                await self._reply.close()

    async def _watched(self, watch: ClientWatch, out: SseReply) -> Outgoing | None:
        """The call until its last bytes are known; null when there is nobody left to send them to."""
        try:
            async with watch:
                return await self._outcome(out)
        except ClientGoneError:
            self._keep_partial()
            self._record.fail(ErrorCategory.CANCELLED, None, "The caller closed its connection.")
            _log.info("model call cancelled: the caller has gone", extra={"model": self._model.name})
            return None
        except CutError:
            return self._failed(out, sealed(self._caller.key))
        except asyncio.CancelledError:
            # The process is stopping; the request's task has nothing to do after this call.
            return self._failed(
                out, ModelCallError("The model proxy is shutting down.", status=503, code="server_shutdown")
            )
        except Exception as error:  # noqa: BLE001 - a fault of ours may neither end a stream silently nor go unrecorded
            _log.error("unexpected error in a model call", exc_info=error)
            told = f"Unexpected {type(error).__name__} in the model proxy; its log has the details."
            return self._failed(out, ModelCallError(told, status=500, code="internal_error"))

    async def _outcome(self, out: SseReply) -> Outgoing:
        try:
            self._reply = reply = await self._asked()
            if 300 <= reply.status < 400:
                raise unusable(
                    f"The server of model '{self._model.name}' answered {reply.status}: a redirect.", "redirect"
                )
            if not 200 <= reply.status < 300:
                return await self._passed_on(reply)
            if self._stream:
                return await self._streamed(reply, out)
            self._note_first_byte()
            answer = self._conversation.whole(await reply.read())
            self._record.take(answer)
            return self._whole(answer, reply)
        except UpstreamError as error:
            return self._failed(out, unreached(error, self._model.name))
        except ModelCallError as error:
            return self._failed(out, error)

    async def _asked(self) -> UpstreamReply:
        """Send, and again where the caller's profile has it so and the upstream asks for it in time."""
        budget = Deadline.after(_REPEAT_BUDGET_S.get(self._caller.profile.name, 0.0))
        call = UpstreamCall(self._caller.key, self._conversation.body, self._stream, self._conversation.exact)
        statuses, name, facts = self._desk.metrics.upstream_statuses, self._model.name, self._record.facts
        while True:
            try:
                reply = await self._model.upstream.send(call)
            except UpstreamError as error:
                facts["attempts"] += error.attempts
                statuses.labels(name, "none").inc()
                raise
            facts["attempts"] += reply.attempts
            facts["upstream_status"] = reply.status
            statuses.labels(name, str(reply.status)).inc()
            asked_s = retry_after_s(reply.headers.get("retry-after")) if reply.status in _REPEATABLE else None
            if asked_s is None or asked_s >= budget.left_s:
                return reply
            await reply.close()
            await asyncio.sleep(max(asked_s, _SHORTEST_WAIT_S))

    async def _passed_on(self, reply: UpstreamReply) -> Outgoing:
        """The upstream's error, as it came."""
        self._note_first_byte()
        body = await reply.read()
        text, code = excerpt(body), _error_code(body)
        if 400 <= reply.status < 500 and self._model.capabilities.overflows(code, text):
            # Servers say it in many ways; whoever reads the capture need not know them.
            code = "context_length_exceeded"
        self._record.fail(category_of(reply.status), code, text)
        _log.warning(
            "upstream answered with an error",
            extra={"model": self._model.name, "status": reply.status, "code": code},
        )
        return Outgoing(body, reply.status, self._passed_headers(reply))

    async def _streamed(self, reply: UpstreamReply, out: SseReply) -> Outgoing:
        self._relay = relay = self._conversation.relay()
        headers = self._passed_headers(reply)
        headers.pop("content-type", None)
        out.open(headers, relay.heartbeat, self._model.settings.heartbeat_s)
        chunks = reply.chunks()
        if JSON_TYPE in reply.headers.get("content-type", ""):
            chunks = one_event(await reply.read(), self._model.name)
        self._chunks = chunks
        try:
            async for chunk in chunks:
                self._note_first_byte()
                await self._forwarded(relay.feed(chunk), relay, out)
                if relay.final is not None:
                    break
            else:
                await self._forwarded(relay.end(), relay, out)
        except UpstreamError as error:
            if not out.committed:
                raise
            broken = unreached(error, self._model.name)
            category = broken.category if broken.status == 504 else ErrorCategory.TRUNCATED_STREAM
            relay.fail(Failure(broken.code, broken.message, category))
        return self._end_of(relay)

    async def _forwarded(self, data: bytes, relay: Relay, out: SseReply) -> None:
        """
        Raises:
            ModelCallError: the first that came is an error, and the caller can still be given its status.
        """
        if relay.failure is not None and relay.final is None:
            if not out.committed:
                raise unusable(relay.failure.message, relay.failure.code)
            relay.fail(relay.failure)
        await out.write(data)

    def _end_of(self, relay: Relay) -> Outgoing:
        self._record.take(relay.answer())
        if relay.failure is not None:
            self._record.fail(relay.failure.category, relay.failure.code, relay.failure.message)
            _log.warning("model stream failed", extra={"model": self._model.name, "code": relay.failure.code})
        return Outgoing(relay.final or b"")

    def _failed(self, out: SseReply, error: ModelCallError) -> Outgoing:
        """A failure of ours: an HTTP error while the status is open, else the dialect's final event."""
        if out.committed and self._relay is not None:
            self._relay.fail(Failure(error.code, error.message, error.category))
            return self._end_of(self._relay)
        self._record.fail_with(error)
        _log.warning("model call failed", extra={"model": self._model.name, "code": error.code})
        problem = render_call_error(error, self._record.facts["dialect"])
        return Outgoing(problem.body, problem.status, problem.headers)

    def _whole(self, answer: Answer, reply: UpstreamReply) -> Outgoing:
        headers = self._passed_headers(reply)
        headers.setdefault("content-type", JSON_TYPE)
        return Outgoing(answer.body, 200, headers)

    def _passed_headers(self, reply: UpstreamReply) -> dict[str, str]:
        given = reply.headers
        return {name: given[name] for name in _PASSED_HEADERS if name in given}

    def _note_first_byte(self) -> None:
        self._record.facts.setdefault("first_byte_at", time.time())

    def _keep_partial(self) -> None:
        if self._relay is not None and self._relay.opened:
            self._record.take(self._relay.answer())

    async def _recorded(self, outgoing: Outgoing | None, out: SseReply) -> None:
        record = self._record
        record.facts["status"] = 200 if out.committed else None
        if outgoing is not None:
            record.facts["status"] = outgoing.status or 200
        record.facts["ended_at"] = time.time()
        await self._desk.captures.append(self._caller.key, record.facts, record.request, record.response)

    async def _released(self, outgoing: Outgoing, out: SseReply, send: Send) -> None:
        if outgoing.status is None:
            await out.write(outgoing.body, more=False)
            await self._drained()
            return
        await send_whole(send, outgoing.body, outgoing.status, outgoing.headers)

    async def _drained(self) -> None:
        """Read the upstream's end mark, so that its connection can be used again."""
        if self._chunks is None:
            return
        try:
            async with asyncio.timeout(_DRAIN_S):
                async for _ in self._chunks:
                    pass
        except (TimeoutError, UpstreamError):
            _log.debug("upstream kept its connection open after the final event", extra={"model": self._model.name})


async def send_whole(send: Send, body: bytes, status: int, headers: Mapping[str, str]) -> None:
    pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    pairs.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


def _error_code(body: bytes) -> str | None:
    """The code in an upstream's error body, where it has OpenAI's form."""
    try:
        error = orjson.loads(body).get("error")
        code = error.get("code")
    except (AttributeError, orjson.JSONDecodeError):
        return None
    return None if code is None else str(code)
