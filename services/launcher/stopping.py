"""How the time of a stop is shared: the environment first, while its peers still serve; then all others.

A service's own drain has to fit into its share, so its settings are fitted here, before it is started.
"""

from dataclasses import dataclass
from typing import Final

from services.launcher.children import KILL_AFTER_S
from services.launcher.engines import longest_stop_s
from shared.settings import LoadedSettings, ServiceName

MARGIN_S: Final = 0.5
"""Between the end of a process's own grace and the end of its share."""
ENVIRONMENT_SHARE: Final = 0.55
_ENVIRONMENT, _OTHERS, _AFTER = range(3)


@dataclass(frozen=True, slots=True)
class StopPlan:
    """`times_s` is for the supervisor: when the time of each stage is over."""

    times_s: tuple[float, ...]
    engine_stage: int
    _lead_s: float
    _graces_s: tuple[float, float]

    def stage_of(self, name: ServiceName) -> int:
        return _ENVIRONMENT if name == "environment" else _OTHERS

    def fitted(self, loaded: LoadedSettings, name: ServiceName) -> LoadedSettings:
        """The service's configuration with a drain that fits into its share."""
        grace_s = self._graces_s[self.stage_of(name)]
        serving = loaded.settings.serving.model_copy(update={"drain_lead_s": self._lead_s, "stop_grace_s": grace_s})
        return LoadedSettings(loaded.settings.model_copy(update={"serving": serving}), loaded.sources)


def stop_plan(loaded: LoadedSettings) -> StopPlan:
    """The shares of all parts.

    One machine has no balancer that needs a lead, and a person waits for the prompt: everything ends within
    five seconds unless the configuration itself asks for a lead or a grace. With a lead the model proxy goes
    on serving through it, so the engines stop after it; else together with it.
    """
    serving, sources = loaded.settings.serving, loaded.sources
    lead_s = serving.drain_lead_s if "serving.drain_lead_s" in sources else 0.0
    if "serving.stop_grace_s" in sources:
        environment_s = others_s = serving.stop_grace_s
    else:
        environment_s = ENVIRONMENT_SHARE * KILL_AFTER_S - MARGIN_S
        others_s = (1 - ENVIRONMENT_SHARE) * KILL_AFTER_S - MARGIN_S
    first_s = lead_s + environment_s + MARGIN_S
    second_s = first_s + lead_s + others_s + MARGIN_S
    engines_s = longest_stop_s(loaded.settings) + MARGIN_S if loaded.settings.engines else 0.0
    times_s: tuple[float, ...] = (first_s, max(second_s, first_s + engines_s))
    engine_stage = _OTHERS
    if lead_s:
        times_s, engine_stage = (first_s, second_s, second_s + engines_s), _AFTER
    return StopPlan(times_s, engine_stage, lead_s, (environment_s, others_s))
