"""What tests need besides Python, and whether this machine has it: one probe per mark.

A probe answers None when the need is there, else a sentence that says what is missing and how to get it.
Each is asked at most once per run. Which tests are left out, or whether that fails the run, is decided
in `conftest.py`.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache

from tests.codex.cli import VERSIONS, binary

PROBE_TIMEOUT_S = 60
"""Long enough for a slow engine, short enough that a hanging one does not stop the run."""


def _run(*command: str) -> str | None:
    """None when the command succeeds, else the last line of what it said."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        return f"there is no {command[0]} command"
    except subprocess.TimeoutExpired:
        return f"`{' '.join(command[:3])}` gave no answer in {PROBE_TIMEOUT_S} s"
    if done.returncode == 0:
        return None
    said = (done.stderr or done.stdout).strip().splitlines()
    return said[-1] if said else f"`{' '.join(command[:3])}` ended with status {done.returncode}"


def _docker() -> str | None:
    problem = _run("docker", "info")
    start = 'deploy/engines/docker.sh start; eval "$(deploy/engines/docker.sh env)"'
    return problem and f"No Docker engine answers ({problem}). Start one: {start}"


def _compose() -> str | None:
    if problem := probe("docker"):
        return problem
    problem = _run("docker", "compose", "version")
    return problem and f"Docker Compose v2 is missing ({problem}). Get it: deploy/engines/compose.sh"


def _redis() -> str | None:
    if shutil.which("redis-server"):
        return None
    return "There is no redis-server command. Get it: deploy/engines/redis.sh"


def _balancer() -> str | None:
    if shutil.which("haproxy"):
        return None
    return "There is no haproxy command. Get it: deploy/engines/haproxy.sh"


def _bubblewrap() -> str | None:
    problem = _run("bwrap", "--ro-bind", "/", "/", "--unshare-pid", "--", "true")
    return problem and f"bwrap does not work here ({problem}). Get it: apt-get install bubblewrap"


def _busybox() -> str | None:
    if shutil.which("busybox"):
        return None
    return "There is no busybox command, of which small images are made. Get it: apt-get install busybox-static"


def _codex() -> str | None:
    absent = [version for version in VERSIONS if not os.access(binary(version), os.X_OK)]
    return f"The Codex CLI {', '.join(absent)} is missing. Get it: deploy/engines/codex.sh" if absent else None


def _folder(variable: str, what: str) -> str | None:
    folder = os.environ.get(variable, "")
    if folder and os.path.isdir(folder):
        return None
    return f"{variable} names no folder. Set it to a folder of {what}."


def _harbor() -> str | None:
    return _folder("PADDOCK_HARBOR_TASKS", "Harbor tasks")


def _swebench() -> str | None:
    return _folder("PADDOCK_SWEBENCH_PARTS", "SWE-bench Pro parts")


def _index() -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        problem = _run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, "idna")
    return problem and f"pip reaches no package index ({problem})."


def _full() -> str | None:
    return None if os.environ.get("PADDOCK_FULL") == "1" else "It runs in `make full` (PADDOCK_FULL=1)."


PROBES: Mapping[str, Callable[[], str | None]] = {
    "docker": _docker,
    "compose": _compose,
    "redis": _redis,
    "balancer": _balancer,
    "bubblewrap": _bubblewrap,
    "busybox": _busybox,
    "codex": _codex,
    "harbor": _harbor,
    "swebench": _swebench,
    "index": _index,
    "full": _full,
}
BY_CHOICE = frozenset({"full"})
"""Left out on purpose, not for want of something: `PADDOCK_REQUIRE=all` does not ask for these."""


@cache
def probe(need: str) -> str | None:
    """None when the need is there, else what is missing."""
    return PROBES[need]()


def required(asked: str, carried: frozenset[str]) -> frozenset[str]:
    """The needs that `PADDOCK_REQUIRE` asks for; `all` means those that some collected test carries.

    Raises:
        ValueError: it names a need that there is not.
    """
    names = frozenset(part.strip() for part in asked.split(",") if part.strip())
    if unknown := sorted(names - PROBES.keys() - {"all"}):
        raise ValueError(f"PADDOCK_REQUIRE names {', '.join(unknown)}; it knows all, {', '.join(sorted(PROBES))}.")
    return (names - {"all"}) | (carried - BY_CHOICE if "all" in names else frozenset())
