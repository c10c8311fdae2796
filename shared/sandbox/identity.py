"""What a sandbox in use is known by."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from pydantic import ValidationError

from shared.contracts.contract import Contract
from shared.contracts.sandbox import SandboxPlace
from shared.errors import ProviderLostError

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


class BoxDescriptor(Contract):
    """What another process attaches by; each provider adds how it finds its own. `kind_of_box` is its word for one."""

    kind_of_box: ClassVar[str]

    id: str
    boot: str
    place: SandboxPlace
    env: dict[str, str]
    runtimes: dict[str, str]

    @classmethod
    def read(cls, descriptor: dict[str, Any]) -> Self:
        """Raises ProviderLostError for a descriptor that is none of this provider's."""
        try:
            return cls.model_validate(descriptor)
        except ValidationError as error:
            raise ProviderLostError(
                f"This is no descriptor of a {cls.kind_of_box}: {error.errors()[0]['msg']}."
            ) from error

    def identity(self, provider: str) -> BoxIdentity:
        return BoxIdentity(provider, self.id, self.boot, self.place, self.env, self.runtimes)
