"""Resources sessions: seed, find, change, close. Every change is a compare-and-set on one record.

A process remembers the records that it wrote or read last, which saves most reads. That is safe because
nothing is decided by memory alone: what changes a session fails when the record has moved on, and is then
decided anew from the store; what is answered without a change (a verdict, a closed session) never changes.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import quote, unquote
from weakref import WeakValueDictionary

from fastapi import Request
from pydantic import ValidationError

from services.resources.entries import Entry
from services.resources.records import SessionRecord, decode, store_key
from shared.contracts.failure import FailureKind, Stage
from shared.contracts.resources import (
    RESOURCES_COOKIE,
    RESOURCES_SESSION_HEADER,
    CloseResourcesReply,
    CloseResourcesRequest,
    SeedResourcesReply,
    SeedResourcesRequest,
)
from shared.errors import BadRowError, ConflictError, FieldProblem, PaddockError, SessionLostError, VersionConflictError
from shared.http.problems import bad_row
from shared.metrics import Metrics
from shared.ports.store import Record, Store
from shared.ports.toolset import Releasing
from shared.redaction import redact
from shared.tokens import Signer

COOKIE_PURPOSE: Final = "resources-session"
REMEMBERED: Final = 2048
REMEMBERED_MAX_BYTES: Final = 65_536


@dataclass(frozen=True, slots=True)
class Found:
    """A session's record as it was in the store, and the version to change it by."""

    session_id: str
    record: SessionRecord
    version: int


class ReleaseError(PaddockError):
    """What a session holds could not be given back; the session stays open."""

    kind = FailureKind.SESSION_RELEASE_FAILED
    status = 502
    terminal = False


class Sessions:
    """The sessions of all entries of this process."""

    def __init__(self, store: Store, metrics: Metrics, mesh_token: str, previous_mesh_token: str | None = None) -> None:
        self.metrics = metrics
        self._store = store
        self._signer = Signer(mesh_token, COOKIE_PURPOSE, previous=previous_mesh_token)
        self._remembered: OrderedDict[str, Record] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def seed(self, entry: Entry, request: SeedResourcesRequest) -> SeedResourcesReply:
        """Open a session; the same request again joins it.

        Raises:
            BadRowError: the task data does not fit the entry's verifier.
            ConflictError: the id belongs to another episode, task or entry, or was closed.
        """
        try:
            entry.verifier.task_data.model_validate(request.task_data)
        except ValidationError as error:
            raise bad_row(error, ("task_data",)) from error
        fresh = SessionRecord(
            entry=entry.name,
            episode=request.episode_id.model_dump(),
            task=request.task_id.model_dump(),
            task_data=request.task_data,
            tools={name: toolset.initial_state(request.task_data) for name, toolset in entry.toolsets.items()},
        )
        session_id = request.resources_session_id
        try:
            value = fresh.encode()
        except TypeError as error:
            problem = FieldProblem(("task_data",), f"cannot be stored: {error}", "not_storable")
            raise BadRowError.of([problem]) from error
        created = await self._store.create(store_key(session_id), value, ttl_s=entry.session_ttl_s)
        if created is None:
            self._join(await self.find(session_id, fresh=True), entry, fresh)
        else:
            self._remember(session_id, created)
            self._count(fresh)
        return SeedResourcesReply(resources_session_id=session_id, resources_tools=entry.offer)

    @staticmethod
    def _join(found: Found, entry: Entry, wanted: SessionRecord) -> None:
        """Pass when the session there is the one that was asked for.

        Raises:
            ConflictError: it is another one, or closed.
        """
        there = found.record
        require_owner(found, entry, wanted.episode)
        if there.state == "closed":
            raise ConflictError(f"The resources session '{found.session_id}' is closed; seed a new id.")
        if there.task != wanted.task:
            raise ConflictError(f"The resources session '{found.session_id}' was seeded with another task.")
        # Compared as the store holds it: what JSON makes equal is equal.
        if there.task_data != decode(wanted.encode()).task_data:
            raise ConflictError(f"The resources session '{found.session_id}' was seeded with other task data.")

    async def find(self, session_id: str, *, fresh: bool = False) -> Found:
        """The session; `fresh` asks the store even when it is remembered here.

        Raises:
            SessionLostError: there is none, or no longer.
        """
        record = None if fresh else self._remembered.get(session_id)
        if record is None:
            record = await self._store.get(store_key(session_id))
            if record is None:
                self._remembered.pop(session_id, None)
                raise SessionLostError(f"There is no resources session '{session_id}'; it may have expired.")
            self._remember(session_id, record)
        return Found(session_id, decode(record.value), record.version)

    async def change(self, entry: Entry, found: Found, record: SessionRecord) -> Found:
        """Put `record` in the place of the one that was found.

        Raises:
            VersionConflictError: it has changed since; find it anew with `fresh`.
        """
        try:
            written = await self._store.replace(
                store_key(found.session_id), record.encode(), version=found.version, ttl_s=entry.session_ttl_s
            )
        except VersionConflictError:
            self._remembered.pop(found.session_id, None)
            raise
        self._remember(found.session_id, written)
        if record.state != found.record.state:
            self._count(record)
        return Found(found.session_id, record, written.version)

    def _count(self, record: SessionRecord) -> None:
        graded = record.state == "open" and record.verdict is not None
        self.metrics.resources_sessions.labels(record.entry, "graded" if graded else record.state).inc()

    async def wait_for_change(self, found: Found, timeout_s: float) -> Found:
        """The session as it is once it has changed, or after `timeout_s`.

        Raises:
            SessionLostError: it is gone.
        """
        await self._store.wait_for_change(store_key(found.session_id), version=found.version, timeout_s=timeout_s)
        return await self.find(found.session_id, fresh=True)

    async def close(
        self, entry: Entry, request: CloseResourcesRequest, stop: Callable[[str], None]
    ) -> CloseResourcesReply:
        """Release the session, fence its id; `stop` ends what runs for it in this process. Idempotent.

        Raises:
            ConflictError: the id belongs to another episode or entry.
            ReleaseError: what it holds could not be given back; it is not closed.
        """
        session_id = request.resources_session_id
        async with self.lock(session_id):
            while True:
                found = await self._found_or_fenced(entry, request)
                require_owner(found, entry, request.episode_id.model_dump())
                if found.record.state != "closed":
                    stop(session_id)
                    await self._release(entry, found)
                    try:
                        found = await self.change(entry, found, found.record.closed())
                    except VersionConflictError:
                        continue
                status = "closed" if found.record.seeded else "unknown"
                return CloseResourcesReply.model_validate({"resources_session_id": session_id, "status": status})

    async def _found_or_fenced(self, entry: Entry, request: CloseResourcesRequest) -> Found:
        session_id = request.resources_session_id
        try:
            return await self.find(session_id)
        except SessionLostError:
            fence = SessionRecord(
                entry=entry.name, episode=request.episode_id.model_dump(), state="closed", seeded=False
            )
            created = await self._store.create(store_key(session_id), fence.encode(), ttl_s=entry.session_ttl_s)
            if created is None:
                return await self.find(session_id, fresh=True)
            self._count(fence)
            return Found(session_id, fence, created.version)

    @staticmethod
    async def _release(entry: Entry, found: Found) -> None:
        for name, toolset in entry.toolsets.items():
            if not isinstance(toolset, Releasing):
                continue
            try:
                async with asyncio.timeout(entry.settings.close_timeout_s):
                    await toolset.release(found.record.tools.get(name, {}))
            except Exception as error:  # a plug-in may raise anything; the session must then stay open
                raise ReleaseError(
                    f"The toolset '{name}' could not release the session: {type(error).__name__}: {redact(str(error))}",
                    stage=Stage.CLEANUP,
                ) from error

    def lock(self, session_id: str) -> asyncio.Lock:
        """One per session and process; spares conflicts between calls that meet here."""
        lock = self._locks.get(session_id)
        if lock is None:
            lock = self._locks[session_id] = asyncio.Lock()
        return lock

    def cookie(self, session_id: str) -> str:
        """The `Set-Cookie` value that names this session."""
        return f"{RESOURCES_COOKIE}={self._signer.cookie(quote(session_id, safe=''))}; Path=/; HttpOnly; SameSite=Lax"

    def named_by(self, request: Request) -> str | None:
        """The session that a request names by its cookie or header; None when it names none.

        Raises:
            SessionLostError: its cookie was not made by this mesh.
        """
        cookie = request.cookies.get(RESOURCES_COOKIE)
        if cookie is not None:
            signed = self._signer.read_cookie(cookie)
            if signed is None:
                raise SessionLostError("The resources session's cookie was not made by this mesh.")
            return unquote(signed)
        header = request.headers.get(RESOURCES_SESSION_HEADER)
        if header is None:
            return None
        signed = self._signer.read_cookie(header)
        return header if signed is None else unquote(signed)

    def _remember(self, session_id: str, record: Record) -> None:
        if len(record.value) > REMEMBERED_MAX_BYTES:
            self._remembered.pop(session_id, None)
            return
        self._remembered[session_id] = record
        self._remembered.move_to_end(session_id)
        if len(self._remembered) > REMEMBERED:
            self._remembered.popitem(last=False)


def require_owner(found: Found, entry: Entry, episode: dict[str, object] | None = None) -> None:
    """Pass when the session belongs to this entry and, if given, to this episode.

    Raises:
        ConflictError: it belongs to another.
    """
    if found.record.entry != entry.name:
        raise ConflictError(
            f"The resources session '{found.session_id}' belongs to the entry '{found.record.entry}',"
            f" not to '{entry.name}'."
        )
    if episode is not None and found.record.episode != episode:
        raise ConflictError(f"The resources session '{found.session_id}' belongs to another episode.")


def require_open(found: Found) -> None:
    """Raises:
    ConflictError: the session is closed or being graded: its tools serve no more calls.
    """
    if found.record.state != "open" or found.record.verdict is not None:
        raise ConflictError(
            f"The resources session '{found.session_id}' is closed or being graded; its tools serve no more calls."
        )


def reopened(record: SessionRecord) -> SessionRecord:
    """The record without the verification that ran."""
    return replace(record, state="open", claim=None)
