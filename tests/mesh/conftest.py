from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.collector.fault_proxy import FaultProxy
from tests.mesh.background import Background
from tests.mesh.chat import ChatServer
from tests.mesh.processes import ServedMesh, served
from tests.mesh.run_rig import RunRig


@pytest.fixture(scope="module")
def background() -> Iterator[Background]:
    with Background() as started:
        yield started


@pytest.fixture(scope="module")
def chat(background: Background) -> ChatServer:
    return ChatServer(background)


@pytest.fixture(scope="module")
def run_mesh(tmp_path_factory: pytest.TempPathFactory, chat: ChatServer) -> Iterator[ServedMesh]:
    environ = {"PADDOCK_MODEL_BASE_URL": chat.url, "PADDOCK_MODEL_NAME": "m", "PADDOCK_DRAIN_LEAD_S": "0"}
    with served(cwd=tmp_path_factory.mktemp("mesh"), environ=environ) as started:
        yield started


@pytest.fixture(scope="module")
def run_proxy(run_mesh: ServedMesh, background: Background) -> FaultProxy:
    return background.enter(FaultProxy(run_mesh.url("environment")))


@pytest.fixture
def rig(tmp_path: Path, run_mesh: ServedMesh, run_proxy: FaultProxy, chat: ChatServer) -> RunRig:
    """A run of the test's own on the module's services."""
    return RunRig(tmp_path, run_mesh, run_proxy, chat)
