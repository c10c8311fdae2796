"""What can be configured about model engines: server programs that the launcher runs beside the services.

How they are started, watched and stopped is the launcher's. Which models they serve is in
`shared/engine_models.py`.
"""

from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

LAST_PORT: Final = 65_535
_Port = Annotated[int, Field(gt=0, le=LAST_PORT)]
_Count = Annotated[int, Field(gt=0)]
_Wait = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ProgramSettings(BaseModel):
    """A server program. Words in braces stand for what only the launcher knows."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    command: Annotated[tuple[str, ...], Field(min_length=1)]
    """Program and arguments; no shell reads them. `{host}`, `{port}`, `{index}`, `{devices}`, `{cache_url}` and
    `{engine_urls}` are filled in where they mean something, also in `env`."""
    host: str = "127.0.0.1"
    """Where it is reached."""
    port: _Port
    """Where it listens."""
    env: dict[str, SecretStr] = {}
    """Variables beside the launcher's own, of which those of Paddock are not handed on."""
    ready_path: Annotated[str, Field(pattern="^/")] = "/health"
    """It is ready when this path answers with 2xx."""
    ready_timeout_s: _Wait = 600.0
    """How long that may take; with 0 it counts as ready at once."""
    stop_grace_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.5
    """After TERM: how long until all of its processes are killed."""

    @field_validator("command", mode="before")
    @classmethod
    def _is_no_shell_line(cls, value: Any) -> Any:
        if isinstance(value, str):
            message = "give a list, as in [vllm, serve, my-model]: no shell parts a text into arguments"
            raise ValueError(message)  # noqa: TRY004 - pydantic collects this one only
        return value

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


class CacheSettings(ProgramSettings):
    ready_timeout_s: _Wait = 120.0
    """How long it may take to be ready; the engines start after it. With 0 it counts as ready at once."""


class RouterSettings(ProgramSettings):
    ready_timeout_s: _Wait = 1200.0
    """How long it may take to be ready; it starts after the engines. With 0 it counts as ready at once."""


class EngineSettings(ProgramSettings):
    port: _Port = 8000
    """Where the first engine listens; each further one has the next port."""
    count: _Count = 1
    """How many engines are started."""
    devices: _Count = 1
    """Accelerators of each; `{devices}` lists an engine's own, counted on from engine to engine, as in `2,3`."""
    models: tuple[str, ...] = ()
    """Entries of `models` that they serve; the one of the same name when left out."""
    base_path: Annotated[str, Field(pattern="^(/.*[^/])?$")] = "/v1"
    """What follows host and port in the models' `base_url`."""
    cache: CacheSettings | None = None
    """A cache that the engines share."""
    router: RouterSettings | None = None
    """What the models are reached through; without one the model proxy keeps each episode with one engine."""

    @property
    def engines(self) -> list[Self]:
        """The settings of each engine, with its own port."""
        return [self.model_copy(update={"port": self.port + index}) for index in range(self.count)]

    @property
    def programs(self) -> dict[str, ProgramSettings]:
        """All that is started, by what it is: `cache`, `0`, `1`, …, `router`."""
        numbered = {str(index): one for index, one in enumerate(self.engines)}
        return {
            name: one
            for name, one in {"cache": self.cache, **numbered, "router": self.router}.items()
            if one is not None
        }

    @property
    def base_urls(self) -> list[str]:
        """Where the models are reached."""
        served = self.engines if self.router is None else [self.router]
        return [one.url + self.base_path for one in served]
