"""The resources server, as its callers see it: one method per route."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shared.contracts.resources import (
    CloseResourcesReply,
    CloseResourcesRequest,
    SeedResourcesReply,
    SeedResourcesRequest,
    Verdict,
)
from shared.errors import ProtocolViolationError
from shared.http.client import HttpClient

SERVICE: Final = "resources"


@dataclass(frozen=True, slots=True)
class SeededResources:
    reply: SeedResourcesReply
    cookies: dict[str, str]


@dataclass(frozen=True, slots=True)
class Verified:
    """`raw` is the verdict as it came; `verdict` the same, read."""

    raw: bytes
    verdict: Verdict


class ResourcesClient:
    """One configured resources entry at `{server}/{entry}`."""

    def __init__(self, http: HttpClient, server_url: str, entry: str) -> None:
        self._http = http
        self.url = f"{server_url}/{entry}"

    async def seed(self, request: SeedResourcesRequest, *, timeout_s: float) -> SeededResources:
        """Open a session; the same request again joins it."""
        reply = await self._http.request(
            "POST",
            f"{self.url}/seed_session",
            service=SERVICE,
            timeout_s=timeout_s,
            body=request.model_dump_json().encode(),
            replayable=True,
        )
        seeded = SeedResourcesReply.model_validate_json(reply.body)
        if seeded.resources_session_id != request.resources_session_id:
            raise ProtocolViolationError("The resources' seed reply names another session.")
        if not reply.cookies:
            raise ProtocolViolationError("The resources' seed reply sets no session cookie.")
        return SeededResources(seeded, reply.cookies)

    async def verify(self, body: bytes, *, cookies: Mapping[str, str], timeout_s: float) -> Verified:
        """Grade; the same session again replays the stored verdict."""
        reply = await self._http.request(
            "POST",
            f"{self.url}/verify",
            service=SERVICE,
            timeout_s=timeout_s,
            body=body,
            cookies=cookies,
            replayable=True,
        )
        return Verified(reply.body, Verdict.model_validate_json(reply.body))

    async def close(
        self, request: CloseResourcesRequest, *, cookies: Mapping[str, str], timeout_s: float
    ) -> CloseResourcesReply:
        """Release the session; idempotent, also for an unknown id."""
        reply = await self._http.request(
            "POST",
            f"{self.url}/close_session",
            service=SERVICE,
            timeout_s=timeout_s,
            body=request.model_dump_json().encode(),
            cookies=cookies,
            replayable=True,
        )
        return CloseResourcesReply.model_validate_json(reply.body)

    async def aggregate_metrics(self, body: bytes, *, timeout_s: float) -> bytes:
        """Metrics over many results, as the entry's verifier defines them."""
        reply = await self._http.request(
            "POST", f"{self.url}/aggregate_metrics", service=SERVICE, timeout_s=timeout_s, body=body, replayable=True
        )
        return reply.body
