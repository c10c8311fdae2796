"""Resources sessions on the wire: seed, verify, close, tools."""

from typing import Annotated, Any, Literal

from pydantic import Field

from shared.contracts.contract import Contract, OpenContract
from shared.contracts.episode import EpisodeId, TaskId
from shared.contracts.failure import FailureKind, Reason
from shared.contracts.sandbox import SandboxAccess

RESOURCES_SESSION_HEADER = "X-Resources-Session"
RESOURCES_COOKIE = "paddock_resources_session"

ReverifyMode = Literal["stateless", "unsupported", "unknown"]


class McpMetadata(Contract):
    transport: Literal["http"] = "http"
    path: str = Field(description="Below the resources entry's own address, e.g. `/mcp`.")


class ResourcesTools(Contract):
    """What the session lends: function tools by HTTP, and the same tools as MCP."""

    http: list[dict[str, Any]] = []
    mcp: McpMetadata | None = None


class SeedResourcesRequest(Contract):
    resources_session_id: Annotated[str, Field(min_length=1, max_length=200)]
    episode_id: EpisodeId
    task_id: TaskId
    task_data: dict[str, Any]


class SeedResourcesReply(Contract):
    resources_session_id: str
    sandbox_access: SandboxAccess | None = None
    resources_tools: ResourcesTools | None = None


class VerifyRequest(OpenContract):
    """Flat: the task data's fields lie beside these two."""

    responses_create_params: dict[str, Any]
    response: dict[str, Any]


class Verdict(OpenContract):
    """A verifier's word. Its own fields lie beside these and travel into the result.

    With `mask_sample` the reward is a gap in coverage, not a score.
    """

    reward: Annotated[float, Field(allow_inf_nan=False)]
    mask_sample: bool = False
    reward_components: dict[str, float] | None = None
    failure_kind: FailureKind | None = None
    failure_reason: Reason | None = None


class CloseResourcesRequest(Contract):
    resources_session_id: Annotated[str, Field(min_length=1, max_length=200)]
    episode_id: EpisodeId


class CloseResourcesReply(Contract):
    resources_session_id: str
    status: Literal["closed", "unknown"]


class ReverifyModeReply(Contract):
    reverify_mode: ReverifyMode
