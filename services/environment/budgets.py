"""Every time limit of an episode, derived in one place.

Seed, agent, close and verification all draw from the episode's time. So that an agent that runs to its
limit can still be graded, the agent's own limit leaves out what its close and the verification may take.
"""

from dataclasses import dataclass
from typing import Literal

from shared.deadline import Deadline
from shared.errors import DeadlineError
from shared.settings import AgentSettings, EnvironmentSettings, ResourcesSettings, Settings


@dataclass(frozen=True, slots=True)
class AgentLimit:
    """How long the activation may take (seconds), and what set that limit."""

    seconds: float
    set_by: Literal["task", "episode"]


@dataclass(frozen=True, slots=True)
class Budgets:
    """The limits of one environment (seconds)."""

    episode_s: float
    cleanup_s: float
    agent_close_s: float
    verify_s: float
    resources_close_s: float

    @classmethod
    def of(cls, environment: EnvironmentSettings, agent: AgentSettings, resources: ResourcesSettings) -> "Budgets":
        return cls(
            episode_s=environment.episode_timeout_s,
            cleanup_s=environment.cleanup_timeout_s,
            agent_close_s=agent.close_timeout_s,
            verify_s=resources.verify_timeout_s,
            resources_close_s=resources.close_timeout_s,
        )

    def agent_limit(self, task_limit_s: float | None, episode: Deadline) -> AgentLimit:
        """The shorter of the task's own limit and what the episode has left for the agent.

        Raises:
            DeadlineError: nothing is left; the harness must not be started.
        """
        left_s = episode.left_s - self.agent_close_s - self.verify_s
        if left_s <= 0:
            raise DeadlineError(
                f"Nothing of the episode's {self.episode_s:g} s is left for the agent:"
                f" its close ({self.agent_close_s:g} s) and the verification ({self.verify_s:g} s) are held back."
            )
        if task_limit_s is not None and task_limit_s <= left_s:
            return AgentLimit(task_limit_s, "task")
        return AgentLimit(left_s, "episode")


def record_ttl_s(settings: Settings, environment: str) -> float:
    """Longer than the longest episode with its queue, its cleanup and the time that its outcome is kept."""
    entry = settings.environments[environment]
    queue_s = entry.queue_timeout_s or 0.0
    return queue_s + entry.episode_timeout_s + 2 * entry.cleanup_timeout_s + settings.result_ttl_s
