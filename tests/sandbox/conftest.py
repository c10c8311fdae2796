"""One state folder for all tests of sandboxes: the supervisor is compiled into it once."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")
