"""Cleanups: once, in order, within a budget, never forgotten."""

import asyncio
import time

import pytest

from shared.cleanup import CleanupStack, shielded
from shared.errors import SessionLostError

SOON_S = 10.0


@pytest.mark.behaviour("ES-20", "ES-22")
async def test_the_last_registered_is_undone_first_and_a_failure_stops_nothing() -> None:
    order: list[str] = []
    stack = CleanupStack(0.4)

    async def fine(_left_s: float) -> None:
        order.append("fine")

    async def broken(_left_s: float) -> None:
        order.append("broken")
        raise RuntimeError("no")

    stack.register("fine", fine)
    stack.register("broken", broken, attempts=1)
    await stack.unwind()
    assert order == ["broken", "fine"]
    assert [(error.what, error.type, error.message) for error in stack.outstanding] == [
        ("broken", "RuntimeError", "no")
    ]


@pytest.mark.behaviour("ES-21")
async def test_what_succeeded_is_not_run_again_and_what_failed_is() -> None:
    runs: list[str] = []
    stack = CleanupStack(2.0)

    async def once(_left_s: float) -> None:
        runs.append("once")

    async def second_time_lucky(_left_s: float) -> None:
        runs.append("lucky")
        if runs.count("lucky") == 1:
            raise RuntimeError("not yet")

    first = stack.register("once", once)
    lucky = stack.register("lucky", second_time_lucky)
    assert await first.run(1.0) is True
    assert await first.run(1.0) is True
    assert await lucky.run(0.0) is False
    await stack.unwind()
    assert runs == ["once", "lucky", "lucky"]
    assert stack.outstanding == ()


@pytest.mark.behaviour("ES-21")
async def test_concurrent_runs_of_one_cleanup_are_one_run() -> None:
    runs = 0
    gate = asyncio.Event()

    async def slow(_left_s: float) -> None:
        nonlocal runs
        runs += 1
        await gate.wait()

    cleanup = CleanupStack(5.0).register("slow", slow)
    both = [asyncio.create_task(cleanup.run(SOON_S)) for _ in range(5)]
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(*both) == [True] * 5
    assert runs == 1


@pytest.mark.behaviour("ES-20", "ES-25")
async def test_one_budget_bounds_the_whole_unwind_and_what_had_no_turn_is_named() -> None:
    stack = CleanupStack(0.3)

    async def hangs(_left_s: float) -> None:
        await asyncio.Event().wait()

    async def fails_without_words(_left_s: float) -> None:
        raise RuntimeError

    stack.register("never reached in time", hangs, attempts=1)
    stack.register("hangs", hangs)
    stack.register("silent", fails_without_words, attempts=1)
    began = time.monotonic()
    await stack.unwind()
    assert time.monotonic() - began < 2.0
    told = {error.what: error for error in stack.outstanding}
    assert set(told) == {"never reached in time", "hangs", "silent"}
    assert told["hangs"].type == "TimeoutError"
    assert told["silent"].message == "RuntimeError()"


async def test_an_attempt_that_was_never_made_is_told_as_such() -> None:
    stack = CleanupStack(1.0)

    async def anything(_left_s: float) -> None:
        raise AssertionError("not to be run")

    stack.register("later", anything)
    assert [error.type for error in stack.outstanding] == ["NotTried"]


async def test_a_share_of_the_unwind_bounds_one_cleanup() -> None:
    stack = CleanupStack(SOON_S)

    async def fails(_left_s: float) -> None:
        raise ConnectionError("nobody there")

    stack.register("gone peer", fails, unwind_s=0.3)
    began = time.monotonic()
    await stack.unwind()
    assert time.monotonic() - began < 3.0


@pytest.mark.behaviour("ES-23")
async def test_a_cancelled_unwind_completes_and_is_cancelled_after_it() -> None:
    done: list[str] = []
    started = asyncio.Event()
    stack = CleanupStack(5.0)

    async def slow(_left_s: float) -> None:
        started.set()
        await asyncio.sleep(0.1)
        done.append("slow")

    stack.register("slow", slow)
    task = asyncio.create_task(stack.unwind())
    await started.wait()
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["slow"]


async def test_shielded_work_gives_its_result_its_error_and_its_own_cancellation() -> None:
    async def give() -> int:
        return 7

    async def fail() -> None:
        raise ValueError("mine")

    async def cancel_itself() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    assert await shielded(give()) == 7
    with pytest.raises(ValueError, match="mine"):
        await shielded(fail())
    with pytest.raises(asyncio.CancelledError):
        await shielded(cancel_itself())


async def test_an_error_of_shielded_work_does_not_hide_the_cancellation(caplog: pytest.LogCaptureFixture) -> None:
    started = asyncio.Event()

    async def fail_slowly() -> None:
        started.set()
        await asyncio.sleep(0.05)
        raise ValueError("too late")

    task = asyncio.create_task(shielded(fail_slowly()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "too late" in caplog.text


async def test_a_session_that_is_lost_is_not_asked_for_again() -> None:
    runs = 0

    async def lost(_left_s: float) -> None:
        nonlocal runs
        runs += 1
        raise SessionLostError("it is gone")

    stack = CleanupStack(SOON_S)
    cleanup = stack.register("close the session", lost)
    assert await cleanup.run(SOON_S) is False
    await stack.unwind()
    assert runs == 1
    assert [error.type for error in stack.outstanding] == ["SessionLostError"]
