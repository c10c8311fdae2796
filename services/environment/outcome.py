"""What is done with the agent's response: by upstream status first, then kind, then response status, then default."""

from shared.contracts.episode import Action, Outcome
from shared.contracts.failure import FailureKind
from shared.contracts.responses import AgentResponse
from shared.errors import terminal_by_status
from shared.settings import OutcomePolicySettings

_BY_STATUS = {status: Action.FAIL if terminal_by_status(status) else Action.RETRY for status in range(400, 600)}
_BY_KIND = {
    kind.value: Action.RETRY
    for kind in FailureKind
    if kind.value.startswith(("model_", "provider_", "transport_", "session_"))
} | {FailureKind.MODEL_BAD_REQUEST.value: Action.FAIL, FailureKind.MODEL_AUTH.value: Action.FAIL}
_BY_RESPONSE = {"completed": Action.VERIFY, "incomplete": Action.VERIFY, "failed": Action.VERIFY}


class OutcomePolicy:
    """Built-in entries under the configured ones: what is not overridden stays."""

    def __init__(self, overrides: OutcomePolicySettings) -> None:
        self._by_status = _BY_STATUS | overrides.status
        self._by_kind = _BY_KIND | overrides.kind
        self._by_response = _BY_RESPONSE | dict(overrides.response)

    def decide(self, response: AgentResponse) -> Outcome:
        """A failure with a known cause is classified; every other response goes by its own status."""
        cause = response.failure_cause if response.status == "failed" else None
        if cause is None:
            return Outcome(action=self._by_response[response.status], selected_by=f"response:{response.status}")
        told = cause.model_dump(mode="json", exclude_none=True)
        status = cause.origin.status if cause.origin is not None else None
        if status in self._by_status:
            return Outcome(action=self._by_status[status], selected_by=f"status:{status}", cause=told)
        if cause.failure_kind.value in self._by_kind:
            kind = cause.failure_kind.value
            return Outcome(action=self._by_kind[kind], selected_by=f"kind:{kind}", cause=told)
        return Outcome(action=Action.RETRY, selected_by="default", cause=told)
