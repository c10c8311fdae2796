"""Errors in the shape of the Messages API: `{"type": "error", "error": {"type", "message", "details"}}`."""

from typing import Any

_BY_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# Failures after the upstream's status 200, by their code.
_BY_CODE = {
    "context_length_exceeded": "invalid_request_error",
    "invalid_api_key": "authentication_error",
    "overloaded_error": "overloaded_error",
    "rate_limit_exceeded": "rate_limit_error",
    "upstream_timeout": "timeout_error",
}

_STATUS_DIGITS = 3


def error_type(status: int) -> str:
    """The API's name for an error status."""
    return _BY_STATUS.get(status, "invalid_request_error" if 400 <= status < 500 else "api_error")


def error_body(code: str, message: str, kind: str | None = None) -> dict[str, Any]:
    """An error as a body or as a stream's final event. `kind` follows from the code where it is not given."""
    if kind is None:
        status = int(code) if code.isdecimal() and len(code) == _STATUS_DIGITS else 0
        kind = error_type(status) if status else _BY_CODE.get(code, "api_error")
    return {"type": "error", "error": {"type": kind, "message": message, "details": {"error_code": code}}}
