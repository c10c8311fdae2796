"""One model call's record while the call goes on."""

import secrets
import time
from dataclasses import dataclass
from typing import Any

from services.model_proxy.access import Caller
from services.model_proxy.conversation import Answer, Conversation
from services.model_proxy.failures import ModelCallError
from shared.contracts.capture import Dialect, ErrorCategory
from shared.contracts.failure import EXCERPT_MAX_CHARS
from shared.redaction import redact


@dataclass(slots=True)
class Record:
    """The fields of `ModelCall` as the call goes on. `begun`: its capture may tell that it began."""

    facts: dict[str, Any]
    request: bytes | None
    begun: bool = False
    response: bytes | None = None

    @property
    def failed(self) -> bool:
        """Whether the call ended without a whole answer."""
        return self.facts.get("error_category") not in (None, ErrorCategory.INCOMPLETE)

    def take_conversation(self, conversation: Conversation) -> None:
        self.facts |= {"effective": conversation.effective, "dropped_fields": conversation.dropped}

    def take(self, answer: Answer) -> None:
        facts = answer.facts
        self.response = answer.body
        self.facts |= {
            "response_id": facts.response_id,
            "response_status": facts.response_status,
            "output_ids": facts.output_ids,
            "call_ids": facts.call_ids,
            "usage": facts.usage,
        }
        if facts.response_status == "incomplete":
            self.facts["error_category"] = ErrorCategory.INCOMPLETE
        elif facts.failure is not None:
            self.fail(facts.failure.category, facts.failure.code, facts.failure.message)

    def fail(self, category: ErrorCategory, code: str | None, text: str) -> None:
        excerpt = redact(text)[:EXCERPT_MAX_CHARS]
        self.facts |= {"error_category": category, "error_code": code, "error_excerpt": excerpt}

    def fail_with(self, error: ModelCallError) -> None:
        self.fail(error.category, error.code, error.message)

    def end(self, status: int | None) -> None:
        self.facts |= {"status": status, "ended_at": time.time()}

    def note_first_byte(self) -> None:
        """Only the first note counts."""
        self.facts.setdefault("first_byte_at", time.time())


def new_record(caller: Caller, dialect: Dialect, model: str, request: bytes, *, stream: bool, instance: str) -> Record:
    return Record(
        {
            "call_id": f"call_{secrets.token_hex(12)}",
            "phase": caller.phase,
            "session": caller.session,
            "instance": instance,
            "dialect": dialect,
            "model": model,
            "stream": stream,
            "started_at": time.time(),
            "attempts": 0,
        },
        request,
    )
