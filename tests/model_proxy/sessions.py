"""Calls of an episode's harness: with its session token, in a mesh without a token of its own."""

import time
from typing import Any

import httpx

from shared.tokens import SessionClaims, Signer
from tests.model_proxy.wire import KEY, Proxy, path_of, request_of


def session_token(key: str = KEY, **claims: Any) -> str:
    granted = SessionClaims(key=key, model="policy", expires_at=time.time() + 60, **claims)
    return Signer("", "session-token").session_token(granted)


def as_session(key: str = KEY) -> str:
    """The header line of a raw call."""
    return f"Authorization: Bearer {session_token(key)}"


async def session_call(
    proxy: Proxy, dialect: str = "responses", *, key: str = KEY, fields: dict[str, Any] | None = None, **claims: Any
) -> httpx.Response:
    headers = {"Authorization": f"Bearer {session_token(key, **claims)}"}
    return await proxy.http.post(path_of(dialect, key), json=request_of(dialect) | (fields or {}), headers=headers)
