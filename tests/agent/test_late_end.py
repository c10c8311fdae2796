"""A run that ends by itself in the moment in which its caller gives up is told as it ended."""

import orjson
import pytest

from services.agent.model import end_of_error, end_of_response
from shared.http.problems import read
from shared.ports.harness import HarnessEnd


@pytest.mark.parametrize(
    "response",
    [
        {"status": "completed", "error": {"code": "server_error", "message": "engine died"}, "output": []},
        {"error": {"message": "no"}, "output": []},
        {"detail": "not found", "output": []},
        {"status": None, "output": []},
        {"status": "incomplete", "incomplete_details": {"reason": "engine_abort"}, "output": []},
        {"status": "incomplete", "output": []},
        {"status": "completed", "output": ["x"]},
        {"status": "cancelled", "output": []},
    ],
)
def test_a_response_that_does_not_say_that_the_model_was_done_is_a_failure(response: dict[str, object]) -> None:
    end = end_of_response(response, ())
    assert end is not None
    assert end.status == "failed"
    assert end.cause is not None
    assert end.cause.failure_kind == "model_error"


@pytest.mark.parametrize(("status", "graded"), [(400, True), (401, False), (429, False), (500, False)])
def test_a_full_context_window_is_believed_on_a_400_only(status: int, graded: bool) -> None:
    body = orjson.dumps({"error": {"message": "too long", "code": "context_length_exceeded"}})
    end = end_of_error(read(status, {}, body, service="model_proxy"), ("context_length_exceeded",))
    assert (end == HarnessEnd(status="incomplete", incomplete_reason="context_window")) is graded
    assert (end.status == "failed") is not graded
