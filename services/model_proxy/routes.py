"""The model proxy's routes. A call is checked before it is asked of an upstream; `exchange.py` does the rest."""

import functools
import logging
from typing import Any

import orjson
from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from services.model_proxy.access import Access, Caller, require_key
from services.model_proxy.bridged import BridgedConversation
from services.model_proxy.conversation import Conversation
from services.model_proxy.exchange import Desk, Exchange, Prepared
from services.model_proxy.failures import ModelCallError, render_call_error, sealed
from services.model_proxy.messages import messages_conversation
from services.model_proxy.models import Models, ServedModel
from services.model_proxy.passed import PassedConversation
from services.model_proxy.record import new_record
from shared.contracts.capture import Dialect
from shared.contracts.failure import Stage
from shared.contracts.responses import ResponsesCreateParams
from shared.errors import BadRowError, FieldProblem, PaddockError
from shared.http.bare_route import Endpoint
from shared.http.service import Mesh, Service, body_schema, json_reply
from shared.telemetry import current_key, current_stage

_log = logging.getLogger(__name__)

_RESPONSES_BODY = body_schema(ResponsesCreateParams)
_CHAT_BODY: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}
}
_KEY: dict[str, Any] = {"parameters": [{"name": "key", "in": "path", "required": True, "schema": {"type": "string"}}]}


class Calls:
    """What the routes of one process share; opened by the application's lifespan."""

    def __init__(self, access: Access, models: Models, desk: Desk, mesh: Mesh) -> None:
        self.access = access
        self.models = models
        self.desk = desk
        self._mesh = mesh

    def caller(self, request: Request) -> Caller:
        """
        Raises:
            UnauthorizedError, ForbiddenError: see `Access.caller`.
        """
        caller = self.access.caller(request.headers, request.path_params.get("key"))
        current_key.set(caller.key)
        current_stage.set(Stage.AGENT if caller.phase == "agent" else Stage.VERIFICATION)
        return caller

    async def living(self, request: Request) -> Caller:
        """Who asks something that is no model call.

        Raises:
            ModelCallError: the capture of a session token's episode is sealed.
        """
        caller = self.caller(request)
        if caller.phase == "agent" and await self.desk.captures.is_sealed(caller.key):
            raise sealed(caller.key)
        return caller

    async def call(self, request: Request, dialect: Dialect) -> Response:
        self._mesh.refuse_when_draining()
        caller = self.caller(request)
        try:
            raw = await request.body()
        except ClientDisconnect:
            return Response(status_code=499)
        body = _object(raw)
        asked = body.get("model")
        named = caller.model or (asked if isinstance(asked, str) else "")
        stream = body.get("stream") is True
        record = new_record(caller, dialect, named, raw, stream=stream, instance=self._mesh.instance)

        def prepare() -> Prepared:
            model = self.models.find(asked, caller.model)
            record.facts["model"] = model.name
            return Prepared(model, _conversation(dialect, body, raw, model, caller))

        return Exchange(self.desk, caller, record, prepare)


def _object(raw: bytes) -> dict[str, Any]:
    """
    Raises:
        BadRowError: the body is not a JSON object.
    """
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRowError.of([FieldProblem(("body",), f"is not valid JSON: {error}", "json_invalid")]) from error
    if not isinstance(body, dict):
        raise BadRowError.of([FieldProblem(("body",), "must be a JSON object", "dict_type")])
    return body


def _conversation(
    dialect: Dialect, body: dict[str, Any], raw: bytes, model: ServedModel, caller: Caller
) -> Conversation:
    if dialect == model.upstream.dialect:
        return PassedConversation(body, raw, model, dialect)
    if dialect == "messages":
        return messages_conversation(body, model, caller.profile)
    if dialect == "responses":
        return BridgedConversation(body, model, caller.profile)
    raise ModelCallError(
        f"The server of model '{model.name}' speaks the Responses API only: call /v1/responses instead.",
        status=400,
        code="unsupported_dialect",
    )


def add_routes(app: Service, calls: Calls) -> None:
    _add_model_routes(app, calls)
    _add_capture_routes(app, calls)


def _add_model_routes(app: Service, calls: Calls) -> None:
    @_in_openai_shape
    async def create_response(request: Request) -> Response:
        """A model call. With `stream: true` the answer is Server-Sent Events."""
        return await calls.call(request, "responses")

    @_in_openai_shape
    async def create_chat_completion(request: Request) -> Response:
        """A model call, for upstreams that speak Chat Completions."""
        return await calls.call(request, "chat_completions")

    @_in_messages_shape
    async def create_message(request: Request) -> Response:
        """A model call of the Messages API, whatever the upstream speaks."""
        return await calls.call(request, "messages")

    @_in_messages_shape
    async def count_message_tokens(request: Request) -> Response:
        """Not offered: model servers count only what they answer."""
        await calls.living(request)
        raise ModelCallError(
            "Tokens are not counted ahead here, since model servers have no such call. An answer's usage tells its"
            " counts.",
            status=404,
            code="unsupported_endpoint",
        )

    @_in_openai_shape
    async def list_models(request: Request) -> Response:
        """The models that may be called."""
        caller = None if calls.access.is_mesh(request.headers) else await calls.living(request)
        names = calls.models.names if caller is None or caller.model is None else [caller.model]
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "paddock"} for name in names]
        return json_reply(orjson.dumps({"object": "list", "data": data}))

    for prefix, key in (("", {}), ("/rollouts/{key}", _KEY)):
        app.add_bare_route("POST", f"{prefix}/v1/responses", create_response, openapi_extra=_RESPONSES_BODY | key)
        app.add_bare_route(
            "POST", f"{prefix}/v1/chat/completions", create_chat_completion, openapi_extra=_CHAT_BODY | key
        )
        app.add_bare_route("POST", f"{prefix}/v1/messages", create_message, openapi_extra=_CHAT_BODY | key)
        app.add_bare_route("POST", f"{prefix}/v1/messages/count_tokens", count_message_tokens, openapi_extra=key)
        app.add_bare_route("GET", f"{prefix}/v1/models", list_models, openapi_extra=key)


def _in_openai_shape(endpoint: Endpoint) -> Endpoint:
    """Errors of model calls carry OpenAI's own codes, which the mesh's common handler does not know."""

    @functools.wraps(endpoint)
    async def answered(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ModelCallError as error:
            problem = render_call_error(error, "responses")
            return Response(problem.body, problem.status, problem.headers)

    return answered


def _in_messages_shape(endpoint: Endpoint) -> Endpoint:
    """Every error of ours as the Messages API has it."""

    @functools.wraps(endpoint)
    async def answered(request: Request) -> Response:
        try:
            return await endpoint(request)
        except PaddockError as error:
            problem = render_call_error(error, "messages")
            return Response(problem.body, problem.status, problem.headers)

    return answered


def _add_capture_routes(app: Service, calls: Calls) -> None:
    captures = calls.desk.captures

    async def seal(request: Request) -> Response:
        """Refuse the episode's session token from now on, end its calls, and return the capture. Idempotent.

        Calls that other replicas have under way are waited for; those whose replica has died come as lost.
        With `?bodies=false` the calls come without requests and responses.
        """
        key = _key_of(request)
        await captures.close(key)
        calls.desk.under_way.cut(key)
        calls.desk.metrics.captures_sealed.labels().inc()
        current_key.set(key)
        current_stage.set(Stage.CLEANUP)
        _log.info("capture sealed")
        return json_reply(await captures.settled(key, bodies=_wants_bodies(request)))

    async def read(request: Request) -> Response:
        """What was captured so far; `?format=jsonl` gives the calls as JSON lines, as `replay` plays them back."""
        key = _key_of(request)
        if request.query_params.get("format") == "jsonl":
            return Response(await captures.export(key), media_type="application/jsonl")
        return json_reply(await captures.read(key, bodies=_wants_bodies(request)))

    app.add_bare_route("POST", "/captures/{key}/seal", seal, openapi_extra=_KEY)
    app.add_bare_route("GET", "/captures/{key}", read, openapi_extra=_KEY)


def _key_of(request: Request) -> str:
    key: str = request.path_params["key"]
    require_key(key)
    return key


def _wants_bodies(request: Request) -> bool:
    return request.query_params.get("bodies", "true").lower() != "false"
