"""An MCP server over stdio that the CLI starts: `python notes_server.py PICTURE`."""

import sys
from pathlib import Path

from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("notes")


@server.tool()
def add(first: int, second: int) -> int:
    """Adds two numbers."""
    return first + second


@server.tool()
def burn() -> str:
    """Always fails."""
    raise ValueError("the note is on fire")


@server.tool()
def draw() -> Image:
    """Gives a picture."""
    return Image(data=Path(sys.argv[1]).read_bytes(), format="png")


if __name__ == "__main__":
    server.run()
