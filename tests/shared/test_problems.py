"""Errors keep their meaning over the wire, in both directions."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import orjson
import pytest
from pydantic import BaseModel, ValidationError

from shared.contracts.failure import FailureKind, Origin, Stage
from shared.errors import (
    BadRowError,
    CancelledEpisodeError,
    CleanupUnprovenError,
    ConfigurationError,
    ConfigurationProblem,
    ConflictError,
    DeadlineError,
    DrainingError,
    FencedError,
    FieldProblem,
    ForbiddenError,
    JudgeError,
    NotFoundError,
    OverloadedError,
    PaddockError,
    ProtocolViolationError,
    ServiceError,
    SessionLostError,
    StoreUnavailableError,
    TooLargeError,
    TransportError,
    UnauthorizedError,
    UnknownNameError,
    VerifierError,
    VersionConflictError,
    model_failure_kind,
    terminal_by_status,
)
from shared.http.problems import bad_row, excerpt, read, render, retry_after_s
from shared.redaction import redact

ALL = [
    BadRowError, ConflictError, UnauthorizedError, ForbiddenError, NotFoundError, TooLargeError, OverloadedError,
    DrainingError, StoreUnavailableError, SessionLostError, DeadlineError, CancelledEpisodeError,
    ProtocolViolationError, CleanupUnprovenError, VerifierError, JudgeError, VersionConflictError, FencedError,
    PaddockError,
]  # fmt: skip


@pytest.mark.behaviour("ES-41")
@pytest.mark.parametrize("error_type", ALL)
def test_kind_status_and_terminal_flag_survive_the_wire(error_type: type[PaddockError]) -> None:
    origin = Origin(service="upstream", status=503, code="busy", body_excerpt="try later")
    error = error_type("a sentence", stage=Stage.AGENT, origin=origin, retry_after_s=3)
    sent = render(error)
    got = read(sent.status, sent.headers, sent.body, service="agent")
    assert (got.kind, got.status, got.terminal, got.stage) == (error.kind, error.status, error.terminal, Stage.AGENT)
    assert got.origin == origin
    assert got.retry_after_s == 3
    assert "a sentence" in got.message


def test_wrong_fields_survive_the_wire() -> None:
    error = BadRowError.of([FieldProblem(("task_data", 0, "x"), "missing", "missing"), FieldProblem(("y",), "bad")])
    sent = render(error)
    body = orjson.loads(sent.body)
    assert body["error"]["param"] == "task_data.0.x"
    got = read(sent.status, sent.headers, sent.body, service="resources")
    assert got.detail == error.detail


def test_a_transport_error_tells_whether_anything_was_sent() -> None:
    timeout = TransportError("late", kind=FailureKind.TRANSPORT_TIMEOUT, service="agent", sent=True)
    refused = TransportError("no", kind=FailureKind.TRANSPORT_UNREACHABLE, service="agent", sent=False)
    assert (timeout.status, refused.status) == (504, 502)
    assert not timeout.terminal
    assert not refused.terminal
    assert refused.origin == Origin(service="agent")


@pytest.mark.behaviour("ES-40")
@pytest.mark.parametrize(
    ("status", "kind", "terminal"),
    [
        (400, FailureKind.PROTOCOL_VIOLATION, True),
        (401, FailureKind.UNAUTHORIZED, True),
        (404, FailureKind.NOT_FOUND, True),
        (408, FailureKind.PROTOCOL_VIOLATION, False),
        (409, FailureKind.CONFLICT, True),
        (422, FailureKind.BAD_ROW, True),
        (425, FailureKind.PROTOCOL_VIOLATION, False),
        (429, FailureKind.OVERLOADED, False),
        (500, FailureKind.ENVIRONMENT_SERVER_FAILED, False),
        (503, FailureKind.TRANSPORT_UNREACHABLE, False),
    ],
)
def test_a_foreign_error_is_read_by_its_status(status: int, kind: FailureKind, terminal: bool) -> None:
    got = read(status, {}, b"<html>oops</html>", service="gateway")
    assert (got.kind, got.terminal) == (kind, terminal)
    assert got.origin == Origin(service="gateway", status=status, body_excerpt="<html>oops</html>")
    assert terminal_by_status(status) is terminal


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"\xff\xff",
        b'{"error": "text"}',
        b'{"error": {"message": 7, "code": 9}, "failure": [], "detail": "x"}',
        b'{"failure": {"failure_kind": 3, "stage": "nowhere", "origin": {"unknown": 1}}}',
        b'{"failure": {"failure_kind": "no such kind", "stage": 5, "origin": "x"}, "detail": [1, {"msg": "m"}]}',
    ],
)
def test_nonsense_from_a_peer_is_still_an_error_with_its_status(body: bytes) -> None:
    got = read(502, {"retry-after": "soon"}, body, service="peer")
    assert got.status == 502
    assert got.stage is None
    assert got.retry_after_s is None
    assert got.origin is not None
    assert got.origin.service == "peer"


def test_an_upstreams_code_is_kept_with_the_origin() -> None:
    got = read(400, {}, b'{"error": {"message": "no", "code": 40}}', service="model_proxy")
    assert got.origin is not None
    assert got.origin.code == "40"


def test_credentials_never_stay_in_what_is_told() -> None:
    text = "key sk-abcdef0123456789 and Bearer abc.def-ghi and pdk1.eyJhIjoxfQ.c2ln end"
    assert redact(text) == "key [credential] and [credential] and [credential] end"
    assert "sk-abcdef" not in excerpt(b'{"error": "Incorrect API key provided: sk-abcdef0123456789"}')
    got = read(401, {}, b'{"error": {"message": "bad key sk-abcdef0123456789"}}', service="upstream")
    assert "sk-abcdef" not in got.message + str(got.origin)


def test_excerpts_are_short() -> None:
    assert len(excerpt(b"x" * 100_000)) == 1000


@pytest.mark.parametrize(("value", "seconds"), [(None, None), ("17", 17.0), (" 3 ", 3.0), ("soon", None), ("-1", None)])
def test_retry_after_in_seconds(value: str | None, seconds: float | None) -> None:
    assert retry_after_s(value) == seconds


def test_retry_after_as_a_date() -> None:
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)
    assert 90 < (retry_after_s(later) or 0) <= 101
    assert retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0


def test_values_of_wrong_fields_are_not_told() -> None:
    class Secretive(BaseModel):
        answer: int

    with pytest.raises(ValidationError) as caught:
        Secretive.model_validate({"answer": "the hidden answer"})
    error = bad_row(caught.value, ("task_data",))
    assert error.detail[0].path == "task_data.answer"
    assert "hidden" not in error.message + str(render(error).body)


def test_an_unknown_name_gives_the_known_ones_and_the_nearest() -> None:
    error = UnknownNameError.among("environment", "maht", ["math", "mcqa"], ("environment",))
    assert error.message == "There is no environment 'maht'. Did you mean 'math'? Known: math, mcqa."
    assert "Known: none." in UnknownNameError.among("agent", "x", [], ("agent",)).message


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, None, "model_bad_request"), (401, None, "model_auth"), (403, None, "model_auth"),
        (402, None, "model_quota"), (429, "insufficient_quota", "model_quota"), (429, None, "model_rate_limited"),
        (503, None, "model_overloaded"), (529, None, "model_overloaded"), (500, None, "model_error"),
        (408, None, "model_error"), (404, "model_not_found", "model_bad_request"),
    ],
)  # fmt: skip
def test_upstream_errors_are_told_apart_by_status_and_code(status: int, code: str | None, kind: str) -> None:
    assert model_failure_kind(status, code).value == kind


def test_a_configuration_error_lists_all_its_problems() -> None:
    error = ConfigurationError(
        [ConfigurationProblem("a.yaml", "x.y", "is wrong"), ConfigurationProblem("b", "", "gone")]
    )
    assert str(error) == "a.yaml: x.y: is wrong\nb: gone"


def test_a_service_error_is_what_the_peer_said() -> None:
    error = ServiceError("m", kind=FailureKind.BAD_ROW, status=422, terminal=True, origin=Origin(service="s"))
    assert render(error).status == 422
