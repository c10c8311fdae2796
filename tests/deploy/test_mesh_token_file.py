"""The mesh token from a file, as the Compose file gives it."""

from pathlib import Path

import pytest

from shared.configuration import load_settings
from shared.errors import ConfigurationError


def _token(environ: dict[str, str]) -> str | None:
    token = load_settings([], environ).settings.security.mesh_token
    return None if token is None else token.get_secret_value()


def test_the_token_is_read_from_the_file_without_its_line_end(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from-file\n", encoding="ascii")
    assert _token({"PADDOCK_MESH_TOKEN_FILE": str(tmp_path / "token")}) == "from-file"


def test_a_token_in_the_environment_wins_and_an_empty_one_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from-file", encoding="ascii")
    file = {"PADDOCK_MESH_TOKEN_FILE": str(tmp_path / "token")}
    assert _token({**file, "PADDOCK_MESH_TOKEN": "from-variable"}) == "from-variable"
    assert _token({**file, "PADDOCK_MESH_TOKEN": ""}) == "from-file"


@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff\xfe"])
def test_a_file_without_a_token_is_refused_by_name_and_its_content_is_not_shown(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError) as caught:
        _token({"PADDOCK_MESH_TOKEN_FILE": str(path)})
    (problem,) = caught.value.problems
    assert problem.source == "PADDOCK_MESH_TOKEN_FILE"
    assert str(path) in problem.message
    assert "0xff" not in problem.message
