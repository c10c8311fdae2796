"""What may be said of engines and workers, and what models are told of the engines that serve them."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from services.describe import check_plugins, effective
from shared.configuration import load_settings
from shared.errors import ConfigurationError
from shared.settings import LoadedSettings

MODELS = {
    "policy": {"upstream": "chat_completions", "model": "m"},
    "judge": {"upstream": "responses", "model": "m"},
    "plain": {"upstream": "scripted"},
}
COMMAND = ["serve-a-model", "--port", "{port}"]


def loaded_from(folder: Path, environ: dict[str, str] | None = None, **sections: Any) -> LoadedSettings:
    path = folder / "mesh.yaml"
    path.write_text(yaml.safe_dump({"models": MODELS, **sections}, sort_keys=False))
    return load_settings([path], environ or {})


def problems_of(folder: Path, environ: dict[str, str] | None = None, **sections: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        loaded_from(folder, environ, **sections)
    return "\n".join(str(problem) for problem in caught.value.problems)


def base_url_of(loaded: LoadedSettings, model: str) -> Any:
    return loaded.settings.models[model].options.get("base_url")


def test_a_model_gets_the_address_of_each_engine_that_has_its_name(tmp_path: Path) -> None:
    engines = {"policy": {"command": COMMAND, "count": 3, "port": 9000, "host": "::1"}}
    loaded = loaded_from(tmp_path, engines=engines)
    assert base_url_of(loaded, "policy") == [f"http://[::1]:{port}/v1" for port in (9000, 9001, 9002)]
    assert base_url_of(loaded, "judge") is None
    (shown,) = [line for line in effective(loaded) if line.startswith("models.policy.base_url")]
    assert shown.endswith("# engines.policy")


def test_with_a_router_models_are_reached_through_it_and_several_may_share_the_engines(tmp_path: Path) -> None:
    router = {"command": ["route"], "port": 9100}
    engines = {"shared": {"command": COMMAND, "count": 2, "models": ["policy", "judge"], "base_path": "/openai"}}
    engines["shared"]["router"] = router
    loaded = loaded_from(tmp_path, engines=engines)
    for model in ("policy", "judge"):
        assert base_url_of(loaded, model) == ["http://127.0.0.1:9100/openai"]
    assert check_plugins(loaded) == []


def test_variables_of_engines_are_not_shown(tmp_path: Path) -> None:
    engines = {"policy": {"command": COMMAND, "env": {"HF_TOKEN": "a-token-that-nobody-may-see"}}}
    loaded = loaded_from(tmp_path, engines=engines)
    assert "nobody-may-see" not in "\n".join(effective(loaded)) + repr(loaded)


@pytest.mark.parametrize(
    ("engines", "key", "words"),
    [
        ({"polcy": {}}, "engines.polcy", "There is no model 'polcy'. Did you mean 'policy'?"),
        ({"plain": {}}, "models.plain.upstream", "'scripted' asks no server, so engines.plain cannot serve it"),
        ({"policy": {}, "more": {"models": ["policy"], "port": 9}}, "engines.more", "is served by engines.policy"),
        ({"policy": {"command": []}}, "engines.policy.command", "at least 1 item"),
        ({"policy": {"command": "serve --port 1"}}, "engines.policy.command", "give a list, as in [vllm"),
        ({"policy": {"port": 0}}, "engines.policy.port", "greater than 0"),
        ({"policy": {"port": 65_535, "count": 2}}, "engines.policy.port", "no port 65536 for engine 1 of policy"),
        ({"policy": {"router": {"command": ["r"]}}}, "engines.policy.router.port", "Field required"),
        (
            {"policy": {"count": 3, "router": {"command": ["r"], "port": 8002}}},
            "engines.policy.router.port",
            "http://127.0.0.1:8002 belongs to engine 2 of policy already, so the router of policy cannot listen there",
        ),
        ({"policy": {"ready_path": "health"}}, "engines.policy.ready_path", "should match pattern"),
        ({"policy": {"base_path": "/v1/"}}, "engines.policy.base_path", "should match pattern"),
        ({"policy": {"cout": 2}}, "engines.policy.cout", "unknown key"),
    ],
)
def test_engines_that_cannot_be_are_told_with_their_key(
    engines: dict[str, dict[str, Any]], key: str, words: str, tmp_path: Path
) -> None:
    told = problems_of(tmp_path, engines={name: {"command": COMMAND, **entry} for name, entry in engines.items()})
    assert f"{key}: " in told or f"{key} " in told, told
    assert words in told


def test_an_address_and_engines_for_one_model_are_refused_whoever_gave_the_address(tmp_path: Path) -> None:
    engines = {"policy": {"command": COMMAND}}
    models = {"policy": {"upstream": "chat_completions", "base_url": "http://127.0.0.1:1/v1"}}
    told = problems_of(tmp_path, engines=engines, models=models)
    assert "models.policy.base_url: engines.policy serves this model" in told
    told = problems_of(tmp_path, {"PADDOCK_MODEL_BASE_URL": "http://127.0.0.1:1/v1"}, engines=engines)
    assert told.startswith("PADDOCK_MODEL_BASE_URL: models.policy.base_url: engines.policy serves this model")


@pytest.mark.behaviour("AG-8", "AG-10")
def test_more_than_one_worker_on_the_memory_store_is_refused_with_the_remedy(tmp_path: Path) -> None:
    told = problems_of(tmp_path, serving={"workers": 2})
    assert "serving.workers: 2 workers need a store that they share" in told
    assert "store.url (PADDOCK_STORE_URL)" in told
    assert loaded_from(tmp_path, serving={"workers": 1}).settings.serving.workers == 1
    shared = loaded_from(tmp_path, {"PADDOCK_STORE_URL": "redis://127.0.0.1:1/0"}, serving={"workers": 2})
    assert shared.settings.serving.workers == 2


def test_the_command_line_wins_over_files_and_is_named_as_the_source() -> None:
    options = {"--workers": {"serving": {"workers": 3}}}
    loaded = load_settings([], {"PADDOCK_STORE_URL": "redis://127.0.0.1:1/0"}, options=options)
    assert (loaded.settings.serving.workers, loaded.sources["serving.workers"]) == (3, "--workers")
    with pytest.raises(ConfigurationError) as caught:
        load_settings([], {}, options=options)
    assert str(caught.value.problems[0]).startswith("--workers: serving.workers: 3 workers need")
