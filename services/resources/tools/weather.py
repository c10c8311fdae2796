"""A weather service that knows no weather: the same reading for the same city, for ever and everywhere.

Made for trying tool calls without a network. Some cities have a written reading, every other one gets a
reading derived from its name, so that any city works.
"""

import hashlib
from typing import Any, Final

import orjson
from pydantic import BaseModel, ConfigDict, Field

from shared.ports.toolset import ToolError, ToolSpec

_READINGS: Final[dict[str, tuple[int, int, str]]] = {
    "san francisco": (16, 78, "fog in the morning, sunny later"),
    "sf": (16, 78, "fog in the morning, sunny later"),
    "new york": (22, 61, "partly cloudy"),
    "london": (14, 83, "light rain"),
    "paris": (19, 65, "sunny"),
    "tokyo": (25, 70, "humid and overcast"),
    "reykjavik": (6, 80, "windy with showers"),
}
_SKIES: Final = ("sunny", "partly cloudy", "overcast", "light rain", "showers", "windy", "fog", "clear")


class Options(BaseModel):
    """None."""

    model_config = ConfigDict(extra="forbid")


class GetWeather(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: str = Field(description="Name of the city.")


class Weather:
    """Implements `shared.ports.toolset.Toolset`. Its state is the list of cities that were asked for."""

    tools = (ToolSpec("get_weather", "Get the current weather of a city.", GetWeather),)

    def initial_state(self, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"cities": []}

    async def call(self, name: str, arguments: GetWeather, state: dict[str, Any]) -> str:
        city = " ".join(arguments.city.split())
        if not city:
            raise ToolError("'city' is empty; name a city.")
        state["cities"].append(city)
        temperature_c, humidity_percent, sky = _READINGS.get(city.lower()) or _derived(city.lower())
        reading = {
            "city": city,
            "temperature_c": temperature_c,
            "humidity_percent": humidity_percent,
            "conditions": sky,
        }
        return orjson.dumps(reading).decode()


def _derived(city: str) -> tuple[int, int, str]:
    digest = hashlib.sha256(city.encode()).digest()
    return digest[0] % 41 - 5, 30 + digest[1] % 66, _SKIES[digest[2] % len(_SKIES)]


def create(options: Options) -> Weather:
    return Weather()
