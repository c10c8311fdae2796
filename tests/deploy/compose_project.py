"""One Compose project of the shipped `docker-compose.yml`, under a name and a port of its own."""

import json
import os
import secrets
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TREE = Path(__file__).parents[2]
IMAGE = "paddock/mesh:test"
SERVICES = ("environment", "agent", "model-proxy", "resources")


def run(*command: str, timeout_s: float = 60, **environ: str) -> str:
    """What the command prints.

    Raises:
        AssertionError: it failed; with all that it said.
    """
    done = subprocess.run(
        command,
        env={**os.environ, **environ},
        cwd=TREE,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True)
class ComposeProject:
    name: str
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def compose(self, *arguments: str, timeout_s: float = 120) -> str:
        return run(
            "docker", "compose", "--project-name", self.name, *arguments,
            timeout_s=timeout_s, PADDOCK_PORT=str(self.port), PADDOCK_IMAGE=IMAGE,
            PADDOCK_MODEL_BASE_URL="", PADDOCK_MODEL_API_KEY="", PADDOCK_MODEL_NAME="", PADDOCK_MESH_TOKEN="",
        )  # fmt: skip

    def inside(self, service: str, program: str) -> str:
        """What a Python program prints that runs in the service's container."""
        return self.compose("exec", "-T", service, "python3", "-c", program).strip()

    def container(self, service: str) -> dict[str, Any]:
        """The engine's own description of the service's container."""
        identity = self.compose("ps", "--all", "--quiet", service).strip()
        described: dict[str, Any] = json.loads(run("docker", "inspect", identity))[0]
        return described

    def is_closed_in(self, service: str) -> bool:
        """Whether all networks of the service's container are ones that the engine lets nothing out of."""
        names = self.container(service)["NetworkSettings"]["Networks"]
        networks = json.loads(run("docker", "network", "inspect", *names))
        return bool(networks) and all(network["Internal"] for network in networks)

    def left(self) -> list[str]:
        """Containers, volumes and networks that carry the project's label."""
        label = ("--filter", f"label=com.docker.compose.project={self.name}")
        return [
            *run("docker", "ps", "--all", "--quiet", *label).split(),
            *run("docker", "volume", "ls", "--quiet", *label).split(),
            *run("docker", "network", "ls", "--quiet", *label).split(),
        ]


@contextmanager
def compose_project() -> Iterator[ComposeProject]:
    """The mesh, built and ready; taken down at the end, whatever happened."""
    project = ComposeProject(f"paddock-test-{secrets.token_hex(4)}", free_port())
    try:
        project.compose("build", timeout_s=480)
        project.compose("up", "--wait", "--wait-timeout", "90")
        yield project
    except AssertionError as error:
        error.add_note(project.compose("logs", "--no-color", "--tail", "50"))
        raise
    finally:
        project.compose("down", "--volumes", "--timeout", "20")
