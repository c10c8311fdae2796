from collections.abc import Iterator

import pytest

from tests.mesh.background import Background
from tests.mesh.chat import ChatServer


@pytest.fixture(scope="module")
def background() -> Iterator[Background]:
    with Background() as started:
        yield started


@pytest.fixture(scope="module")
def chat(background: Background) -> ChatServer:
    return ChatServer(background)
