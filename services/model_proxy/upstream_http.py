"""What upstreams over HTTP share: options, one pooled client of our own, and the mapping of its errors.

No plug-in. It never repeats a request that a server may have begun to answer; see `HttpUpstream.send`.
Bodies travel as raw bytes; our own key is blanked out where a server echoes it.
"""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Final, Self
from urllib.parse import urlsplit

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, field_validator, model_validator

from shared.http.http1 import Http1Client, Target
from shared.http.http1_reply import Http1Error, Http1Reply, Http1TimeoutError
from shared.ports.upstream import (
    UpstreamBrokenError,
    UpstreamCall,
    UpstreamDialect,
    UpstreamError,
    UpstreamTimeoutError,
    UpstreamUnreachableError,
)
from shared.redaction import hide
from shared.settings import Seconds
from shared.tracing import trace_headers

CONNECT_TIMEOUT_S: Final = 5.0
# Shorter than servers usually keep an idle connection, so that we mostly close first.
KEEP_ALIVE_S: Final = 15.0
RECONNECT_PAUSE_S: Final = 0.1
# A shorter key would blank out innocent text.
_KEY_MIN_CHARS: Final = 8
_BLANK: Final = b"[credential]"


def _base_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{value!r} is no http:// or https:// address")
    for path in ("/chat/completions", "/responses"):
        if parts.path.rstrip("/").endswith(path):
            raise ValueError(f"{value!r} already ends in {path}: give the address before it, usually ending in /v1")
    return value.rstrip("/")


def _base_urls(value: str | list[str]) -> str | list[str]:
    if not value:
        raise ValueError("no address is given")
    return _base_url(value) if isinstance(value, str) else [_base_url(url) for url in value]


class HttpOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    base_url: Annotated[str | list[str], AfterValidator(_base_urls)]
    """Address before `/chat/completions` or `/responses`, usually ending in `/v1`; several for several servers."""
    api_key_env: str | None = None
    """Environment variable that holds the server's API key."""
    api_key_file: Path | None = None
    """File that holds the server's API key."""
    timeout_s: Seconds = 1800.0
    """Longest silence: before the first byte of an answer, and between two."""
    total_timeout_s: Seconds = 7200.0
    """Longest call in all."""
    trace_context: bool = True
    """Send the W3C headers `traceparent` and `tracestate` along, which put the server's own spans into the trace."""

    @field_validator("api_key_env")
    @classmethod
    def _variable_is_set(cls, value: str | None) -> str | None:
        if value is not None and not os.environ.get(value):
            raise ValueError(f"the environment variable {value} is not set; set it to the server's API key")
        return value

    @field_validator("api_key_file")
    @classmethod
    def _file_is_readable(cls, value: Path | None) -> Path | None:
        if value is None:
            return value
        try:
            text = value.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot be read: {error}") from error
        if not text:
            raise ValueError(f"{value} is empty; it must hold the server's API key")
        return value

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        if self.api_key_env is not None and self.api_key_file is not None:
            raise ValueError("api_key_env and api_key_file are both set: give one of them")
        return self

    @property
    def base_urls(self) -> list[str]:
        return [self.base_url] if isinstance(self.base_url, str) else list(self.base_url)

    def api_key(self) -> str | None:
        if self.api_key_env is not None:
            return os.environ.get(self.api_key_env)
        return None if self.api_key_file is None else self.api_key_file.read_text(encoding="utf-8").strip()


class HttpReply:
    """Implements `shared.ports.upstream.UpstreamReply`."""

    def __init__(self, reply: Http1Reply, attempts: int, key: bytes | None) -> None:
        self.status = reply.status
        self.headers = blanked_headers(reply.headers, key)
        self.attempts = attempts
        self._reply = reply
        self._key = key

    async def read(self) -> bytes:
        try:
            return blanked(await self._reply.read(), self._key)
        except Http1Error as error:
            raise translated(error) from error

    def chunks(self) -> AsyncIterator[bytes]:
        return _Chunks(self._reply, self._key)

    async def close(self) -> None:
        self._reply.close()


class _Chunks:
    """The body as it arrives. A plain iterator, so that nothing is left suspended when it is given up.

    The end of a piece that may be the beginning of our key is held back until the next piece tells.
    """

    def __init__(self, reply: Http1Reply, key: bytes | None) -> None:
        self._reply = reply
        self._key = key
        self._held = b""
        self._error: Http1Error | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while self._error is None:
            piece = await self._next_piece()
            if released := self._released(piece):
                return released
            if not piece and not self._broken:
                raise StopAsyncIteration
        raise translated(self._error) from self._error

    @property
    def _broken(self) -> bool:
        return self._error is not None

    async def _next_piece(self) -> bytes:
        """Empty at the end, and when the connection broke: what is held goes out before that is told."""
        try:
            return await self._reply.next_piece()
        except Http1Error as error:
            self._error = error
            return b""

    def _released(self, piece: bytes) -> bytes:
        body, self._held = blanked(self._held + piece, self._key), b""
        if self._key is None or not piece:
            return body
        for size in range(min(len(self._key) - 1, len(body)), 0, -1):
            if body.endswith(self._key[:size]):
                self._held = body[-size:]
                return body[:-size]
        return body


class HttpUpstream:
    """Implements `shared.ports.upstream.Upstream` for one model's servers."""

    def __init__(self, options: HttpOptions, *, dialect: UpstreamDialect, path: str) -> None:
        self.dialect: UpstreamDialect = dialect
        self._options = options
        key = options.api_key()
        self._key = key.encode() if key is not None and len(key) >= _KEY_MIN_CHARS else None
        headers = {"content-type": "application/json", "accept-encoding": "identity", "user-agent": "paddock"}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        hide(key)
        self._targets = {url: Target.of("POST", url + path, headers) for url in options.base_urls}
        self._client = Http1Client(connect_timeout_s=CONNECT_TIMEOUT_S, keep_alive_s=KEEP_ALIVE_S)

    async def send(self, call: UpstreamCall) -> HttpReply:
        """Post and wait for the answer's head.

        Repeated only where it cannot be answered twice by the same server: the next server, then once more
        the first, when a connection was refused; and on a new connection when the server closed an idle one
        in the moment in which it was used again and sent no byte.
        """
        body = call.exact if call.exact is not None else orjson.dumps(call.body)
        targets = self._ordered(call.key)
        for attempt, target in enumerate([*targets, targets[0]], start=1):
            try:
                return await self._post(target, body, attempt)
            except UpstreamUnreachableError:
                if attempt > len(targets):
                    raise
                if attempt == len(targets):
                    await asyncio.sleep(RECONNECT_PAUSE_S)
        raise AssertionError("the last attempt returns or raises")

    async def close(self) -> None:
        self._client.close()

    def _ordered(self, key: str) -> list[Target]:
        """Rendezvous hashing: a key keeps its server, and with it the server's prefix cache, while that lives."""
        if len(self._targets) == 1:
            return [*self._targets.values()]
        scores = {url: hashlib.blake2b(f"{key} {url}".encode(), digest_size=8).digest() for url in self._targets}
        return [self._targets[url] for url in sorted(self._targets, key=scores.__getitem__)]

    async def _post(self, target: Target, body: bytes, attempt: int) -> HttpReply:
        try:
            return await self._sent(target, body, attempt, fresh=False)
        except Http1Error as error:
            if not error.stale:
                raise translated(error, attempt) from error
        try:
            return await self._sent(target, body, attempt + 1, fresh=True)
        except Http1Error as error:
            raise translated(error, attempt + 1) from error

    async def _sent(self, target: Target, body: bytes, attempt: int, *, fresh: bool) -> HttpReply:
        options = self._options
        if options.trace_context:
            target = target.with_headers(trace_headers())
        reply = await self._client.send(
            target, body, silence_s=options.timeout_s, total_s=options.total_timeout_s, fresh=fresh
        )
        return HttpReply(reply, attempt, self._key)


def blanked(body: bytes, key: bytes | None) -> bytes:
    """The bytes without our own key."""
    return body.replace(key, _BLANK) if key is not None and key in body else body


def blanked_headers(headers: dict[str, str], key: bytes | None) -> dict[str, str]:
    """The headers without our own key."""
    if key is None:
        return headers
    return {name: value.replace(key.decode(), _BLANK.decode()) for name, value in headers.items()}


def translated(error: Http1Error, attempts: int = 1) -> UpstreamError:
    """The client's error → the port's; raise it `from` the original."""
    known: UpstreamError
    if not error.connected:
        known = UpstreamUnreachableError(str(error))
    elif isinstance(error, Http1TimeoutError):
        known = UpstreamTimeoutError(str(error))
    else:
        known = UpstreamBrokenError(str(error))
    known.attempts = attempts
    return known
