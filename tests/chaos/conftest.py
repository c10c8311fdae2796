"""One fleet for all tests of this folder, and what they measured, told at the end of the run."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.chaos.fleet import Fleet, fleet

_TOLD: list[str] = []


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with fleet(tmp_path_factory.mktemp("fleet")) as started:
        yield started


@pytest.fixture
def tell() -> list[str]:
    """Lines for the end of the run."""
    return _TOLD


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _TOLD:
        terminalreporter.section("chaos")
        for line in _TOLD:
            terminalreporter.write_line(line)
