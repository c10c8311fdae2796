"""Creation and removal of containers under faults: nothing is left behind, nothing is taken for done that is not."""

import asyncio
import secrets
import subprocess
import time
from pathlib import Path

import pytest

from shared.errors import ProviderError, SandboxRefusedError
from shared.ports.sandbox import StopReceipt
from tests.sandbox.docker_rig import (
    containers_of,
    created_since,
    docker,
    docker_provider,
    expect_none_of,
    new_spec,
)
from tests.sandbox.engine_proxy import Rule, engine_proxy

pytestmark = pytest.mark.docker


@pytest.mark.parametrize("cancels", [1, 2])
@pytest.mark.parametrize("step", ["images/", "containers/create", "/start", "/json HTTP", "/exec HTTP", "exec/"])
async def test_a_creation_that_is_cancelled_at_any_step_leaves_nothing(
    tmp_path: Path, state_dir: Path, step: str, cancels: int
) -> None:
    session = secrets.token_hex(8)
    async with engine_proxy(tmp_path) as proxy, docker_provider(state_dir, host=proxy.host) as provider:
        rule = Rule(step, hold_answer_s=0.4)
        proxy.rules.append(rule)
        making = asyncio.create_task(provider.create(new_spec(session)))
        await asyncio.wait_for(rule.seen.wait(), 20)
        for _ in range(cancels):
            making.cancel()
            await asyncio.sleep(0.05)
        with pytest.raises(asyncio.CancelledError):
            await making
        await expect_none_of(session)


async def test_a_cancelled_creation_waits_for_a_late_answer_and_removes_what_it_made(
    tmp_path: Path, state_dir: Path
) -> None:
    session = secrets.token_hex(8)
    async with engine_proxy(tmp_path) as proxy, docker_provider(state_dir, host=proxy.host) as provider:
        rule = Rule("containers/create", hold_answer_s=5.0, times=1)
        proxy.rules.append(rule)
        making = asyncio.create_task(provider.create(new_spec(session)))
        await asyncio.wait_for(rule.seen.wait(), 20)
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        await expect_none_of(session)


async def test_what_an_engine_makes_after_its_caller_gave_up_is_removed(tmp_path: Path, state_dir: Path) -> None:
    session = secrets.token_hex(8)
    async with (
        engine_proxy(tmp_path) as proxy,
        docker_provider(state_dir, host=proxy.host, call_timeout_s=1) as provider,
    ):
        await provider.check()
        await (await provider.create(new_spec())).stop()
        proxy.rules.append(Rule("containers/create", hold_request_s=2.0, times=1))
        since = time.time()
        with pytest.raises(ProviderError, match="gave no answer when asked to make a container"):
            await provider.create(new_spec(session))
        end = time.monotonic() + 15
        # The engine's own record: what was made may be gone again before one looks.
        while not await asyncio.to_thread(created_since, since, session):
            assert time.monotonic() < end, "the late request made nothing"
            await asyncio.sleep(0.05)
        await expect_none_of(session, settle_s=1.0)


async def test_a_start_that_fails_leaves_nothing_and_says_why(tmp_path: Path, state_dir: Path) -> None:
    session = secrets.token_hex(8)
    async with docker_provider(state_dir) as provider:
        with pytest.raises(SandboxRefusedError, match=r"/proc"):
            await provider.create(new_spec(session, tmpfs={"/proc/sys": ""}))
        await expect_none_of(session)


async def test_a_supervisor_volume_that_somebody_removed_is_filled_again(tmp_path: Path, state_dir: Path) -> None:
    async with docker_provider(state_dir) as provider:
        box = await provider.create(new_spec())
        volumes = docker("inspect", "--format", "{{range .Mounts}}{{.Name}} {{end}}", f"paddock-{box.id}").split()
        await box.stop()
        (supervisor,) = [name for name in volumes if name.startswith("paddock-supervisor-")]
        try:
            docker("volume", "rm", supervisor)
        except subprocess.CalledProcessError:  # another test's sandbox uses it
            pytest.skip("the supervisor's volume is in use")
        again = await provider.create(new_spec())
        assert (await again.exec(["true"])).ok
        await again.stop()


async def test_a_removal_that_fails_is_an_error_and_may_be_tried_again(tmp_path: Path, state_dir: Path) -> None:
    session = secrets.token_hex(8)
    async with engine_proxy(tmp_path) as proxy, docker_provider(state_dir, host=proxy.host) as provider:
        box = await provider.create(new_spec(session))
        proxy.rules.append(Rule("DELETE ", reply=(500, '{"message": "device busy"}'), times=2))
        for _ in range(2):
            with pytest.raises(ProviderError, match="device busy"):
                await box.stop()
            assert containers_of(session), "it was removed although the engine said no"
        assert await box.stop() == StopReceipt("stopped")
        await expect_none_of(session)


async def test_a_stop_returns_only_when_the_engine_no_longer_has_the_container(tmp_path: Path, state_dir: Path) -> None:
    async with engine_proxy(tmp_path) as proxy, docker_provider(state_dir, host=proxy.host) as provider:
        box = await provider.create(new_spec())
        proxy.rules.append(Rule("/json HTTP", reply=(200, '{"Id": "still here"}'), times=4))
        before = len(proxy.requests)
        assert await box.stop() == StopReceipt("stopped")
        asked = [line for line in proxy.requests[before:] if "/json HTTP" in line]
        assert len(asked) == 5


async def test_stops_at_once_ask_the_engine_once(tmp_path: Path, state_dir: Path) -> None:
    async with engine_proxy(tmp_path) as proxy, docker_provider(state_dir, host=proxy.host) as provider:
        box = await provider.create(new_spec())
        receipts = await asyncio.gather(box.stop(), box.stop(), box.stop())
        assert set(receipts) == {StopReceipt("stopped")}
        assert sum(line.startswith("DELETE ") for line in proxy.requests) == 1


async def test_a_cancelled_stop_still_removes_the_container(tmp_path: Path, state_dir: Path) -> None:
    session = secrets.token_hex(8)
    async with engine_proxy(tmp_path) as proxy, docker_provider(state_dir, host=proxy.host) as provider:
        box = await provider.create(new_spec(session))
        rule = Rule("DELETE ", hold_answer_s=0.5)
        proxy.rules.append(rule)
        stopping = asyncio.create_task(box.stop())
        await asyncio.wait_for(rule.seen.wait(), 20)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert not containers_of(session)


async def test_an_engine_that_is_not_there_is_told_with_its_address(tmp_path: Path, state_dir: Path) -> None:
    async with docker_provider(state_dir, host=f"unix://{tmp_path}/nobody.sock") as provider:
        with pytest.raises(ProviderError, match=r"nobody\.sock.*DOCKER_HOST"):
            await provider.check()
