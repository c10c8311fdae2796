"""One Compose project of the shipped `docker-compose.yml`, under a name and a port of its own."""

import json
import os
import secrets
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TREE = Path(__file__).parents[2]
IMAGE = "paddock/mesh:test"
SERVICES = ("environment", "agent", "model-proxy", "resources")
BESIDE = {"balancer": "haproxy", "redis": "redis-server"}
"""Containers beside the services, and the Debian packages from which they are made here: no registry is needed."""
BUILD_S = 480.0
READY_S = 240


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


def image_of(container: str) -> str:
    return f"paddock/{container}:test"


def build_images() -> None:
    """All images under names of the tests; quick when nothing has changed."""
    base = os.environ.get("PADDOCK_BASE_IMAGE", "debian:bookworm-slim")
    bundle = os.environ.get("PADDOCK_BUILD_CA", os.devnull)
    for container, package in BESIDE.items():
        run(
            *("docker", "build", "--quiet", "--tag", image_of(container), "--secret", f"id=build_ca,src={bundle}"),
            *("--build-arg", f"BASE={base}", "--build-arg", f"PACKAGE={package}"),
            *("--build-arg", f"ACCOUNT={package.removesuffix('-server')}"),
            *("--file", "deploy/package.Dockerfile", "deploy/balancer"),
            timeout_s=BUILD_S,
        )
    run("docker", "compose", "build", timeout_s=BUILD_S, PADDOCK_IMAGE=IMAGE)


@dataclass(frozen=True, slots=True)
class ComposeProject:
    name: str
    port: int
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self, *command: str, timeout_s: float = 120) -> str:
        """A command that works on this project: with its name, port, images and settings, and none of the caller's."""
        images = {f"PADDOCK_{container.upper()}_IMAGE": image_of(container) for container in BESIDE}
        unset = dict.fromkeys((name for name in os.environ if name.startswith("PADDOCK_")), "")
        named = {
            "COMPOSE_PROJECT_NAME": self.name,
            "COMPOSE_ENV_FILES": os.devnull,
            "PADDOCK_PORT": str(self.port),
            "PADDOCK_IMAGE": IMAGE,
        }
        return run(*command, timeout_s=timeout_s, **{**unset, **images, **named, **self.settings})

    def compose(self, *arguments: str, timeout_s: float = 120) -> str:
        return self.run("docker", "compose", *arguments, timeout_s=timeout_s)

    def up(self, *arguments: str) -> None:
        """Start what is asked for and wait until all of it is ready."""
        self.compose("up", "--wait", "--wait-timeout", str(READY_S), *arguments, timeout_s=READY_S + 60)

    def inside(self, service: str, program: str) -> str:
        """What a Python program prints that runs in the service's container."""
        return self.compose("exec", "-T", service, "python3", "-c", program).strip()

    def beside(self, network: str, program: str, *options: str) -> str:
        """What a Python program prints that runs in a container of its own on one of the project's networks."""
        container = ("docker", "run", "--rm", "--network", f"{self.name}_{network}", *options)
        return run(*container, "--entrypoint", "python3", IMAGE, "-c", program, timeout_s=300).strip()

    def containers(self, service: str) -> list[dict[str, Any]]:
        """The engine's own descriptions of the service's containers."""
        identities = self.compose("ps", "--all", "--quiet", service).split()
        described: list[dict[str, Any]] = json.loads(run("docker", "inspect", *identities))
        return described

    def container(self, service: str) -> dict[str, Any]:
        """Likewise, where there is one."""
        (described,) = self.containers(service)
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
def compose_project(**settings: str) -> Iterator[ComposeProject]:
    """The mesh, built and ready, with settings as in `.env`; taken down at the end, whatever happened."""
    project = ComposeProject(f"paddock-test-{secrets.token_hex(4)}", free_port(), settings)
    build_images()
    try:
        project.up()
        yield project
    except AssertionError as error:
        error.add_note(project.compose("logs", "--no-color", "--tail", "50"))
        raise
    finally:
        project.compose("down", "--volumes", "--timeout", "20")
