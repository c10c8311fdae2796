"""The real Codex CLI in a process of its own: its settings, one run, and what it printed.

It is kept offline by its settings: the only address it knows is the one it is given.
"""

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

VERSIONS = ("0.144.4", "0.171.0")
RUN_S = 100.0
"""Shorter than the test runner's own bound, so that a hanging CLI is told with what it printed."""
# What it calls an error and goes on: its advice on models that it does not know, and on compaction.
_ADVICE = ("Model metadata for", "Heads up: Long threads")
_TOKEN_VARIABLE = "PADDOCK_SESSION_TOKEN"


def folder() -> Path:
    """Where `deploy/engines/codex.sh` keeps the versions, or PADDOCK_CODEX_DIR in its place."""
    cache = os.environ.get("PADDOCK_CACHE") or str(Path.home() / ".cache" / "paddock")
    return Path(os.environ.get("PADDOCK_CODEX_DIR") or f"{cache}/codex")


def binary(version: str) -> Path:
    return folder() / version / "bin" / "codex"


@dataclass(frozen=True, slots=True)
class Provider:
    """Where the CLI finds its model. Null leaves the CLI's own number of retries and bound of silence."""

    base_url: str
    token: str
    model: str
    retries: int | None = 0
    idle_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Printed:
    """What a run left: its exit code, its events, and what it said on standard error."""

    exit_code: int
    events: list[dict[str, Any]]
    stderr: str

    def items(self, kind: str) -> list[dict[str, Any]]:
        """The finished items of a kind."""
        done = [event["item"] for event in self.events if event["type"] == "item.completed"]
        return [item for item in done if item["type"] == kind]

    @property
    def messages(self) -> list[str]:
        return [item["text"] for item in self.items("agent_message")]

    @property
    def errors(self) -> list[str]:
        """Everything that it calls an error, without its advice."""
        told = [item["message"] for item in self.items("error")]
        told += [event["message"] for event in self.events if event["type"] == "error"]
        return [text for text in told if not text.startswith(_ADVICE)]

    @property
    def failure(self) -> str:
        """Why the turn failed."""
        (event,) = [event for event in self.events if event["type"] == "turn.failed"]
        message: str = event["error"]["message"]
        return message

    @property
    def usage(self) -> dict[str, int]:
        """Of the last completed turn; the CLI counts from the start of the thread."""
        usages = [event["usage"] for event in self.events if event["type"] == "turn.completed"]
        last: dict[str, int] = usages[-1]
        return last


@dataclass(frozen=True, slots=True)
class Task:
    """What the CLI is asked. `servers` are stdio MCP servers by name, `arguments` go behind `codex exec`,
    `settings` are further entries at the top of its configuration."""

    prompt: str = "Do the task."
    servers: dict[str, list[str]] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)


def _configuration(provider: Provider, task: Task) -> str:
    """The configuration file. JSON strings and numbers are TOML, too."""
    top = {
        "model": provider.model,
        "model_provider": "paddock",
        "approval_policy": "never",
        "sandbox_mode": "danger-full-access",
        "check_for_update_on_startup": False,
        **task.settings,
    }
    tables: dict[str, dict[str, Any]] = {
        "analytics": {"enabled": False},
        "feedback": {"enabled": False},
        "features": {"plugins": False, "apps": False},
        "model_providers.paddock": {
            "name": "paddock",
            "base_url": provider.base_url,
            "env_key": _TOKEN_VARIABLE,
            "wire_api": "responses",
            "request_max_retries": provider.retries,
            "stream_max_retries": provider.retries,
            "stream_idle_timeout_ms": provider.idle_ms,
        },
    }
    for name, command in task.servers.items():
        tables[f"mcp_servers.{name}"] = {"command": command[0], "args": command[1:], "required": True}
        # `required`: version 0.171.0 otherwise asks its model before the server's tools are there.
    lines = _assignments(top)
    for table, values in tables.items():
        lines += [f"[{table}]", *_assignments(values)]
    return "\n".join(lines) + "\n"


def _assignments(values: dict[str, Any]) -> list[str]:
    return [f"{name} = {orjson.dumps(value).decode()}" for name, value in values.items() if value is not None]


async def run_codex(
    version: str, provider: Provider, task: Task, *, home: Path, work: Path, bound_s: float = RUN_S
) -> Printed:
    """One `codex exec`.

    Raises:
        TimeoutError: it did not end in time; it is killed with everything that it started.
    """
    temporary = home / "tmp"
    temporary.mkdir(parents=True)
    (home / "config.toml").write_text(_configuration(provider, task), encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        *(str(binary(version)), "exec", *task.arguments, "--json", "--skip-git-repo-check", "--cd", str(work), "-"),
        env={
            "PATH": os.defpath,
            "HOME": str(home),
            "CODEX_HOME": str(home),
            # It warns of a home below the folder for temporary files.
            "TMPDIR": str(temporary),
            # It honours a machine's proxies even for the loopback address.
            "NO_PROXY": "*",
            "LANG": "C.UTF-8",
            _TOKEN_VARIABLE: provider.token,
        },
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    talk = asyncio.ensure_future(process.communicate(task.prompt.encode()))
    try:
        done, _ = await asyncio.wait({talk}, timeout=bound_s)
    finally:
        if not talk.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = await talk
    if not done:
        raise TimeoutError(f"codex {version} did not end in {bound_s} s. It printed: {stdout.decode()[-2000:]}")
    # Split at line feeds only: its JSON holds other line separators as they are.
    events = [orjson.loads(line) for line in stdout.split(b"\n") if line]
    assert process.returncode is not None
    return Printed(process.returncode, events, stderr.decode())
