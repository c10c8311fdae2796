"""The `Prefer` header (RFC 7240): `respond-async` and `wait=N`."""

import math
import re
from dataclasses import dataclass

from starlette.datastructures import Headers

_WAIT = re.compile(r"(?i)(?:^|[,;\s])wait\s*=\s*\"?(\d{1,7})")
_ASYNC = re.compile(r"(?i)(?:^|[,\s])respond-async(?:$|[,;\s])")


@dataclass(frozen=True, slots=True)
class Prefer:
    """`wait_s` is None where the client named no wait."""

    respond_async: bool
    wait_s: float | None

    @property
    def longest_wait_s(self) -> float:
        """How long an answer may be held back: as long as it takes, unless the client said otherwise."""
        if self.wait_s is not None:
            return self.wait_s
        return 0.0 if self.respond_async else math.inf


def read_prefer(headers: Headers) -> Prefer:
    value = headers.get("prefer", "")
    wait = _WAIT.search(value)
    return Prefer(bool(_ASYNC.search(value)), float(wait.group(1)) if wait else None)
