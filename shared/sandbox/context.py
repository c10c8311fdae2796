"""What a provider plug-in is given when it is made."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shared.errors import SandboxRefusedError
from shared.settings import Settings

MODEL_PORT: Final = 8300
"""On 127.0.0.1 inside a sandbox: where the relay to the model proxy's socket listens."""


TRUSTING_GIT: Final = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
"""Else git refuses a work tree that belongs to another user, as images often have it, and its diff would be empty."""


@dataclass(frozen=True, slots=True)
class ProviderContext:
    """Given to a plug-in's `create(options, context)`.

    `model_socket` is the Unix socket of the model proxy on this machine, null where it has none; `model_url` its
    address on the network.
    """

    name: str
    state_dir: Path
    model_socket: Path | None
    model_url: str

    @classmethod
    def of(cls, name: str, settings: Settings) -> "ProviderContext":
        proxy = settings.services.model_proxy
        socket_path = None if proxy.socket_path is None else proxy.socket_path.absolute()
        return cls(name, settings.state_dir.absolute(), socket_path, settings.services.url_of("model_proxy"))


def check_socket_folder(socket_path: Path) -> None:
    """The folder is mounted into sandboxes, since a restarted proxy makes its socket anew: it may hold nothing else.

    Raises:
        SandboxRefusedError: it is missing, or there is more in it.
    """
    try:
        others = sorted(entry.name for entry in socket_path.parent.iterdir() if entry.name != socket_path.name)
    except OSError as error:
        raise SandboxRefusedError(
            f"The folder of the model proxy's socket, {socket_path.parent}, cannot be read ({error.strerror}): is the"
            " model proxy up?"
        ) from error
    if others:
        raise SandboxRefusedError(
            f"The folder of the model proxy's socket, {socket_path.parent}, is mounted into sandboxes and also holds"
            f" '{others[0]}': give `services.model_proxy.socket_path` a folder of its own."
        )
