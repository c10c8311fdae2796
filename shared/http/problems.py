"""Errors on the wire, in both directions.

Every service of ours answers an error in one shape, a superset of OpenAI's, so that any client of
either kind reads it:

    {"error":   {"message", "type", "param", "code"},
     "detail":  [{"loc", "msg", "type"}],                 only where fields are wrong
     "failure": {"failure_kind", "terminal", "stage"?, "origin"?}}

Errors of a model's upstream do not take this form: they are passed on as they came.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import time
from typing import Any

import orjson
from pydantic import ValidationError

from shared.contracts.failure import EXCERPT_MAX_CHARS, FailureKind, Origin, Stage
from shared.errors import (
    BadRowError,
    FieldProblem,
    PaddockError,
    ServiceError,
    terminal_by_status,
)
from shared.redaction import redact

JSON_TYPE = "application/json"

# What services of other makers answer without a body of ours.
_KIND_BY_STATUS = {
    401: FailureKind.UNAUTHORIZED,
    403: FailureKind.UNAUTHORIZED,
    404: FailureKind.NOT_FOUND,
    409: FailureKind.CONFLICT,
    410: FailureKind.SESSION_LOST,
    413: FailureKind.BAD_ROW,
    422: FailureKind.BAD_ROW,
    429: FailureKind.OVERLOADED,
    503: FailureKind.TRANSPORT_UNREACHABLE,
}


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as it goes out."""

    status: int
    body: bytes
    headers: dict[str, str]


def render(error: PaddockError) -> Problem:
    """Our error → what the client gets."""
    failure: dict[str, Any] = {"failure_kind": error.kind.value, "terminal": error.terminal}
    if error.stage is not None:
        failure["stage"] = error.stage.value
    if error.origin is not None:
        failure["origin"] = error.origin.model_dump(exclude_none=True)
    body: dict[str, Any] = {
        "error": {
            "message": error.message,
            "type": "invalid_request_error" if error.status < 500 else "server_error",
            "param": error.detail[0].path if error.detail else None,
            "code": error.kind.value,
        },
        "failure": failure,
    }
    if error.detail:
        body["detail"] = [{"loc": item.loc, "msg": item.msg, "type": item.type} for item in error.detail]
    headers = {"content-type": JSON_TYPE}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    return Problem(error.status, orjson.dumps(body), headers)


def read(status: int, headers: dict[str, str], body: bytes, *, service: str) -> ServiceError:
    """What a peer answered → our error; what the body does not say follows from the status."""
    parsed = _parsed(body)
    failure, error = _object(parsed, "failure"), _object(parsed, "error")
    kind = _kind(failure.get("failure_kind"), status)
    message = error.get("message")
    text = excerpt(body)
    return ServiceError(
        f"{service} answered {status}: {redact(message) if isinstance(message, str) else text or 'no body'}",
        kind=kind,
        status=status,
        terminal=bool(failure.get("terminal", terminal_by_status(status))),
        origin=_origin(failure.get("origin"))
        or Origin(service=service, status=status, code=_code(error), body_excerpt=text),
        stage=_stage(failure.get("stage")),
        detail=_detail(parsed.get("detail")),
        retry_after_s=retry_after_s(headers.get("retry-after")),
        in_mesh_form=bool(failure),
    )


def recorded(error: PaddockError) -> dict[str, Any]:
    """An error as JSON values, for a record from which `restored` makes it again."""
    return {
        "message": error.message,
        "kind": error.kind,
        "status": error.status,
        "terminal": error.terminal,
        "origin": None if error.origin is None else error.origin.model_dump(),
        "stage": error.stage,
        "detail": [{"loc": item.loc, "msg": item.msg, "type": item.type} for item in error.detail],
    }


def restored(fields: dict[str, Any]) -> ServiceError:
    """The error that `recorded` described: the same words and the same consequences."""
    return ServiceError(
        fields["message"],
        kind=FailureKind(fields["kind"]),
        status=fields["status"],
        terminal=fields["terminal"],
        origin=None if fields["origin"] is None else Origin.model_validate(fields["origin"]),
        stage=_stage(fields["stage"]),
        detail=_detail(fields["detail"]),
        in_mesh_form=True,
    )


def field_problems(error: ValidationError, prefix: Sequence[str | int] = ()) -> list[FieldProblem]:
    """Pydantic's complaints with their field paths below `prefix`; values are left out, they may be secret."""
    return [
        FieldProblem((*prefix, *item["loc"]), item["msg"], item["type"])
        for item in error.errors(include_url=False, include_context=False, include_input=False)
    ]


def bad_row(error: ValidationError, prefix: Sequence[str | int] = ()) -> BadRowError:
    return BadRowError.of(field_problems(error, prefix))


def excerpt(body: bytes) -> str:
    """The beginning of a foreign body as text, without credentials."""
    return redact(body[: 4 * EXCERPT_MAX_CHARS].decode("utf-8", "replace"))[:EXCERPT_MAX_CHARS]


def retry_after_s(value: str | None) -> float | None:
    """Seconds of a `Retry-After` header in either of its forms (RFC 9110, 10.2.3); None when it has none."""
    if value is None:
        return None
    if value.strip().isdigit():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time())
    except ValueError:
        return None


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _object(parsed: dict[str, Any], name: str) -> dict[str, Any]:
    value = parsed.get(name)
    return value if isinstance(value, dict) else {}


def _kind(name: object, status: int) -> FailureKind:
    try:
        return FailureKind(name)  # type: ignore[arg-type]  # a wrong type is the ValueError below
    except ValueError:
        return _KIND_BY_STATUS.get(
            status, FailureKind.PROTOCOL_VIOLATION if status < 500 else FailureKind.ENVIRONMENT_SERVER_FAILED
        )


def _stage(name: object) -> Stage | None:
    return Stage(name) if isinstance(name, str) and name in set(Stage) else None


def _code(error: dict[str, Any]) -> str | None:
    code = error.get("code")
    return None if code is None else str(code)


def _origin(value: object) -> Origin | None:
    if not isinstance(value, dict):
        return None
    try:
        return Origin.model_validate(value)
    except ValidationError:
        return None


def _detail(value: object) -> list[FieldProblem]:
    if not isinstance(value, list):
        return []
    return [
        FieldProblem(tuple(item.get("loc") or ()), str(item.get("msg")), str(item.get("type")))
        for item in value
        if isinstance(item, dict)
    ]
