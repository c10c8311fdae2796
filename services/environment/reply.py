"""Facts → the answer of `POST /run`, in the shape of the request: native or flat.

Evidence is attached after all cleanup, for verdicts and failures alike. A fault in an evidence step is a
gap in the evidence and nothing more.
"""

import logging
from typing import Any, Final

import orjson

from services.environment.rows import Row
from services.environment.told import Told
from shared.contracts.episode import Action
from shared.contracts.failure import REASON_MAX_CHARS, FailureKind, Stage

_log = logging.getLogger(__name__)

FLAT_FAILURE_CLASS: Final = "environment_server_failed"


def reply_of(row: Row, told: Told, agent_name: str) -> bytes:
    """Exactly one of a result and a failure."""
    failure = failure_of(told)
    response = _with_captured_usage(told)
    result = None if failure is not None else _result(told, response)
    evidence = _evidence(told)
    ids = {"episode_id": row.episode_id.model_dump(), "task_id": row.task_id.model_dump()}
    if not row.flat:
        told_end = {"failure": failure} if failure is not None else {"result": result}
        return orjson.dumps({**ids, **told_end, "evidence": evidence})
    agent_ref = row.agent_ref or {"type": "responses_api_agents", "name": agent_name}
    common = {"responses_create_params": row.params, "agent_ref": agent_ref, **ids, "evidence": evidence}
    if failure is None:
        return orjson.dumps({**(result or {}), **common})
    flat_failure = {
        "_ng_failure_class": FLAT_FAILURE_CLASS,
        "_ng_failure_terminal": failure["terminal"],
        "_ng_failure_message": failure["failure_reason"],
        "_ng_failure_stage": failure["stage"],
        "failure": failure,
    }
    return orjson.dumps({**flat_failure, **common})


def failure_of(told: Told) -> dict[str, Any] | None:
    """The failure record of an episode without a verdict; None when there is a result."""
    error, outcome = told.failure, told.outcome
    if error is not None:
        failure: dict[str, Any] = {
            "failure_reason": error.message[:REASON_MAX_CHARS],
            "terminal": error.terminal,
            "failure_kind": error.kind,
            "stage": told.stage,
        }
        if error.origin is not None:
            failure["origin"] = error.origin.model_dump(exclude_none=True)
    elif outcome is not None and outcome.action in {Action.RETRY, Action.FAIL}:
        cause = outcome.cause or {}
        failure = {
            "failure_reason": cause.get("reason") or "The outcome policy does not grade this response.",
            "terminal": outcome.action is Action.FAIL,
            "failure_kind": cause.get("failure_kind", FailureKind.AGENT_RUN_ERROR),
            "stage": Stage.AGENT,
        }
        if "origin" in cause:
            failure["origin"] = cause["origin"]
    else:
        return None
    partial = _partial(told)
    if partial is not None:
        failure["partial_response"] = partial
    if told.cleanup_errors:
        failure["cleanup_error"] = told.cleanup_errors[0].model_dump()
    return failure


def _partial(told: Told) -> Any:
    """The agent's response, else what its close receipt kept."""
    if told.response is not None:
        return orjson.Fragment(told.response)
    return told.receipt.partial_response if told.receipt is not None else None


def _result(told: Told, response: bytes | None) -> dict[str, Any]:
    assert told.outcome is not None
    assert response is not None
    if told.verified is not None:
        fields: dict[str, Any] = orjson.loads(told.verified.raw)
    else:  # the two actions that decide without the verifier
        fields = {"reward": 0.0, "mask_sample": told.outcome.action is Action.MASK}
    fields["mask_sample"] = fields.get("mask_sample", False)
    fields["response"] = orjson.Fragment(response)
    fields["outcome"] = told.outcome.model_dump(mode="json", exclude_none=True)
    if told.timed_out is not None:
        fields["agent_timed_out"] = {"limit_s": told.timed_out.seconds, "set_by": told.timed_out.set_by}
    return fields


def _with_captured_usage(told: Told) -> bytes | None:
    """The response with the usage that the sealed capture adds up to, where the receipt tells it.

    The capture is the only complete record: null stands for "not known", never for a lower number.
    """
    observations = told.receipt.agent_observations if told.receipt is not None else None
    if told.response is None or observations is None or "usage" not in observations:
        return told.response
    try:
        response = orjson.loads(told.response)
        if response.get("usage") == observations["usage"]:
            return told.response
        response["usage"] = observations["usage"]
        return orjson.dumps(response)
    except (orjson.JSONDecodeError, AttributeError, TypeError) as error:
        _log.warning("the captured usage could not be attached: %s", error)
        told.gaps.append("captured_usage_not_attached")
        return told.response


def _evidence(told: Told) -> dict[str, Any]:
    evidence: dict[str, Any] = {"timings_s": {name: round(value, 6) for name, value in told.timings_s.items()}}
    receipt = told.receipt
    if receipt is None:
        told.gaps.append("agent_close_receipt_unavailable")
    else:
        evidence["agent_observations"] = receipt.agent_observations
        evidence["close_receipt"] = {
            "agent_session_id": receipt.agent_session_id,
            "status": receipt.status,
            "cleanup": receipt.cleanup.model_dump(exclude_none=True),
        }
        if receipt.agent_trajectory is not None:
            evidence["agent_trajectory"] = receipt.agent_trajectory
    if told.outcome is not None:
        evidence["outcome"] = told.outcome.model_dump(mode="json", exclude_none=True)
    if told.cleanup_errors:
        evidence["cleanup_errors"] = [error.model_dump() for error in told.cleanup_errors]
    if told.takeovers:
        evidence["takeovers"] = told.takeovers
    if told.gaps:
        evidence["gaps"] = told.gaps
    return evidence
