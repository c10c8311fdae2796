"""What can be configured: closed, frozen types with a sentence under each field.

A default stands in one place: the field that it belongs to. How files and variables become `Settings`
is in `shared/configuration.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from shared.contracts.episode import Action
from shared.engines import EngineSettings

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
ServiceName = Literal["environment", "agent", "model_proxy", "resources"]
SERVICE_NAMES: tuple[ServiceName, ...] = ("environment", "agent", "model_proxy", "resources")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class _PluginEntry(BaseModel):
    """A configured plug-in: the fields that are not declared are the plug-in's own options."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class StoreSettings(_Section):
    url: str = "memory://"
    """Where state lives: `memory://` (one process per service), or Redis for several: `redis://HOST:PORT/DATABASE`,
    `rediss://` with TLS, `unix:///SOCKET`; a password stands before the host, as in `redis://:PASSWORD@HOST`."""
    lease_s: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 15.0
    """How long a claim lives that its owner no longer renews, and so how soon another replica takes over."""


class ServiceSettings(_Section):
    url: str
    """Where peers find the service."""

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        try:
            parts = urlsplit(value)
            usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != -1
        except ValueError:  # a port that is none
            usable = False
        if not usable:
            raise ValueError(f"'{value}' is no address of a service; one looks like http://127.0.0.1:8100")
        return value

    @property
    def port(self) -> int:
        port = urlsplit(self.url).port
        return 80 if port is None else port  # 0 stays 0: any free port


class ModelProxySettings(ServiceSettings):
    socket_path: Path | None = None
    """Unix socket on which models are served, too: a sandbox without a network reaches them there and nothing else."""


class ServicesSettings(_Section):
    environment: ServiceSettings = ServiceSettings(url="http://127.0.0.1:8100")
    """The environment server: `POST /run`."""
    agent: ServiceSettings = ServiceSettings(url="http://127.0.0.1:8200")
    """The agent server."""
    model_proxy: ModelProxySettings = ModelProxySettings(url="http://127.0.0.1:8300")
    """The model proxy."""
    resources: ServiceSettings = ServiceSettings(url="http://127.0.0.1:8400")
    """The resources server."""
    patience_s: Seconds = 10.0
    """How long a call that may be repeated is repeated while its peer, or the balancer before it, has no server."""

    def url_of(self, name: ServiceName) -> str:
        settings: ServiceSettings = getattr(self, name)
        return settings.url.rstrip("/")


class SecuritySettings(_Section):
    mesh_token: SecretStr | None = None
    """Bearer token between services; a service that binds anything but loopback refuses to start without one."""
    previous_mesh_token: SecretStr | None = None
    """Accepted beside the mesh token while a mesh is given a new one, service by service."""
    client_token: SecretStr | None = None
    """Bearer token for clients of the environment server; without one, whoever reaches its port may send rows."""


class ServingSettings(_Section):
    max_body_mib: Annotated[int, Field(gt=0)] = 64
    """Larger request bodies are refused with 413."""
    keep_alive_s: Seconds = 75.0
    """How long an idle connection stays open; longer than any client of ours keeps one."""
    drain_lead_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0
    """After TERM `readyz` says 503 and the service goes on serving this long, so that a balancer notices."""
    stop_grace_s: Seconds = 10.0
    """After the lead: how long the process may take to end; open requests are cut after half of it."""
    workers: Annotated[int, Field(gt=0, le=256)] = 1
    """Processes per service, which share its port; more than one need a store that they share, too."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log lines that are written."""


class ModelSettings(_PluginEntry):
    upstream: str
    """Kind of server: `chat_completions`, `responses` or `scripted`."""
    model: str | None = None
    """The upstream's name of the model; the configured name when left out."""
    defaults: dict[str, Any] = {}
    """Request fields that are filled in where the caller gave none."""
    overrides: dict[str, Any] = {}
    """Request fields that win over the caller's, in the upstream's dialect."""
    capabilities: dict[str, Any] = {}
    """What the upstream can do, where it differs from the defaults."""
    heartbeat_s: Seconds = 15.0
    """A streaming caller gets a sign of life after this much silence of the upstream."""


class SandboxSettings(_PluginEntry):
    provider: str
    """The sandbox provider plug-in."""
    allow_unisolated: bool = False
    """Where the provider does not isolate: use it although keys or hidden tests could be read from inside."""


class AgentSettings(_PluginEntry):
    harness: str
    """The harness plug-in."""
    model: str = "policy"
    """The model that the harness drives."""
    seed_timeout_s: Seconds = 600.0
    """Bound of a seed, preparation included."""
    close_timeout_s: Seconds = 30.0
    """Bound of a close, within the episode's cleanup budget."""
    receipt_window_s: Seconds = 300.0
    """How long a close's receipt is replayed, counted from the end of its cleanup."""
    max_model_calls: Annotated[int, Field(gt=0)] | None = None
    """Model calls that one session's token allows; further ones are refused, and the run is incomplete."""
    max_model_output_tokens: Annotated[int, Field(gt=0)] | None = None
    """Output tokens after which a session's token allows no further call."""
    concurrency: Annotated[int, Field(gt=0)] = 1024
    """Runs at once in one process; further ones wait."""


class ResourcesSettings(_PluginEntry):
    verifier: str
    """The verifier plug-in."""
    tools: tuple[str, ...] = ()
    """Toolsets that are lent to the agent."""
    judge: str | None = None
    """The model that a judging verifier asks, through the model proxy."""
    seed_timeout_s: Seconds = 600.0
    """Bound of a seed, preparation included."""
    verify_timeout_s: Seconds = 600.0
    """Bound of one verification; also what the episode holds back for it from the agent's time."""
    close_timeout_s: Seconds = 30.0
    """Bound of a close, within the episode's cleanup budget."""


class OutcomePolicySettings(_Section):
    """Actions by upstream status, failure kind and response status; entries that are not named keep their default."""

    status: dict[int, Action] = {}
    """By the upstream's HTTP status."""
    kind: dict[str, Action] = {}
    """By failure kind."""
    response: dict[Literal["completed", "incomplete", "failed"], Action] = {}
    """By the response's status, where no cause is known."""


class EnvironmentSettings(_Section):
    resources: str
    """The resources entry: the task's tools and verifier."""
    agent: str
    """The agent entry."""
    tools: tuple[Literal["direct_http", "mcp"], ...] = ()
    """How the resources' tools are lent to the agent; none by default."""
    episode_timeout_s: Seconds = 21_600.0
    """From the seed to the end of the verification; waiting for admission does not count."""
    cleanup_timeout_s: Seconds = 300.0
    """Total budget of the cleanup after an episode; outside the episode's own time."""
    max_concurrent: Annotated[int, Field(gt=0)] | None = None
    """Episodes at once; no limit by default. Needs `queue_timeout_s`."""
    queue_timeout_s: Seconds | None = None
    """How long an episode waits for admission before it is answered with 429."""
    queue_size: Annotated[int, Field(ge=0)] = 1024
    """How many may wait for admission in one process; more are answered with 429 at once."""
    outcome_policy: OutcomePolicySettings = OutcomePolicySettings()
    """What is done with a failed or incomplete response."""

    @model_validator(mode="after")
    def _limit_needs_a_queue_timeout(self) -> Self:
        if self.max_concurrent is not None and self.queue_timeout_s is None:
            raise ValueError("max_concurrent is set without queue_timeout_s: say how long an episode may wait")
        return self


class Settings(_Section):
    store: StoreSettings = StoreSettings()
    services: ServicesSettings = ServicesSettings()
    security: SecuritySettings = SecuritySettings()
    serving: ServingSettings = ServingSettings()
    models: dict[str, ModelSettings] = {}
    sandboxes: dict[str, SandboxSettings] = {}
    agents: dict[str, AgentSettings] = {}
    resources: dict[str, ResourcesSettings] = {}
    environments: dict[str, EnvironmentSettings] = {}
    engines: dict[str, EngineSettings] = {}
    """Model engines that the launcher starts with the mesh."""
    state_dir: Path = Path(".paddock")
    """Folder for what a service keeps on disk."""
    result_ttl_s: Seconds = 86_400.0
    """How long a stored outcome is replayed."""


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings and where each value came from: dotted key → file, variable or `default`."""

    settings: Settings
    sources: Mapping[str, str]

    def source_of(self, key: str) -> str:
        """The file or variable that set `key`, or set something in it or around it."""
        if key in self.sources:
            return self.sources[key]
        below = [name for name in self.sources if name.startswith(f"{key}.")]
        if below:
            return self.sources[below[0]]
        return self.source_of(key.rpartition(".")[0]) if "." in key else "the configuration"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on `host`."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
