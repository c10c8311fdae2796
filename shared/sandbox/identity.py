"""What a sandbox in use is known by."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shared.contracts.sandbox import SandboxPlace

Accident = Literal["pause", "resume", "kill", "restart"]
"""What happens to sandboxes from outside."""


@dataclass(frozen=True, slots=True)
class BoxIdentity:
    """What a sandbox is known by: its provider's id, the start that is meant, and what is inside."""

    provider: str
    id: str
    boot: str
    place: SandboxPlace
    env: Mapping[str, str]
    """Added to what its first process has, for commands of its own user."""
    runtimes: Mapping[str, str]
