"""Every test of this folder runs with each version of the CLI."""

from pathlib import Path

import pytest

from tests.codex.cli import VERSIONS
from tests.codex.rig import Rig


@pytest.fixture(params=VERSIONS)
def codex(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    return Rig(request.param, tmp_path)
