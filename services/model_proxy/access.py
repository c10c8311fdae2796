"""Who calls: the harness of an episode with its session token, or a service of the mesh for an episode's key.

Whether the key is sealed is the capture's affair.
"""

import re
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Scope

from services.model_proxy.bridge.capabilities import PROFILES, Profile
from shared.contracts.capture import Phase
from shared.errors import ForbiddenError, NotFoundError, UnauthorizedError
from shared.http.service import bearer, mesh_token_of, over_socket, previous_mesh_token_of, require_token
from shared.settings import Settings
from shared.tokens import Signer, looks_like_session_token, trace_in
from shared.tracing import TRACEPARENT, current_trace

# Wider than rollout ids with their attempts: a judge or a person may choose a key of their own.
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,249}")

DEFAULT_PROFILE = PROFILES["openai"]


@dataclass(frozen=True, slots=True)
class Caller:
    """`model` is the only one that a session token allows; null means any."""

    key: str
    phase: Phase
    model: str | None
    profile: Profile
    session: str = ""
    max_calls: int | None = None
    max_output_tokens: int | None = None


def require_key(key: str) -> None:
    """
    Raises:
        NotFoundError: no episode can have this key.
    """
    if not _KEY.fullmatch(key):
        raise NotFoundError(f"No episode has the key {key!r}: keys hold letters, digits, '.', '_' and '-'.")


def _with_bearer(headers: Headers) -> Headers:
    """Clients of the Messages API may send their token in a header of its own."""
    token = headers.get("x-api-key")
    return headers if token is None or "authorization" in headers else Headers({"authorization": f"Bearer {token}"})


def _join_trace(headers: Headers) -> None:
    """A harness of another maker sends no trace context: its token says where it belongs."""
    if TRACEPARENT in headers:
        return
    token = bearer(_with_bearer(headers)) or ""
    trace = trace_in(token) if looks_like_session_token(token) else None
    current_trace.set(trace or current_trace.get())


class Access:
    def __init__(self, settings: Settings) -> None:
        self._mesh_token = mesh_token_of(settings)
        self._previous = previous_mesh_token_of(settings)
        self._signer = Signer(self._mesh_token or "", "session-token", previous=self._previous)

    def authorize(self, scope: Scope, headers: Headers) -> None:
        """The check before any route. Model calls are checked by `caller`, which knows their key.

        Raises:
            UnauthorizedError: the mesh token is missing.
            ForbiddenError: a session token may only call models, and the socket is for session tokens only.
        """
        path = scope["path"]
        if over_socket(scope):
            if not path.startswith("/v1/"):
                raise ForbiddenError("This socket serves models below /v1 and nothing else.")
            if not looks_like_session_token(bearer(_with_bearer(headers)) or ""):
                raise UnauthorizedError("This socket serves an episode's session token only.")
            _join_trace(headers)
            return
        if path.startswith(("/v1/", "/rollouts/")):
            _join_trace(headers)
            return
        if looks_like_session_token(bearer(headers) or ""):
            raise ForbiddenError("A session token can only call the models of its own episode.")
        require_token(headers, self._mesh_token, self._previous)

    def is_mesh(self, headers: Headers) -> bool:
        """Whether a service of the mesh calls, and not a harness with its session token.

        Raises:
            UnauthorizedError: it carries neither.
        """
        headers = _with_bearer(headers)
        if looks_like_session_token(bearer(headers) or ""):
            return False
        require_token(headers, self._mesh_token, self._previous)
        return True

    def caller(self, headers: Headers, key: str | None) -> Caller:
        """Who makes this model call; `key` is that of the path's `/rollouts/{key}` prefix, if it has one.

        Without a configured mesh token, any other bearer is as good as none: OpenAI clients always send one.

        Raises:
            NotFoundError: no episode can have this key.
            UnauthorizedError: no token that opens models, or one that is forged or has expired.
            ForbiddenError: a session token under another key's prefix.
        """
        headers = _with_bearer(headers)
        token = bearer(headers)
        if token is not None and looks_like_session_token(token):
            claims = self._signer.read_session_token(token)
            if key is not None and key != claims.key:
                raise ForbiddenError(f"This session token belongs to another episode than '{key}'.")
            profile = PROFILES.get(claims.profile, DEFAULT_PROFILE)
            bounds = (claims.max_calls, claims.max_output_tokens)
            return Caller(claims.key, "agent", claims.model, profile, claims.session, *bounds)
        require_token(headers, self._mesh_token, self._previous)
        if key is None:
            raise UnauthorizedError(
                "A model call needs an episode: send a session token, or call /rollouts/KEY/v1 instead of /v1."
            )
        require_key(key)
        return Caller(key, "verify", None, DEFAULT_PROFILE)
