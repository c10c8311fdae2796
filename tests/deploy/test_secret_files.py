"""Secrets from files, as the Compose file gives them."""

from pathlib import Path

import pytest

from shared.configuration import load_settings
from shared.errors import ConfigurationError
from shared.settings import Settings

VARIABLES = ("PADDOCK_MESH_TOKEN", "PADDOCK_CLIENT_TOKEN", "PADDOCK_STORE_URL")
IN_FILE, IN_VARIABLE = "redis://from-file:6379/0", "redis://from-variable:6379/0"


def _settings(environ: dict[str, str]) -> Settings:
    return load_settings([], environ).settings


def _value(variable: str, environ: dict[str, str]) -> str:
    settings = _settings(environ)
    token = {
        "PADDOCK_MESH_TOKEN": settings.security.mesh_token,
        "PADDOCK_CLIENT_TOKEN": settings.security.client_token,
    }.get(variable)
    return settings.store.url if token is None else token.get_secret_value()


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_secret_is_read_from_the_file_without_its_line_end(tmp_path: Path, variable: str) -> None:
    (tmp_path / "secret").write_text(f"{IN_FILE}\n", encoding="ascii")
    assert _value(variable, {f"{variable}_FILE": str(tmp_path / "secret")}) == IN_FILE


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_secret_in_the_environment_wins_and_an_empty_one_does_not_count(tmp_path: Path, variable: str) -> None:
    (tmp_path / "secret").write_text(IN_FILE, encoding="ascii")
    file = {f"{variable}_FILE": str(tmp_path / "secret")}
    assert _value(variable, {**file, variable: IN_VARIABLE}) == IN_VARIABLE
    assert _value(variable, {**file, variable: ""}) == IN_FILE


def test_an_empty_name_of_a_file_is_none() -> None:
    assert _settings({f"{variable}_FILE": "" for variable in VARIABLES}) == _settings({})


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff\xfe"])
def test_a_file_without_a_secret_is_refused_by_name_and_its_content_is_not_shown(
    tmp_path: Path, variable: str, content: bytes | None
) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError) as caught:
        _settings({f"{variable}_FILE": str(path)})
    (problem,) = caught.value.problems
    assert problem.source == f"{variable}_FILE"
    assert str(path) in problem.message
    assert "0xff" not in problem.message


def test_the_key_of_the_model_stands_in_a_file_or_in_the_environment_which_wins(tmp_path: Path) -> None:
    model = {"PADDOCK_MODEL_BASE_URL": "http://127.0.0.1:8000/v1", "PADDOCK_MODEL_API_KEY_FILE": str(tmp_path / "key")}
    (tmp_path / "key").write_text("a-key\n", encoding="ascii")
    from_file = _settings(model).models["policy"]
    assert (from_file.options["api_key_file"], "api_key_env" in from_file.options) == (str(tmp_path / "key"), False)
    from_variable = _settings({**model, "PADDOCK_MODEL_API_KEY": "another"}).models["policy"]
    assert (from_variable.options["api_key_env"], "api_key_file" in from_variable.options) == (
        "PADDOCK_MODEL_API_KEY",
        False,
    )
