"""Signed values: session tokens for the model proxy, and session cookies.

A token is `prefix.claims.signature`, claims as base64url JSON, signature HMAC-SHA256 over the first two
parts. All secrets are derived from the mesh token, so every replica signs and verifies alike.
"""

import base64
import hashlib
import hmac
import time
from typing import Any

import orjson

from shared.contracts.contract import Contract
from shared.errors import UnauthorizedError
from shared.tracing import Trace, trace_from

_TOKEN_PREFIX = "pdk1"


class SessionClaims(Contract):
    """What a session token allows: calls to one model under one key until `expires_at` (Unix seconds).

    `session` tells the calls of one agent session from those of another under the same key. `profile` names
    what the client sends without meaning it (the model proxy's bridge knows the names).
    `max_calls` and `max_output_tokens` bound what the key's agent calls may add up to; null is no bound.
    `trace` is the run's trace context as text: a harness of another maker need not know of it.
    """

    key: str
    model: str
    session: str = ""
    expires_at: float
    profile: str = "openai"
    max_calls: int | None = None
    max_output_tokens: int | None = None
    trace: str = ""


class Signer:
    """Signs and checks with a secret derived from the mesh token for one purpose.

    While a mesh is given a new token, what the `previous` one signed is still accepted.
    """

    def __init__(self, mesh_token: str, purpose: str, *, previous: str | None = None) -> None:
        tokens = [mesh_token] if previous is None else [mesh_token, previous]
        label = f"paddock/{purpose}".encode()
        self._secrets = [hmac.digest(token.encode(), label, hashlib.sha256) for token in tokens]

    def _signature(self, text: str) -> str:
        return _signature(self._secrets[0], text)

    def _signed(self, text: str, signature: str) -> bool:
        """Whether the signature is ours; every secret is tried in constant time."""
        given = signature.encode()
        return any([hmac.compare_digest(given, _signature(secret, text).encode()) for secret in self._secrets])

    def session_token(self, claims: SessionClaims) -> str:
        body = base64.urlsafe_b64encode(claims.model_dump_json().encode()).decode().rstrip("=")
        text = f"{_TOKEN_PREFIX}.{body}"
        return f"{text}.{self._signature(text)}"

    def read_session_token(self, token: str) -> SessionClaims:
        """The claims of a token of ours.

        Raises:
            UnauthorizedError: it is forged, malformed or expired.
        """
        text, _, signature = token.rpartition(".")
        if not self._signed(text, signature):
            raise UnauthorizedError("This session token was not signed by this mesh.")
        claims = SessionClaims.model_validate(_decode(text.partition(".")[2]))
        if claims.expires_at <= time.time():
            raise UnauthorizedError("This session token has expired.")
        return claims

    def cookie(self, session_id: str) -> str:
        return f"{session_id}~{self._signature(session_id)}"

    def read_cookie(self, value: str) -> str | None:
        """The session id of a cookie of ours; None for any other value."""
        session_id, _, signature = value.rpartition("~")
        return session_id if self._signed(session_id, signature) else None


def looks_like_session_token(token: str) -> bool:
    return token.startswith(f"{_TOKEN_PREFIX}.")


def trace_in(token: str) -> Trace | None:
    """The trace of a session token, which need not be genuine: a trace context opens nothing."""
    try:
        return trace_from(_decode(token.split(".")[1])["trace"])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None


def _signature(secret: bytes, text: str) -> str:
    return base64.urlsafe_b64encode(hmac.digest(secret, text.encode(), hashlib.sha256)).decode().rstrip("=")


def _decode(body: str) -> Any:
    return orjson.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
