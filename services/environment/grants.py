"""What of the resources' tools is lent to the agent, and how it reaches them."""

from services.environment.parties import Parties, Sessions
from shared.clients.resources import SeededResources
from shared.contracts.agent import HttpToolAccess, McpToolAccess, ToolAccess
from shared.contracts.resources import RESOURCES_SESSION_HEADER
from shared.errors import ProtocolViolationError


def tool_accesses(parties: Parties, sessions: Sessions, seeded: SeededResources) -> list[ToolAccess]:
    """The resources' tools, over the transports that the environment grants.

    Raises:
        ProtocolViolationError: it grants a transport that the resources do not serve.
    """
    tools = seeded.reply.resources_tools
    entry = parties.environment
    accesses: list[ToolAccess] = []
    for transport in entry.tools:
        if transport == "direct_http":
            accesses.append(
                HttpToolAccess(
                    name=f"{entry.resources}_http",
                    base_url=parties.resources.url,
                    cookies=seeded.cookies,
                    tools=tools.http if tools is not None else [],
                )
            )
        elif tools is None or tools.mcp is None:
            raise ProtocolViolationError(
                f"The environment grants MCP tools, but the resources entry '{entry.resources}' lends none."
            )
        else:
            accesses.append(
                McpToolAccess(
                    name=f"{entry.resources}_mcp",
                    url=parties.resources.url + tools.mcp.path,
                    headers={RESOURCES_SESSION_HEADER: next(iter(seeded.cookies.values()), sessions.resources)},
                )
            )
    return accesses
