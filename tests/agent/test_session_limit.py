"""What the model proxy's bound on a session means for the run."""

import pytest

from services.agent.model import end_of_error
from services.model_proxy.failures import render_call_error, sealed, spent
from shared.errors import ServiceError
from shared.http.problems import read
from shared.ports.harness import HarnessEnd


def test_a_reached_bound_is_an_incomplete_run_and_a_sealed_capture_an_error() -> None:
    reached = render_call_error(spent("it allows 2 calls"), "responses")
    error = read(reached.status, reached.headers, reached.body, service="model_proxy")
    assert end_of_error(error, ()) == HarnessEnd(status="incomplete", incomplete_reason="session_limit")
    over = render_call_error(sealed("r1"), "responses")
    with pytest.raises(ServiceError, match="is over"):
        end_of_error(read(over.status, over.headers, over.body, service="model_proxy"), ())
