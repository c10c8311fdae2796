"""What one process of the agent server holds, and what a harness plug-in is given when it is made."""

import itertools
import time
from asyncio import Future, Semaphore
from collections.abc import Callable
from dataclasses import dataclass, field

from services.agent.records import Records
from shared.clients.model_proxy import ModelProxyClient
from shared.http.client import HttpClient
from shared.metrics import Metrics
from shared.ports.harness import InProcessHarness, SettingUp
from shared.ports.store import Store
from shared.settings import AgentSettings, Settings
from shared.tokens import Signer


@dataclass(frozen=True, slots=True)
class HarnessContext:
    """Given to a plug-in's `create(options, context)`: its entry, and the client that it calls others with."""

    name: str
    entry: AgentSettings
    settings: Settings
    client: HttpClient


@dataclass(frozen=True, slots=True)
class Agent:
    """One configured agent; `holding` is its harness again where its sessions hold something."""

    name: str
    entry: AgentSettings
    harness: InProcessHarness
    holding: SettingUp | None
    places: Semaphore


@dataclass(slots=True)
class Host:
    """What all sessions of this process share. `waits` are the open waits, ended when the process is `leaving`."""

    store: Store
    proxy: ModelProxyClient
    proxy_url: str
    tokens: Signer
    instance: str
    lease_s: float
    metrics: Metrics
    clock: Callable[[], float] = time.time
    leaving: bool = False
    waits: set["Future[None]"] = field(default_factory=set)
    _claims: "itertools.count[int]" = field(default_factory=itertools.count)

    def records(self) -> Records:
        return Records(self.store, self.clock, self.lease_s, self.metrics)

    def new_owner(self) -> str:
        """A fresh name for each claim, so that a claim of this very process is seen as taken, too."""
        return f"{self.instance}.{next(self._claims)}"
