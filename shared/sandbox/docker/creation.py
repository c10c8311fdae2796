"""How a container is asked for: labels, limits, networks, mounts. Pure but for the SDK's own dictionaries."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shared.contracts.sandbox import Network, SandboxLabels
from shared.ports.sandbox import SandboxSpec
from shared.sandbox.context import MODEL_PORT
from shared.sandbox.docker.images import ImageTraits

if TYPE_CHECKING:
    from docker import APIClient

SANDBOX_LABEL: Final = "paddock.sandbox"
RUNTIMES_DIR: Final = "/opt/paddock"
SUPERVISOR: Final = f"{RUNTIMES_DIR}/supervisor/paddock-supervisor"
STATE_DIR: Final = "/run/paddock-state"
HOME_DIR: Final = f"{STATE_DIR}/home"
TEMPORARY_DIR: Final = f"{STATE_DIR}/tmp"
MODEL_DIR: Final = "/run/paddock-model"


@dataclass(frozen=True, slots=True)
class ModelSocket:
    """Where the engine finds the folder of the model proxy's socket: a path or the name of a volume."""

    source: str
    file_name: str


@dataclass(frozen=True, slots=True)
class ContainerPlan:
    """Everything that is decided before the engine is asked."""

    id: str
    spec: SandboxSpec
    image: ImageTraits
    image_name: str
    network: Network
    open_network: str
    memory_mib: int | None
    pids: int | None
    cpus: float | None
    no_new_privileges: bool
    user: str
    workdir: str
    env: dict[str, str]
    volumes: dict[str, str]
    model_socket: ModelSocket | None
    model_url: str | None

    @property
    def name(self) -> str:
        return container_name(self.id)

    def first_process(self) -> list[str]:
        """PID 1: reaps, obeys TERM, makes the folders that any user of the box may write to, keeps the relay."""
        folders = [f"folder=1777:{path}" for path in (STATE_DIR, HOME_DIR, TEMPORARY_DIR)]
        relay = [f"relay={MODEL_PORT}:{MODEL_DIR}/{self.model_socket.file_name}"] if self.model_socket else []
        return [SUPERVISOR, "keep", *folders, *relay]

    def labels(self) -> dict[str, str]:
        return {SANDBOX_LABEL: self.id, **label_dict(self.spec.labels)}

    def tmpfs(self) -> dict[str, str]:
        """A read-only root gets a /tmp where nothing else is mounted there."""
        asked = dict(self.spec.tmpfs)
        if self.spec.read_only_root and "/tmp" not in asked:
            asked["/tmp"] = "mode=1777,exec"
        return asked

    def create(self, api: "APIClient") -> str:
        """Make the container; returns the engine's id of it."""
        made = api.create_container(
            self.image_name,
            entrypoint=self.first_process(),
            name=self.name,
            labels=self.labels(),
            user="0:0",
            working_dir="/",
            environment=self.env,
            healthcheck={"test": ["NONE"]},
            volumes=[STATE_DIR],
            host_config=api.create_host_config(**self._host()),
        )
        return str(made["Id"])

    def _mounts(self) -> list[dict[str, Any]]:
        """Of these an engine makes no missing folder, as it would for `binds`."""
        mounts = [_mount("volume", volume, f"{RUNTIMES_DIR}/{name}") for name, volume in self.volumes.items()]
        if self.model_socket is not None:
            source = self.model_socket.source
            mounts.append(_mount("bind" if source.startswith("/") else "volume", source, MODEL_DIR))
        return mounts

    def _host(self) -> dict[str, Any]:
        return {
            "mounts": self._mounts(),
            "network_mode": self.open_network if self.network == "open" else "none",
            "mem_limit": f"{self.memory_mib}m" if self.memory_mib else None,
            "memswap_limit": f"{self.memory_mib}m" if self.memory_mib else None,
            "pids_limit": self.pids,
            "nano_cpus": round(self.cpus * 1e9) if self.cpus else None,
            "read_only": self.spec.read_only_root,
            "tmpfs": self.tmpfs() or None,
            "security_opt": ["no-new-privileges:true"] if self.no_new_privileges else None,
            # With raw packets a box could speak for its neighbours on the bridge.
            "cap_drop": ["NET_RAW"],
            "restart_policy": {"Name": "no"},
        }


def _mount(kind: str, source: str, target: str) -> dict[str, Any]:
    return {"Type": kind, "Source": source, "Target": target, "ReadOnly": True}


def container_name(sandbox_id: str) -> str:
    return f"paddock-{sandbox_id}"


def label_dict(labels: SandboxLabels) -> dict[str, str]:
    return {
        "paddock.mesh": labels.mesh,
        "paddock.service": labels.service,
        "paddock.session": labels.session,
        "paddock.created-at": repr(labels.created_at),
        "paddock.expires-at": repr(labels.expires_at),
    }


def read_labels(labels: dict[str, str]) -> SandboxLabels | None:
    """None for a container that is none of ours."""
    try:
        return SandboxLabels(
            mesh=labels["paddock.mesh"],
            service=labels["paddock.service"],
            session=labels["paddock.session"],
            created_at=float(labels["paddock.created-at"]),
            expires_at=float(labels["paddock.expires-at"]),
        )
    except (KeyError, ValueError):
        return None
