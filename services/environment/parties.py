"""Who takes part in the episodes of an environment, and the names of their sessions."""

from dataclasses import dataclass

from services.environment.budgets import Budgets
from services.environment.outcome import OutcomePolicy
from shared.clients.agent import AgentClient
from shared.clients.resources import ResourcesClient
from shared.settings import EnvironmentSettings


@dataclass(frozen=True, slots=True)
class Parties:
    """Who takes part in the episodes of one environment, and their limits."""

    environment: EnvironmentSettings
    agent: AgentClient
    resources: ResourcesClient
    budgets: Budgets
    policy: OutcomePolicy
    agent_seed_s: float
    resources_seed_s: float


@dataclass(frozen=True, slots=True)
class Sessions:
    """The ids that this episode gave its two sessions."""

    agent: str
    resources: str
