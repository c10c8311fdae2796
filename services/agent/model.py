"""A harness's calls to its model, through the model proxy, and what the model's errors mean for the run."""

from collections.abc import Collection
from typing import Any, Final

import orjson

from shared.clients.model_proxy import SERVICE, SESSION_LIMIT_REACHED
from shared.contracts.failure import FailureCause, FailureKind, Origin
from shared.errors import ProtocolViolationError, ServiceError, model_failure_kind
from shared.http.client import HttpClient
from shared.ports.harness import HarnessEnd, ModelAccess

CONTEXT_WINDOW: Final = "context_window"
SESSION_LIMIT: Final = "session_limit"
# Ends of a response that are the model's own; anything else that is not complete is a fault of who serves it.
_LIMITS: Final = frozenset({"max_output_tokens", "content_filter"})
# Who answered first when an error came through the proxy as it was.
UPSTREAM: Final = "upstream"


class Model:
    """The one model of an activation."""

    def __init__(self, client: HttpClient, access: ModelAccess, timeout_s: float) -> None:
        self._client = client
        self._url = f"{access.base_url}/responses"
        self._headers = {"Authorization": f"Bearer {access.token}"}
        self._timeout_s = timeout_s

    async def respond(self, request: dict[str, Any]) -> dict[str, Any]:
        """The model's whole answer, a Responses object.

        Raises:
            ServiceError: the model or the proxy answered with an error.
            TransportError: the proxy could not be reached or did not answer in time.
            ProtocolViolationError: the answer is no Responses object.
        """
        reply = await self._client.request(
            "POST",
            self._url,
            service=SERVICE,
            timeout_s=self._timeout_s,
            body=orjson.dumps(request),
            headers=self._headers,
        )
        try:
            response = orjson.loads(reply.body)
        except orjson.JSONDecodeError as error:
            raise ProtocolViolationError(f"The model proxy's answer is not JSON: {error}.") from error
        if not isinstance(response, dict) or not isinstance(response.get("output"), list):
            raise ProtocolViolationError("The model proxy's answer is no Responses object: it has no output.")
        return response


def end_of_error(error: ServiceError, context_codes: Collection[str]) -> HarnessEnd:
    """How a run ends when its model answered with an error status.

    A full context window is known by the error's code alone: texts differ from server to server and may
    speak of tokens for other reasons.

    Raises:
        ServiceError: the error itself, when it is the proxy's own and says nothing about the model.
    """
    if error.origin is not None and error.in_mesh_form and error.origin.code == SESSION_LIMIT_REACHED:
        return HarnessEnd(status="incomplete", incomplete_reason=SESSION_LIMIT)
    if error.in_mesh_form or error.origin is None:
        raise error
    code = error.origin.code
    if error.status == 400 and code in context_codes:
        return HarnessEnd(status="incomplete", incomplete_reason=CONTEXT_WINDOW)
    excerpt = error.origin.body_excerpt
    cause = FailureCause(
        failure_kind=model_failure_kind(error.status, code),
        reason=f"The model answered {error.status}: {excerpt or 'no body'}",
        origin=Origin(service=UPSTREAM, status=error.status, code=code, body_excerpt=excerpt),
    )
    return HarnessEnd(status="failed", cause=cause)


def end_of_response(response: dict[str, Any], context_codes: Collection[str]) -> HarnessEnd | None:
    """How a run ends when its model answered with a response that is not complete; None for a complete one."""
    status, error = response.get("status"), response.get("error")
    whole = all(isinstance(item, dict) for item in response["output"])
    if status == "completed" and not error and whole:
        return None
    reason_of_end = (response.get("incomplete_details") or {}).get("reason")
    if status == "incomplete" and not error and whole and reason_of_end in _LIMITS:
        return HarnessEnd(status="incomplete", incomplete_reason=reason_of_end)
    if not isinstance(error, dict):
        told = reason_of_end or ("its output holds what is no item" if not whole else None)
        error = {"message": str(error or told or "it does not say how it ended")}
    code = error.get("code")
    if code in context_codes:
        return HarnessEnd(status="incomplete", incomplete_reason=CONTEXT_WINDOW)
    reason = f"The model's response ended as '{status}': {error.get('message') or code or 'no reason given'}"
    kind = FailureKind.MODEL_RATE_LIMITED if code == "rate_limit_exceeded" else FailureKind.MODEL_ERROR
    origin = Origin(service=UPSTREAM, code=None if code is None else str(code), body_excerpt=error.get("message"))
    return HarnessEnd(status="failed", cause=FailureCause(failure_kind=kind, reason=reason, origin=origin))
