"""The configured models: each with its upstream, opened once per process."""

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from services.model_proxy.bridge.capabilities import Capabilities
from services.model_proxy.failures import ModelCallError, unknown_model
from shared.errors import ConfigurationProblem, ForbiddenError
from shared.plugins import PluginFolder
from shared.ports.upstream import Upstream
from shared.settings import LoadedSettings, ModelSettings

UPSTREAMS = PluginFolder("services.model_proxy.upstreams", "kind of upstream")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`name` is the configured one, `upstream_name` what the upstream calls it."""

    name: str
    upstream_name: str
    upstream: Upstream
    settings: ModelSettings
    capabilities: Capabilities


class Models:
    def __init__(self, served: dict[str, ServedModel]) -> None:
        self._served = served

    @property
    def names(self) -> list[str]:
        return sorted(self._served)

    async def close(self) -> None:
        for model in self._served.values():
            await model.upstream.close()

    def find(self, asked: Any, allowed: str | None) -> ServedModel:
        """The model of a call: what it asks for, within what its token allows.

        A call may leave the name out where only one model can be meant, and may use the upstream's name for
        the model that its token allows.

        Raises:
            ModelCallError: there is no such model, or none is named.
            ForbiddenError: the token allows another one.
        """
        if asked is not None and not isinstance(asked, str):
            raise ModelCallError("'model' must be a string.", status=400, code="invalid_type", param="model")
        if allowed is not None:
            return self._allowed(asked, allowed)
        if asked is None:
            if len(self._served) != 1:
                raise ModelCallError(
                    f"'model' is missing. Known: {', '.join(self.names)}.",
                    status=400,
                    code="missing_required_parameter",
                    param="model",
                )
            return next(iter(self._served.values()))
        if asked not in self._served:
            raise unknown_model(asked, self.names)
        return self._served[asked]

    def _allowed(self, asked: str | None, allowed: str) -> ServedModel:
        model = self._served.get(allowed)
        if model is None:
            raise unknown_model(allowed, self.names)
        if asked in {None, model.name, model.upstream_name}:
            return model
        if asked not in self._served:
            raise unknown_model(str(asked), [allowed])
        raise ForbiddenError(f"This session token allows the model '{allowed}', not '{asked}'.")


def open_models(loaded: LoadedSettings) -> Models:
    """Create all upstreams; call `check_models` first."""
    served = {}
    for name, settings in loaded.settings.models.items():
        module = UPSTREAMS.module(settings.upstream)
        upstream: Upstream = module.create(UPSTREAMS.options(settings.upstream, settings.options))
        capabilities = Capabilities.model_validate(settings.capabilities)
        served[name] = ServedModel(name, settings.model or name, upstream, settings, capabilities)
    return Models(served)


def check_models(loaded: LoadedSettings) -> list[ConfigurationProblem]:
    """What is wrong with the configured models; empty when nothing is."""
    problems = []
    for name, settings in loaded.settings.models.items():
        key = f"models.{name}"
        source = loaded.source_of(key)
        problems += UPSTREAMS.check(settings.upstream, settings.options, source=source, key=key)
        try:
            Capabilities.model_validate(settings.capabilities)
        except ValidationError as error:
            problems += [
                ConfigurationProblem(
                    source, ".".join([f"{key}.capabilities", *(str(part) for part in item["loc"])]), item["msg"]
                )
                for item in error.errors(include_url=False)
            ]
    return problems
