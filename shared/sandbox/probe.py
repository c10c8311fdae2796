"""What a new sandbox is like inside, asked once with its own user before anything is run in it."""

from dataclasses import dataclass
from typing import Final

from shared.errors import SandboxRefusedError

_FIRST_LINES: Final = 2


@dataclass(frozen=True, slots=True)
class Probe:
    """`kinds`: path → `w` a folder that can be written to, `d` another folder, `x` a program, `f` else, `-` nothing."""

    uid: int
    gid: int
    home: str
    home_kind: str
    kinds: dict[str, str]
    boot: str

    @classmethod
    def parse(cls, text: str, boot: str) -> "Probe":
        """The answer of the supervisor's `check`.

        Raises:
            SandboxRefusedError: it is none: the program does not run there.
        """
        lines = text.splitlines()
        try:
            uid, gid = (int(part) for part in lines[0].split())
            home_kind, _, home = lines[1].partition(" ")
            kinds = {path: kind for kind, _, path in (line.partition(" ") for line in lines[_FIRST_LINES:])}
        except (IndexError, ValueError) as error:
            raise SandboxRefusedError(f"The supervisor gave no answer inside the sandbox: {text[:500]!r}") from error
        return cls(uid, gid, home, home_kind, kinds, boot)
