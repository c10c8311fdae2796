"""The weather toolset with the verifier that grades its rows, end to end over HTTP."""

from typing import Any

import orjson

from tests.resources.rig import answer, loaded, resources, verify_body

PARAMS: dict[str, Any] = {
    "input": [{"role": "user", "content": "What is it like in Oslo?"}],
    "tools": [
        {
            "type": "function",
            "name": "get_weather",
            "description": "",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": ""}},
                "required": ["city"],
                "additionalProperties": False,
            },
        }
    ],
}
ENTRY: dict[str, Any] = {
    "weather": {"verifier": "tool_calls", "tools": ["weather"], "without_expected_calls": "offered_tool"}
}


def _without_descriptions(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {name: _without_descriptions(value) for name, value in schema.items() if name != "description"}
    return schema


async def test_the_lent_tool_is_the_one_that_rows_offer() -> None:
    async with resources(loaded(ENTRY)) as server:
        seeded = await server.post(
            "weather/seed_session",
            {
                "resources_session_id": "s",
                "episode_id": {"rollout_id": "s", "attempt": 0},
                "task_id": {"taskset": "t", "task_id": "1"},
                "task_data": {},
            },
        )
    assert [_without_descriptions(tool) for tool in seeded.json()["resources_tools"]["http"]] == [
        _without_descriptions(tool) for tool in PARAMS["tools"]
    ]


async def test_any_city_has_weather_and_always_the_same() -> None:
    async with resources(loaded(ENTRY)) as server:
        cookies = await server.seed("weather", "s", {})
        readings = [
            orjson.loads((await server.post("weather/get_weather", {"city": city}, cookies=cookies)).content)
            for city in ("Oslo", " oslo ", "Ouagadougou", "Paris")
        ]
        empty = await server.post("weather/get_weather", {"city": "  "}, cookies=cookies)
    assert readings[0] == readings[1] | {"city": "Oslo"}
    assert readings[3]["temperature_c"] == 19
    assert all(-5 <= reading["temperature_c"] <= 35 for reading in readings)
    assert empty.status_code == 422


async def test_a_served_call_and_an_answer_earn_the_reward_and_words_alone_do_not() -> None:
    call = {"type": "function_call", "name": "get_weather", "arguments": '{"city": "Oslo"}', "call_id": "c"}
    body = verify_body({}, responses_create_params=PARAMS, response=answer("It is mild in Oslo.", call))
    async with resources(loaded(ENTRY)) as server:
        honest = await server.seed("weather", "honest", {})
        await server.post("weather/get_weather", {"city": "Oslo"}, cookies=honest)
        earned = (await server.post("weather/verify", body, cookies=honest)).json()
        boastful = await server.seed("weather", "boastful", {})
        claimed = (await server.post("weather/verify", body, cookies=boastful)).json()
    assert earned["reward"] == 1.0
    assert earned["served_calls"] == [{"name": "get_weather", "arguments": {"city": "Oslo"}, "ok": True}]
    assert claimed["reward"] == 0.0
    assert claimed["reward_components"]["called"] == 0.0


async def test_a_row_that_offers_no_tool_is_a_bad_row_at_the_verification() -> None:
    async with resources(loaded(ENTRY)) as server:
        cookies = await server.seed("weather", "s", {})
        refused = await server.post("weather/verify", verify_body({}), cookies=cookies)
    assert refused.status_code == 422
    assert refused.json()["failure"] == {"failure_kind": "bad_row", "terminal": True, "stage": "verification"}
