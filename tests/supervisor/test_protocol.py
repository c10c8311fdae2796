"""What the host makes of frames, answers and receipts: pure functions, and what is not exactly right is no proof."""

import hashlib
import hmac
from typing import Any

import orjson
import pytest
from pydantic import ValidationError

from shared.supervisor.protocol import Commands, LaunchRequest, Survivors, new_key
from shared.supervisor.receipt import Answer, AnswerError, Proof, Receipt, proof_of, signature_of

KEY = bytes(range(32))
ENDED: dict[str, Any] = {
    "v": 1, "state": "exited", "cleanup_confirmed": True, "timed_out": False, "reason": "exit", "id": "act-1",
    "nonce": "ab" * 16, "policy": "drain", "exit_code": 3, "tree_empty": True, "remaining_count": 0,
    "remaining": [], "survivors_count": 0, "survivors": [],
}  # fmt: skip
PROCESS = {"pid": 7, "start": 8, "uid": 0, "comm": "server"}


def _line(**changes: Any) -> bytes:
    return orjson.dumps({**ENDED, **changes})


def _signed(**changes: Any) -> bytes:
    body = _line(**changes)[:-1]
    return body + b',"mac":"%s"}' % hmac.digest(KEY, body, hashlib.sha256).hex().encode()


def _answer(receipt: bytes | None, state: str = "exited") -> Answer:
    head = orjson.dumps({"v": 1, "state": state, "live": False, "fence": 3})
    return Answer.read(b"%s\nnull\n%s\n" % (head, receipt or b"null"))


def _proof(receipt: bytes | None, *, state: str = "exited", policy: Survivors = "drain", seen: bool = True) -> Proof:
    return proof_of(_answer(receipt, state), activation_id="act-1", key=KEY, policy=policy, launch_seen=seen)


@pytest.mark.behaviour("SB-31")
def test_only_a_signed_receipt_with_exactly_true_is_proof() -> None:
    assert _proof(_signed()).confirmed
    for other in (1, "true", None, [True], "yes"):
        assert _proof(_signed(cleanup_confirmed=other)).finding == "missing"
    assert _proof(_signed(cleanup_confirmed=False)).finding == "negative"
    for line in (b"[]", b"7", b'"x"', b"{}", b"{", b"null,", _line(state="dancing"), _line(v=2)):
        assert _proof(line).finding == "missing", line


@pytest.mark.behaviour("SB-32", "SB-35")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("exit_code", True), ("exit_code", "0"), ("exit_code", 1.5), ("killed", "many"), ("worker", {"pid": 1}),
        ("stdout", []), ("survivors", "none"), ("started_at", "today"), ("policy", "some"), ("colour", "red"),
        ("gaps", ["forged"]),
    ],
)  # fmt: skip
def test_a_malformed_optional_field_is_a_gap_and_leaves_the_confirmation_alone(name: str, value: Any) -> None:
    proof = _proof(_signed(**{name: value}))
    assert proof.confirmed
    assert proof.receipt is not None
    assert proof.receipt.gaps == (name,)
    assert name == "gaps" or getattr(proof.receipt, name, None) is None
    assert proof.receipt.exit_code == (None if name == "exit_code" else 3)


@pytest.mark.behaviour("SB-33")
@pytest.mark.parametrize("state", ["running", "stopping", "starting", "lost"])
def test_missing_evidence_is_told_from_a_negative_receipt(state: str) -> None:
    assert _proof(None, state=state).finding == "missing"
    assert _proof(_signed(cleanup_confirmed=False)).finding == "negative"


@pytest.mark.parametrize("state", ["absent", "closed", "fenced"])
def test_what_ran_and_looks_as_if_it_never_had_is_negative(state: str) -> None:
    assert _proof(None, state=state, seen=True).finding == "negative"
    assert _proof(None, state=state, seen=False).finding == "missing"


@pytest.mark.behaviour("SB-20")
def test_a_fenced_receipt_counts_only_where_no_launch_was_seen() -> None:
    fenced = {"state": "fenced", "exit_code": None, "id": "", "tree_empty": None}
    unsigned = _line(**fenced)[:-1] + b',"mac":null}'
    proof = _proof(unsigned, seen=False)
    assert proof.confirmed
    assert proof.receipt is not None
    assert proof.receipt.exit_code is None
    assert _proof(unsigned, seen=True).finding == "negative"


@pytest.mark.parametrize(
    ("changes", "policy", "confirmed"),
    [
        ({"state": "lost"}, "drain", False),
        ({"remaining_count": 1, "remaining": [PROCESS]}, "drain", False),
        ({"survivors_count": 1, "survivors": [PROCESS], "tree_empty": False}, "drain", False),
        ({"tree_empty": False}, "drain", False),
        ({"survivors_count": 1, "survivors": [PROCESS], "tree_empty": False, "policy": "keep_all"}, "keep_all", True),
        ({"policy": "keep_all"}, "keep_services", False),
        ({"id": "act-2"}, "drain", False),
        ({"state": "launch_failed", "exit_code": None}, "drain", True),
        ({"state": "deadline", "timed_out": True}, "drain", True),
    ],
)
def test_a_confirmation_that_the_rest_contradicts_is_no_proof(
    changes: dict[str, Any], policy: Survivors, confirmed: bool
) -> None:
    proof = _proof(_signed(**changes), policy=policy)
    assert proof.confirmed == confirmed
    assert bool(proof.why) != confirmed


def test_a_signature_is_over_the_exact_bytes() -> None:
    line = _signed()
    assert signature_of(line, KEY) == "valid"
    assert signature_of(line, new_key()) == "forged"
    assert signature_of(line.replace(b'"exit_code":3', b'"exit_code": 3'), KEY) == "forged"
    assert signature_of(line + b" ", KEY) == "forged"
    assert signature_of(_line()[:-1] + b',"mac":null}', KEY) == "absent"


RUNNING = b'{"v":1,"state":"running","live":true,"fence":1}\n'


@pytest.mark.parametrize(
    "output",
    [
        b"",
        b"x",
        b"null\nnull\nnull\n",
        RUNNING,
        RUNNING + b"null\nnull",
        RUNNING.replace(b"running", b"gone") + b"null\nnull\n",
    ],
)
def test_an_answer_that_is_cut_off_or_foreign_is_an_error(output: bytes) -> None:
    with pytest.raises(AnswerError):
        Answer.read(output)
    with pytest.raises(AnswerError):
        Receipt.read(output)


def test_a_frame_ends_with_an_empty_field_and_keeps_every_text() -> None:
    request = LaunchRequest(activation_id="a", command=("p", "", "ä\n="), env={"A": "=b"}, deadline_s=0.0001)
    fields = request.frame(KEY).split(b"\0")
    assert fields[0] == b"paddock-run=1"
    assert fields[-2:] == [b"", b""]
    assert [field for field in fields if field.startswith(b"arg=")] == [b"arg=p", b"arg=", "arg=ä\n=".encode()]
    assert {b"env=A==b", b"deadline_ms=1", b"key=" + KEY.hex().encode()} <= set(fields)


@pytest.mark.parametrize(
    "wrong",
    [{"command": ()}, {"command": ("",)}, {"command": ("a\0b",)}, {"env": {"A=B": "c"}}, {"env": {"": "c"}},
     {"env": {"A": "\0"}}, {"cwd": "relative"}, {"activation_id": 'a"b'}, {"deadline_s": 0}, {"colour": "red"}],
)  # fmt: skip
def test_a_request_that_cannot_be_told_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LaunchRequest.model_validate({"activation_id": "a", "command": ("true",), **wrong})


def test_no_command_line_holds_more_than_paths_and_numbers() -> None:
    commands = Commands("/opt/supervisor", "/state/a", 7)
    assert commands.stop(1.5, sweep=True) == ["/opt/supervisor", "stop", "/state/a", "7", "1500", "sweep"]
    assert commands.run() == ["/opt/supervisor", "run", "/state/a", "7"]
    assert commands.put("/x", mode=0o640, size=3, owner=(1, 2))[1:] == [
        "fenced", "/state/a", "7", "put", "/x", "640", "3", "1:2",
    ]  # fmt: skip
