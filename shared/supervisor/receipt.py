"""What the supervisor answers, how an activation's receipt is read, and what of it proves a cleanup.

Pure. The other side is `answer.c` and `receipt.c`. In a sandbox where the harness runs as the supervisor's user it can
write whatever stands here, so nothing is believed that is not signed with the key which only the supervisor was sent.
"""

import hashlib
import hmac
from dataclasses import dataclass
from typing import Any, Literal, Self

import orjson
from pydantic import StrictBool, ValidationError

from shared.contracts.contract import Contract
from shared.supervisor.protocol import Survivors

State = Literal["absent", "closed", "fenced", "starting", "running", "stopping",
                "exited", "stopped", "deadline", "launch_failed", "lost"]  # fmt: skip
"""`absent`: never launched. `closed`: the folder was removed, and nothing is launched there any more. `lost`: it was
launched, and both supervisor and receipt are gone, or the harness killed its supervisor."""

Signature = Literal["valid", "absent", "forged"]

_SIGNATURE = b',"mac":'


class AnswerError(ValueError):
    """What a command gave is no answer of the supervisor: cut off, or not from it."""


class ProcessId(Contract):
    """One process: a pid alone is used again, with the start time (clock ticks after boot) it is not."""

    pid: int
    start: int


class ListedProcess(ProcessId):
    """`uid` is -1 where it could not be told."""

    uid: int
    comm: str


class StreamReceipt(Contract):
    """One output: bytes that came, and how many stand in its file from the start and, behind a gap, from the end.
    `errno` is the first failure of writing it, 0 for none."""

    total: int
    head: int
    tail: int
    errno: int

    @property
    def dropped(self) -> int:
        return self.total - self.head - self.tail


class Receipt(Contract):
    """How an activation ended. Only the first three are required; whatever else is missing or malformed is null, and
    named in `gaps`. `exit_code` is null for what never ran. The counts go on where the lists are capped."""

    v: Literal[1]
    state: Literal["fenced", "exited", "stopped", "deadline", "launch_failed", "lost"]
    cleanup_confirmed: StrictBool
    timed_out: bool | None = None
    reason: str | None = None
    id: str | None = None
    nonce: str | None = None
    uid: int | None = None
    policy: Survivors | None = None
    supervisor: ProcessId | None = None
    worker: ProcessId | None = None
    exit_code: int | None = None
    signal: int | None = None
    errno: int | None = None
    problem: str | None = None
    started_at: float | None = None
    ended_at: float | None = None
    oom_score_adj: int | None = None
    oom_kill_delta: int | None = None
    stdout: StreamReceipt | None = None
    stderr: StreamReceipt | None = None
    tree_empty: bool | None = None
    killed: int | None = None
    reaped: int | None = None
    marker_killed: int | None = None
    eperm: int | None = None
    remaining_count: int | None = None
    remaining: tuple[ListedProcess, ...] | None = None
    unaccounted_count: int | None = None
    unaccounted: tuple[ListedProcess, ...] | None = None
    survivors_count: int | None = None
    survivors: tuple[ListedProcess, ...] | None = None
    kills_count: int | None = None
    kills: tuple[ListedProcess, ...] | None = None
    mac: str | None = None
    gaps: tuple[str, ...] = ()

    @classmethod
    def read(cls, line: bytes) -> Self:
        """The receipt in one line of JSON.

        Raises:
            AnswerError: it is no object, or version, state or confirmation is missing or malformed.
        """
        try:
            found: Any = orjson.loads(line)
            wrong = _wrong_fields(cls, found)
            kept = {name: value for name, value in found.items() if name not in wrong}
            return cls.model_validate_json(orjson.dumps({**kept, "gaps": sorted(wrong)}), strict=True)
        except (ValueError, AttributeError, TypeError) as error:
            raise AnswerError(f"this is no receipt: {line[:200]!r}") from error


def _wrong_fields(model: type[Contract], found: Any) -> set[str]:
    """The top-level fields that do not fit or are not known; `gaps` is ours to write."""
    wrong = {"gaps"} & set(found)
    try:
        model.model_validate_json(orjson.dumps(found), strict=True)
    except ValidationError as error:
        wrong |= {str(item["loc"][0]) for item in error.errors() if item["loc"]}
    return wrong


def signature_of(line: bytes, key: bytes) -> Signature:
    """Whether a receipt's line was signed with the key: over its exact bytes up to the signature."""
    signed, _, signature = line.rpartition(_SIGNATURE)
    if signature in {b"null}", b""}:
        return "absent"
    right = b'"%s"}' % hmac.digest(key, signed, hashlib.sha256).hex().encode()
    return "valid" if hmac.compare_digest(signature, right) else "forged"


class _Line(Contract):
    v: Literal[1]
    state: State
    live: bool
    fence: int


class Detail(Contract):
    """What the supervisor wrote of itself while it ran: for diagnosis, proof of nothing."""

    v: Literal[1]
    state: State
    id: str
    nonce: str
    guardian: ProcessId | None
    supervisor: ProcessId | None
    worker: ProcessId | None
    started_at: float | None


@dataclass(frozen=True, slots=True)
class Answer:
    """How an activation stands. `receipt_line` is the receipt byte for byte, null where there is none yet. `left` is
    what `verify` found beside the survivors; null when nothing was looked for, or nothing could be found out."""

    state: State
    live: bool
    fence: int
    detail: Detail | None
    receipt_line: bytes | None
    left: tuple[str, ...] | None = None

    @classmethod
    def read(cls, output: bytes) -> Self:
        """The standard output of a command on a folder.

        Raises:
            AnswerError: it is not whole, or not the supervisor's.
        """
        lines = output.split(b"\n")
        if len(lines) not in {4, 5} or lines.pop():  # the last one, too, ends with a newline
            raise AnswerError(f"this is no whole answer of a supervisor: {output[:200]!r}")
        try:
            line = _Line.model_validate_json(lines[0], strict=True)
        except ValidationError as error:
            raise AnswerError(f"this is no answer of a supervisor: {output[:200]!r}") from error
        receipt = None if lines[2] == b"null" else lines[2]
        left = _read_left(lines[3]) if len(lines) == 4 else None
        return cls(line.state, line.live, line.fence, _read_detail(lines[1]), receipt, left)


def _read_detail(line: bytes) -> Detail | None:
    try:
        return Detail.model_validate_json(line, strict=True)
    except ValidationError:
        return None


def _read_left(line: bytes) -> tuple[str, ...] | None:
    try:
        return tuple(f"{item['comm']} ({item['pid']})" for item in orjson.loads(line))
    except (ValueError, TypeError, KeyError):
        return None


Finding = Literal["confirmed", "negative", "missing"]
"""`negative`: the supervisor says that the cleanup did not succeed, or what says so is not the supervisor's: final,
the sandbox is not graded and its owner destroys it. `missing`: there is no proof either way; ask again."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What an answer proves; `why` is a sentence when it is not confirmed. A receipt is there unless it is missing."""

    finding: Finding
    why: str = ""
    receipt: Receipt | None = None

    @property
    def confirmed(self) -> bool:
        return self.finding == "confirmed"


def proof_of(answer: Answer, *, activation_id: str, key: bytes | None, policy: Survivors, launch_seen: bool) -> Proof:
    """Whether everything that the activation started is gone, but for survivors that the policy allows.

    `launch_seen`: the caller was told that the harness ran. What then looks as if it never had is forged.
    """
    if answer.receipt_line is None:
        return _without_receipt(answer, launch_seen)
    try:
        receipt = Receipt.read(answer.receipt_line)
    except AnswerError as error:
        return Proof("missing", str(error))
    if key is not None and (why := _not_signed(answer.receipt_line, receipt, key)):
        return Proof("negative", why, receipt)
    why = _not_of_this_run(receipt, activation_id, launch_seen) or _not_clean(receipt, policy)
    return Proof("negative", why, receipt) if why else Proof("confirmed", receipt=receipt)


def _without_receipt(answer: Answer, launch_seen: bool) -> Proof:
    if launch_seen and answer.state in {"absent", "closed", "fenced"}:
        return Proof("negative", f"The harness ran, and now its folder says '{answer.state}': somebody changed it.")
    if answer.state == "lost":
        return Proof("missing", "Supervisor and guardian are gone and left no receipt.")
    return Proof("missing", f"There is no receipt; the activation is '{answer.state}'.")


def _not_signed(line: bytes, receipt: Receipt, key: bytes) -> str:
    """Receipts of a stop before the launch and of a sweep are written by commands that know no key."""
    signature = signature_of(line, key)
    if signature == "forged" or (signature == "absent" and receipt.state not in {"fenced", "lost"}):
        return f"The receipt's signature is {signature}: the supervisor has not written it."
    return ""


def _not_of_this_run(receipt: Receipt, activation_id: str, launch_seen: bool) -> str:
    if receipt.state == "fenced":
        return "The harness ran, and the receipt says that it never did." if launch_seen else ""
    if receipt.state != "lost" and receipt.id != activation_id:
        return f"The receipt is of activation '{receipt.id}'."
    return ""


def _not_clean(receipt: Receipt, policy: Survivors) -> str:
    """The supervisor's own judgement decides; what contradicts it outweighs it."""
    if receipt.cleanup_confirmed is not True or receipt.state == "lost":
        names = ", ".join(f"{process.comm} ({process.pid})" for process in receipt.remaining or ())
        return f"The cleanup is not proven: {receipt.reason or receipt.state}{f', left: {names}' if names else ''}."
    if receipt.state == "fenced":
        return ""
    if receipt.remaining_count:
        return f"The receipt says that {receipt.remaining_count} processes are left."
    if policy == "drain" and (receipt.survivors_count or receipt.tree_empty is False):
        return "The receipt says that processes live on, which the policy does not allow."
    if receipt.policy is not None and receipt.policy != policy:
        return f"The harness ran under the policy '{receipt.policy}', not '{policy}'."
    return ""
