"""Agent sessions on the wire: seed, activate, close."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from shared.contracts.contract import Contract
from shared.contracts.episode import EpisodeId, TaskId
from shared.contracts.failure import Reason
from shared.contracts.sandbox import SandboxAccess

AGENT_SESSION_HEADER = "X-Agent-Session"
AGENT_COOKIE = "paddock_agent_session"


class HttpToolAccess(Contract):
    """Tools at `POST {base_url}/{tool}`; `tools` are function tools in Responses form."""

    type: Literal["direct_http"] = "direct_http"
    name: Annotated[str, Field(min_length=1)]
    required: bool = True
    base_url: str
    cookies: dict[str, str] = {}
    headers: dict[str, str] = {}
    tools: list[dict[str, Any]] = []


class McpToolAccess(Contract):
    """An MCP server over streamable HTTP; `headers` carry the session."""

    type: Literal["mcp"] = "mcp"
    name: Annotated[str, Field(min_length=1)]
    required: bool = True
    url: str
    headers: dict[str, str] = {}


ToolAccess = Annotated[HttpToolAccess | McpToolAccess, Field(discriminator="type")]


class SeedAgentRequest(Contract):
    agent_session_id: Annotated[str, Field(min_length=1, max_length=200)]
    episode_id: EpisodeId
    task_id: TaskId
    tool_accesses: list[ToolAccess] = []
    sandbox_access: SandboxAccess | None = None
    deadline: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None, description="Seconds the session may live, from the seed."
    )

    @field_validator("tool_accesses")
    @classmethod
    def _unique(cls, accesses: list[ToolAccess]) -> list[ToolAccess]:
        names = [access.name for access in accesses]
        if len(set(names)) != len(names):
            raise ValueError("the names of tool accesses must be unique")
        return accesses


class SeedAgentReply(Contract):
    agent_session_id: str


class CloseAgentRequest(Contract):
    """With `include_response` the receipt also carries the response of a run that had ended by itself."""

    agent_session_id: Annotated[str, Field(min_length=1, max_length=200)]
    episode_id: EpisodeId
    include_response: bool = False


class CleanupReceipt(Contract):
    """The proof of how the harness ended. Only `cleanup_confirmed` = exactly true counts.

    `return_code` is null where it is not known (a fenced worker, an in-process harness);
    `timed_out` is true only when the deadline ended it.
    """

    cleanup_confirmed: bool
    return_code: int | None = None
    error: Reason | None = None
    timed_out: bool = False


class CloseReceipt(Contract):
    """`status` is `unknown` for an id that was never seen; such a receipt fences the id."""

    agent_session_id: str
    status: Literal["closed", "unknown"]
    agent_observations: dict[str, Any] | None = None
    resources_cookies: dict[str, str] | None = None
    partial_response: dict[str, Any] | None = None
    agent_trajectory: dict[str, Any] | None = None
    cleanup: CleanupReceipt
