"""Files and variables become one configuration; everything wrong is told at once, with file and key."""

from pathlib import Path

import pytest

from services.describe import check_plugins
from shared.configuration import EMBEDDED, load_settings
from shared.errors import ConfigurationError
from shared.settings import LoadedSettings

BENCHMARK = """
resources: {sums: {verifier: math}}
environments: {sums: {resources: sums}}
"""
HARNESS = """
agents: {solver: {harness: tool_loop, model: small, max_steps: 3}}
"""
MODEL = """
models: {small: {upstream: chat_completions, base_url: "http://127.0.0.1:1/v1", overrides: {temperature: 1.0}}}
"""


def written(folder: Path, **texts: str) -> list[Path]:
    paths = []
    for name, text in texts.items():
        path = folder / f"{name}.yaml"
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


def problems_of(paths: list[Path], environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(paths, environ or {})
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.behaviour("CF-2", "ES-60")
def test_benchmark_harness_and_model_are_separate_files_that_do_not_name_each_other(tmp_path: Path) -> None:
    loaded = load_settings(written(tmp_path, benchmark=BENCHMARK, harness=HARNESS, model=MODEL), {})
    assert loaded.settings.environments["sums"].agent == "solver"
    assert loaded.settings.agents["solver"].options == {"max_steps": 3}
    assert check_plugins(loaded) == []


@pytest.mark.behaviour("CF-2")
def test_with_several_agents_an_environment_has_to_name_its_own(tmp_path: Path) -> None:
    more = "agents: {other: {harness: tool_loop, model: small}}"
    problems = problems_of(written(tmp_path, benchmark=BENCHMARK, harness=HARNESS, model=MODEL, more=more))
    assert len(problems) == 1
    assert "environments.sums.agent" in problems[0]


@pytest.mark.behaviour("CF-1")
def test_variables_win_over_later_files_and_those_over_earlier_ones(tmp_path: Path) -> None:
    first = "serving: {log_level: warning, keep_alive_s: 30}\nservices: {agent: {url: 'http://127.0.0.1:1'}}"
    second = "serving: {log_level: error}\nservices: {agent: {url: 'http://127.0.0.1:2'}}"
    paths = written(tmp_path, first=first, second=second)
    loaded = load_settings(paths, {"PADDOCK_AGENT_URL": "http://127.0.0.1:3"})
    assert loaded.settings.serving.log_level == "error"
    assert loaded.settings.serving.keep_alive_s == 30
    assert loaded.settings.services.agent.url == "http://127.0.0.1:3"
    assert loaded.sources["serving.keep_alive_s"] == str(paths[0])
    assert loaded.sources["serving.log_level"] == str(paths[1])
    assert loaded.sources["services.agent.url"] == "PADDOCK_AGENT_URL"


def test_files_may_be_named_by_a_variable_and_else_the_embedded_default_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert set(load_settings([], {}).settings.environments) >= {"math", "mcqa", "gpqa", "string_match", "weather"}
    paths = written(tmp_path, benchmark=BENCHMARK, harness=HARNESS, model=MODEL)
    loaded = load_settings([], {"PADDOCK_CONFIG": ":".join(map(str, paths))})
    assert set(loaded.settings.environments) == {"sums"}
    (tmp_path / "paddock.yaml").write_text("serving: {log_level: debug}")
    assert load_settings([], {}).settings.serving.log_level == "debug"


def test_three_variables_alone_point_the_default_model_at_an_endpoint() -> None:
    loaded = load_settings(
        [],
        {"PADDOCK_MODEL_BASE_URL": "http://127.0.0.1:8000/v1", "PADDOCK_MODEL_NAME": "m", "PADDOCK_MODEL_API_KEY": "k"},
    )
    policy = loaded.settings.models["policy"]
    assert (policy.upstream, policy.model) == ("chat_completions", "m")
    assert policy.options == {"base_url": "http://127.0.0.1:8000/v1", "api_key_env": "PADDOCK_MODEL_API_KEY"}
    assert "k" not in {str(value) for value in policy.options.values()}


@pytest.mark.behaviour("CF-1", "ES-1")
def test_everything_wrong_is_told_at_once_with_file_key_and_nearest_name(tmp_path: Path) -> None:
    bad = """
servin: {}
serving: {log_levle: info, keep_alive_s: -1}
environments: {sums: {resources: sums, agent: solver, episode_timeout_s: .nan, max_concurrent: 3}}
"""
    problems = problems_of(written(tmp_path, bad=bad))
    told = "\n".join(problems)
    assert len(problems) == 4
    assert all(problem.startswith(str(tmp_path / "bad.yaml")) for problem in problems)
    assert "servin: unknown key. There is no key 'servin'. Did you mean 'serving'?" in told
    assert "serving.log_levle: unknown key. There is no key 'log_levle'. Did you mean 'log_level'?" in told
    assert "serving.keep_alive_s" in told
    assert "episode_timeout_s" in told


@pytest.mark.behaviour("CF-1")
def test_references_to_what_is_not_there_are_told_with_the_nearest_name(tmp_path: Path) -> None:
    wrong = """
agents: {solver: {harness: tool_loop, model: smal}}
resources: {sums: {verifier: math, judge: smll}}
environments: {sums: {resources: sum, agent: solvr}}
"""
    told = "\n".join(problems_of(written(tmp_path, wrong=wrong, model=MODEL)))
    for key, near in (
        ("agents.solver.model", "small"),
        ("resources.sums.judge", "small"),
        ("environments.sums.resources", "sums"),
        ("environments.sums.agent", "solver"),
    ):
        assert key in told
        assert f"Did you mean '{near}'?" in told


def test_unknown_plugins_and_options_are_told_before_anything_starts(tmp_path: Path) -> None:
    wrong = """
models: {small: {upstream: chat_completion, base_url: "http://127.0.0.1:1/v1"}}
agents: {solver: {harness: tool_lop, model: small}}
resources: {sums: {verifier: maths, tools: [wether]}, more: {verifier: math, children: many}}
environments: {sums: {resources: sums, agent: solver}}
"""
    loaded: LoadedSettings = load_settings(written(tmp_path, wrong=wrong), {})
    told = "\n".join(str(problem) for problem in check_plugins(loaded))
    for name in ("'chat_completions'", "'tool_loop'", "'math'", "'weather'", "resources.more.children"):
        assert name in told


@pytest.mark.behaviour("ES-32")
def test_budgets_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    tight = """
environments:
  a: {resources: sums, agent: solver, cleanup_timeout_s: 10}
  b: {resources: sums, agent: solver, episode_timeout_s: 100}
resources: {sums: {verifier: math}}
"""
    problems = problems_of(written(tmp_path, tight=tight, harness=HARNESS, model=MODEL))
    assert len(problems) == 2
    assert "cleanup_timeout_s: 10 s is less than the closes it has to hold" in problems[0]
    assert "episode_timeout_s: 100 s leaves no time for the agent" in problems[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "is not valid YAML"),
        ("- 1", "must hold a mapping"),
        ("agents: {a: {harness: tool_loop}}\nagents: {}", "'agents' stands twice"),
        ("", "agents"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, text: str, words: str) -> None:
    paths = written(tmp_path, odd=text)
    if text:
        assert words in problems_of(paths)[0]
    else:
        assert load_settings(paths, {}).settings.agents == {}
    assert "cannot be read" in problems_of([tmp_path / "nowhere.yaml"])[0]


def test_the_embedded_default_is_sound() -> None:
    loaded = load_settings([], {})
    assert check_plugins(loaded) == []
    assert loaded.source_of("environments.math.resources") == EMBEDDED
