"""What goes wrong in a model call: our own errors in the shape of the caller's dialect, and the capture's categories.

Errors of an upstream do not pass through here: they go out as they came.
"""

import orjson

from services.model_proxy.bridge.messages_errors import error_body, error_type
from services.model_proxy.bridge.refusals import RequestError
from shared.clients.model_proxy import SESSION_LIMIT_REACHED
from shared.contracts.capture import Dialect, ErrorCategory
from shared.contracts.failure import FailureKind, Origin
from shared.errors import PaddockError, model_failure_kind, terminal_by_status, unknown_name
from shared.http.problems import Problem, render
from shared.http.service import RETRY_AFTER_S
from shared.ports.upstream import UpstreamError, UpstreamTimeoutError, UpstreamUnreachableError

_BY_CODE = {
    "rate_limit_exceeded": ErrorCategory.RATE_LIMIT,
    "context_length_exceeded": ErrorCategory.CLIENT_ERROR,
    "invalid_api_key": ErrorCategory.AUTH,
    "upstream_timeout": ErrorCategory.TIMEOUT,
    "upstream_disconnected": ErrorCategory.TRUNCATED_STREAM,
}


class ModelCallError(PaddockError):
    """A model call that fails here; `code` and `param` are those of OpenAI's error object."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str,
        param: str | None = None,
        kind: FailureKind | None = None,
        category: ErrorCategory | None = None,
        origin: Origin | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, origin=origin, retry_after_s=retry_after_s)
        self.status = status
        self.code = code
        self.param = param
        self.kind = kind or model_failure_kind(status, code)
        self.terminal = terminal_by_status(status)
        self.category = category or category_of(status)


class ClientGoneError(Exception):
    """The caller closed its connection."""


class CutError(Exception):
    """The call was ended here although its caller is still there, who is told `error`."""

    def __init__(self, error: ModelCallError) -> None:
        super().__init__(error.message)
        self.error = error


def category_of(status: int) -> ErrorCategory:
    """An error status as a category."""
    if status in {408, 504}:
        return ErrorCategory.TIMEOUT
    if status in {401, 403}:
        return ErrorCategory.AUTH
    if status == 404:
        return ErrorCategory.NOT_FOUND
    if status == 429:
        return ErrorCategory.RATE_LIMIT
    return ErrorCategory.CLIENT_ERROR if 400 <= status < 500 else ErrorCategory.UPSTREAM_ERROR


def category_of_code(code: str) -> ErrorCategory:
    """The code of a failure after the upstream's status 200 as a category."""
    if code == "truncated_stream":
        return ErrorCategory.TRUNCATED_STREAM
    return (
        category_of(int(code))
        if code.isdigit() and 400 <= int(code) < 600
        else _BY_CODE.get(code, ErrorCategory.UPSTREAM_ERROR)
    )


def render_call_error(error: PaddockError, dialect: Dialect) -> Problem:
    """The mesh's error shape with OpenAI's own code and param in it, or with what the Messages API adds."""
    problem = render(error)
    body = orjson.loads(problem.body)
    if isinstance(error, ModelCallError):
        body["error"] |= {"code": error.code, "param": error.param}
    if dialect == "messages":
        told = body["error"]
        shaped = error_body(told["code"], told["message"], error_type(problem.status))
        body = {**body, **shaped, "error": {**told, **shaped["error"]}}
    return Problem(problem.status, orjson.dumps(body), problem.headers)


def refused(error: RequestError) -> ModelCallError:
    """The bridge's word that a request has no form in the upstream's dialect."""
    return ModelCallError(error.message, status=400, code=error.code, param=error.param)


def unknown_model(name: str, known: list[str]) -> ModelCallError:
    return ModelCallError(
        unknown_name("model", name, known),
        status=404,
        code="model_not_found",
        param="model",
        kind=FailureKind.NOT_FOUND,
    )


def sealed(key: str) -> ModelCallError:
    error = ModelCallError(
        f"The episode '{key}' is over: its capture is sealed, and its session token opens no model any more.",
        status=409,
        code="capture_sealed",
        kind=FailureKind.CONFLICT,
        category=ErrorCategory.CANCELLED,
    )
    error.terminal = False  # another attempt has another key
    return error


def stopping() -> ModelCallError:
    """The process ends: another replica takes the same call at once."""
    return ModelCallError(
        "The model proxy is shutting down; send the request again.",
        status=503,
        code="server_shutdown",
        kind=FailureKind.SHUTDOWN,
        category=ErrorCategory.CANCELLED,
        retry_after_s=RETRY_AFTER_S,
    )


def unrecorded() -> ModelCallError:
    """The store is away: what cannot be recorded is not asked, and does not look answered."""
    return ModelCallError(
        "The model proxy cannot record model calls at present; send the request again.",
        status=503,
        code="capture_unavailable",
        kind=FailureKind.PERSISTENCE_FAILED,
        retry_after_s=RETRY_AFTER_S,
    )


def spent(told: str) -> ModelCallError:
    """A session token's bound is reached: another call would be one too many, however often it is tried."""
    return ModelCallError(
        f"This session token allows no further call: {told}.",
        status=403,
        code=SESSION_LIMIT_REACHED,
        kind=FailureKind.CONFLICT,
    )


def unreached(error: UpstreamError, model: str) -> ModelCallError:
    """An upstream that gave no answer, or not the whole of one."""
    category = ErrorCategory.CONNECTION
    status, code, what = 502, "upstream_disconnected", "dropped the connection"
    if isinstance(error, UpstreamUnreachableError):
        code, what = "upstream_unreachable", "cannot be reached"
    elif isinstance(error, UpstreamTimeoutError):
        status, code, what, category = 504, "upstream_timeout", "did not answer in time", ErrorCategory.TIMEOUT
    return ModelCallError(
        f"The server of model '{model}' {what}: {error}.",
        status=status,
        code=code,
        kind=FailureKind.MODEL_ERROR,
        category=category,
        origin=Origin(service="upstream", code=code),
    )


def unusable(message: str, code: str) -> ModelCallError:
    """An upstream's answer with status 200 that is none: 502, but the 400 that it should have been for a prompt
    that does not fit, so that the harness does not ask again."""
    return ModelCallError(
        message,
        status=400 if code == "context_length_exceeded" else 502,
        code=code,
        category=category_of_code(code),
        origin=Origin(service="upstream", status=200, code=code),
    )
