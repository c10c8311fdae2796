"""The shipped contract suite, check by check, on every provider that can work here."""

import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from shared.sandbox.selfcheck.rig import Check, Rig
from shared.sandbox.selfcheck.run import CHECKS, Subject, open_rig, run_check

pytestmark = pytest.mark.asyncio(loop_scope="module")
IMAGE = os.environ.get("PADDOCK_BASE_IMAGE", "paddock/base:bookworm")
LEAST_CHECKS = 40
PROVIDERS = [
    pytest.param(("local", {"isolation": "none"}), id="local-plain"),
    pytest.param(("local", {"isolation": "bubblewrap"}), id="local-bubblewrap", marks=pytest.mark.bubblewrap),
    pytest.param(("docker", {"image": IMAGE}), id="docker", marks=pytest.mark.docker),
]


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=PROVIDERS)
async def rig(request: pytest.FixtureRequest, state_dir: Path) -> AsyncIterator[Rig]:
    provider, options = request.param
    # Below /tmp pytest's own folders are closed to the other user that a plain local sandbox runs as.
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="paddock-test-") as directory:
        if provider == "local":
            options = {**options, "directory": directory}
        async with open_rig(Subject(provider, options, options.get("image"), state_dir)) as opened:
            yield opened


@pytest.mark.behaviour("SB-2", "SB-4")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name.replace(" ", "_"))
async def test_the_provider_keeps_the_contract(rig: Rig, check: Check) -> None:
    outcome = await run_check(rig, check)
    if outcome.verdict == "not offered":
        pytest.skip(outcome.told)
    assert outcome.verdict == "ok", outcome.told


async def test_the_suite_is_as_large_as_it_says() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS) >= LEAST_CHECKS
