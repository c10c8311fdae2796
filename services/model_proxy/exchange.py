"""One model call from end to end: write down that it begins, ask the upstream, relay its answer, record it,
release the end.

The call is the ASGI response itself, so that one watch on the caller's connection covers every phase. An
upstream's error goes out as it came; the caller's status is decided by the upstream's first bytes; the
record stands in the capture before the last bytes leave, and an answer without a record does not go out.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.model_proxy.access import Caller
from services.model_proxy.admission import admit
from services.model_proxy.asking import ask, passed_headers, passed_on
from services.model_proxy.capture import Captures
from services.model_proxy.client_watch import ClientWatch
from services.model_proxy.completion import one_event
from services.model_proxy.conversation import Answer, Conversation, Failure, Relay
from services.model_proxy.failures import (
    ClientGoneError,
    CutError,
    ModelCallError,
    stopping,
    unreached,
    unrecorded,
    unusable,
)
from services.model_proxy.measured import measured
from services.model_proxy.models import ServedModel
from services.model_proxy.outgoing import Outgoing, outgoing_error, send_whole
from services.model_proxy.record import Record
from services.model_proxy.sse_reply import SseReply
from services.model_proxy.under_way import UnderWay
from shared.contracts.capture import ErrorCategory
from shared.errors import PaddockError, StoreUnavailableError
from shared.http.problems import JSON_TYPE
from shared.metrics import Metrics
from shared.ports.upstream import UpstreamCall, UpstreamError, UpstreamReply

_log = logging.getLogger(__name__)

# After the final event the upstream's end mark usually follows at once; then its connection can be used again.
_DRAIN_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Desk:
    """What all calls of a process share."""

    captures: Captures
    metrics: Metrics
    under_way: UnderWay


@dataclass(frozen=True, slots=True)
class Prepared:
    """Which model is called, and how its server and the caller understand each other."""

    model: ServedModel
    conversation: Conversation


class Exchange(Response):
    """See the module's docstring. It is made for one call and awaited once.

    `prepare` is called when the call is admitted; it raises `ModelCallError` for a call that cannot be made, and
    another `PaddockError` for one that its caller may not make.
    """

    def __init__(self, desk: Desk, caller: Caller, record: Record, prepare: Callable[[], Prepared]) -> None:
        # Not the base class's initialiser: what it prepares is decided by the call itself.
        self.background = None
        self._desk = desk
        self._caller = caller
        self._record = record
        self._prepare = prepare
        self._void = True
        self._relay: Relay | None = None
        self._reply: UpstreamReply | None = None
        self._chunks: AsyncIterator[bytes] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with measured(self._record, self._desk.metrics):
            await self._made(receive, send)

    async def _made(self, receive: Receive, send: Send) -> None:
        watch = ClientWatch(receive)
        out = SseReply(send)
        self._desk.under_way.enter(self._caller, watch)
        try:
            outgoing = await self._watched(watch, out)
            # The end's number is given: a heartbeat now would come out of turn.
            out.stop_heartbeats()
            if not self._void:
                outgoing = await self._recorded(outgoing, out)
            if outgoing is not None:
                await self._released(outgoing, out, send)
            if self._void and self._record.begun:
                await self._made_void()
        finally:
            self._desk.under_way.leave(self._caller, watch)
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
            _log.info("model call cancelled: the caller has gone", extra={"model": self._model_name})
            return None
        except CutError as cut:
            return self._failed(out, cut.error)
        except asyncio.CancelledError:
            # The process is stopping; the request's task has nothing to do after this call.
            return self._failed(out, stopping())
        except Exception as error:  # noqa: BLE001 - a fault of ours may neither end a stream silently nor go unrecorded
            _log.error("unexpected error in a model call", exc_info=error)
            told = f"Unexpected {type(error).__name__} in the model proxy; its log has the details."
            return self._failed(out, ModelCallError(told, status=500, code="internal_error"))

    async def _outcome(self, out: SseReply) -> Outgoing:
        try:
            await admit(self._desk.captures, self._caller, self._record)
            self._void = False
            prepared = self._prepare()
            self._record.take_conversation(prepared.conversation)
            return await self._answered(prepared.model, prepared.conversation, out)
        except UpstreamError as error:
            return self._failed(out, unreached(error, self._model_name))
        except ModelCallError as error:
            return self._failed(out, error)
        except PaddockError as error:
            self._void = True
            return outgoing_error(error, self._record.facts["dialect"])

    async def _answered(self, model: ServedModel, conversation: Conversation, out: SseReply) -> Outgoing:
        stream: bool = self._record.facts["stream"]
        call = UpstreamCall(self._caller.key, conversation.body, stream, conversation.exact)
        self._reply = reply = await ask(call, model, self._caller.profile, self._record, self._desk.metrics)
        if 300 <= reply.status < 400:
            raise unusable(f"The server of model '{model.name}' answered {reply.status}: a redirect.", "redirect")
        if not 200 <= reply.status < 300:
            return await passed_on(reply, model, self._record)
        if stream:
            return await self._streamed(reply, conversation.relay(), model, out)
        self._record.note_first_byte()
        answer = conversation.whole(await reply.read())
        self._record.take(answer)
        return _whole(answer, reply)

    async def _streamed(self, reply: UpstreamReply, relay: Relay, model: ServedModel, out: SseReply) -> Outgoing:
        self._relay = relay
        headers = passed_headers(reply)
        headers.pop("content-type", None)
        out.open(headers, relay.heartbeat, model.settings.heartbeat_s)
        chunks = reply.chunks()
        if JSON_TYPE in reply.headers.get("content-type", ""):
            chunks = one_event(await reply.read(), model.name)
        self._chunks = chunks
        try:
            async for chunk in chunks:
                self._record.note_first_byte()
                await self._forwarded(relay.feed(chunk), relay, out)
                if relay.final is not None:
                    break
            else:
                await self._forwarded(relay.end(), relay, out)
        except UpstreamError as error:
            if not out.committed:
                raise
            broken = unreached(error, model.name)
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
            _log.warning("model stream failed", extra={"model": self._model_name, "code": relay.failure.code})
        return Outgoing(relay.final or b"")

    def _failed(self, out: SseReply, error: ModelCallError) -> Outgoing:
        """A failure of ours: an HTTP error while the status is open, else the dialect's final event."""
        if out.committed and self._relay is not None:
            self._relay.fail(Failure(error.code, error.message, error.category))
            return self._end_of(self._relay)
        self._record.fail_with(error)
        _log.warning("model call failed", extra={"model": self._model_name, "code": error.code})
        return outgoing_error(error, self._record.facts["dialect"])

    def _keep_partial(self) -> None:
        if self._relay is not None and self._relay.opened:
            self._record.take(self._relay.answer())

    async def _recorded(self, outgoing: Outgoing | None, out: SseReply) -> Outgoing | None:
        """What goes out once the call is recorded; without a record, no answer does."""
        record = self._record
        given = 200 if out.committed else None
        record.end(given if outgoing is None else outgoing.status or 200)
        try:
            await self._desk.captures.append(self._caller.key, record.facts, record.request, record.response)
        except (StoreUnavailableError, asyncio.CancelledError) as error:
            told = {"model": self._model_name, "call": record.facts["call_id"]}
            _log.error("model call could not be recorded", exc_info=error, extra=told)
            return outgoing if outgoing is None or record.failed else self._withdrawn(out)
        return outgoing

    def _withdrawn(self, out: SseReply) -> Outgoing:
        error = unrecorded()
        self._record.fail_with(error)
        if out.committed and self._relay is not None:
            self._relay.withdraw(Failure(error.code, error.message, error.category))
            return Outgoing(self._relay.final or b"")
        return outgoing_error(error, self._record.facts["dialect"])

    async def _made_void(self) -> None:
        try:
            await self._desk.captures.void(self._caller.key, self._record.facts["call_id"])
        except StoreUnavailableError as error:
            _log.warning("a refused model call may look like a lost one in its capture", exc_info=error)

    async def _released(self, outgoing: Outgoing, out: SseReply, send: Send) -> None:
        if outgoing.status is not None:
            await send_whole(send, outgoing)
            return
        await out.write(outgoing.body, more=False)
        await self._drained()

    async def _drained(self) -> None:
        """Read the upstream's end mark, so that its connection can be used again."""
        if self._chunks is None:
            return
        try:
            async with asyncio.timeout(_DRAIN_S):
                async for _ in self._chunks:
                    pass
        except (TimeoutError, UpstreamError):
            _log.debug("upstream kept its connection open after the final event", extra={"model": self._model_name})

    @property
    def _model_name(self) -> str:
        name: str = self._record.facts["model"]
        return name


def _whole(answer: Answer, reply: UpstreamReply) -> Outgoing:
    headers = passed_headers(reply)
    headers.setdefault("content-type", JSON_TYPE)
    return Outgoing(answer.body, 200, headers)
