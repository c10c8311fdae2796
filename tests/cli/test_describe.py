"""What the mesh tells about itself is true."""

import json
from pathlib import Path

import pytest
from pydantic import SecretStr

from services.describe import HIDDEN, SCHEMAS, defaults_table, effective, schema_of
from shared.configuration import load_settings

ROOT = Path(__file__).parents[2]


def test_the_documented_defaults_are_those_in_the_code() -> None:
    documented = (ROOT / "deploy" / "defaults.md").read_text(encoding="utf-8").splitlines()
    assert documented == list(defaults_table()), "run: paddock config --defaults > deploy/defaults.md"


def test_every_key_has_a_meaning() -> None:
    assert [line for line in defaults_table() if line.endswith("|  |")] == []


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_schemas_are_json(name: str) -> None:
    assert json.loads(schema_of(name))["type"] == "object"


def test_effective_values_carry_their_source_and_hide_secrets(tmp_path: Path) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text(
        "serving: {log_level: debug}\nmodels: {m: {upstream: chat_completions, base_url: 'http://u:p@h/v1'}}\n"
    )
    loaded = load_settings([file], {"PADDOCK_MESH_TOKEN": "the-secret-token"})
    lines = list(effective(loaded))
    assert isinstance(loaded.settings.security.mesh_token, SecretStr)
    text = "\n".join(lines)
    assert "the-secret-token" not in text
    assert "u:p@" not in text
    told = {line.split()[0]: line for line in lines}
    assert HIDDEN in told["security.mesh_token"]
    assert told["security.mesh_token"].endswith("# PADDOCK_MESH_TOKEN")
    assert told["serving.log_level"].endswith(f"# {file}")
    assert told["serving.keep_alive_s"].endswith("# default")
