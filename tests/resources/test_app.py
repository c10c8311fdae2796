"""What the configuration may hold, and what the application tells of itself."""

import subprocess
import sys
from typing import Any

import pytest

from services.resources.app import check, create_app
from shared.errors import ConfigurationError
from tests.resources.rig import FAKES, loaded


@pytest.mark.parametrize(
    ("entry", "key", "says"),
    [
        ({"verifier": "mqca"}, "resources.e", "Did you mean 'mcqa'?"),
        ({"verifier": "mcqa", "strict": True}, "resources.e.strict", "Extra inputs"),
        ({"verifier": "tool_calls", "order": "some"}, "resources.e.order", "'any' or 'exact'"),
        ({"verifier": "mcqa", "tools": ["wether"]}, "resources.e.tools", "Did you mean 'weather'?"),
        ({"verifier": "mcqa", "tools": ["weather", "weather"]}, "resources.e.tools", "'get_weather'"),
    ],
)
def test_a_wrong_entry_is_told_with_its_key(entry: dict[str, Any], key: str, says: str) -> None:
    problems = check(loaded({"e": entry}))
    assert [problem.key for problem in problems] == [key]
    assert says in problems[0].message


def test_an_entry_whose_name_is_no_address_is_refused() -> None:
    assert "part of its address" in check(loaded({"a/b": {"verifier": "mcqa"}}))[0].message


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigurationError) as refused:
        create_app(loaded({"a": {"verifier": "nope"}, "b": {"verifier": "mcqa", "tools": ["nope"]}}))
    assert [problem.key for problem in refused.value.problems] == ["resources.a", "resources.b.tools"]


def test_right_entries_have_no_problems() -> None:
    assert check(loaded({"a": {"verifier": "mcqa"}, "b": {"verifier": "tool_calls", "tools": ["weather"]}})) == []


def test_the_routes_are_documented_with_their_bodies() -> None:
    paths = create_app(loaded({"e": {"verifier": "scripted"}}), plugins=FAKES).openapi()["paths"]
    seed = paths["/{entry}/seed_session"]["post"]
    schema = seed["requestBody"]["content"]["application/json"]["schema"]
    assert set(schema["required"]) == {"resources_session_id", "episode_id", "task_id", "task_data"}
    assert seed["parameters"][0]["name"] == "entry"
    assert {"/{entry}/verify", "/{entry}/close_session", "/{entry}/aggregate_metrics", "/{entry}/reverify_mode"} < set(
        paths
    )


def test_an_application_loads_neither_mcp_nor_math_verify_before_they_are_needed() -> None:
    program = (
        "import sys\n"
        "from services.resources.app import create_app\n"
        "from tests.resources.rig import loaded\n"
        "create_app(loaded({'m': {'verifier': 'math'}, 'w': {'verifier': 'tool_calls', 'tools': ['weather']}}))\n"
        "print(sorted({'mcp', 'math_verify', 'sympy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
