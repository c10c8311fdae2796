"""The grading children: limits, kills, replacement, and that none outlives its server (Linux: `/proc` tells)."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.resources.grading.pool import SHARED_POOL, GradingPool
from services.resources.grading.process import GraderUnavailableError
from services.resources.grading.protocol import Outcome
from services.resources.verifiers.math import MathTask, MathVerifier, Options
from shared.errors import VerifierError
from tests.verifiers.math_answers import boxed
from tests.verifiers.processes import (
    children_of_this_process,
    gone,
    heartbeat,
    resident_mib,
    runs,
    stat,
    ticks,
    variables,
)

RUNAWAYS = [
    (r"$9^{9^{9}}$", "387420489"),
    (r"$(10^{9})!$", "1"),
    ("5", r"9^{9^{9}}"),
    ("2", r"\ln(\ln(\ln(10^{10^{10^{10}}})))"),
]
LONGEST_HOLD_S = 0.05
COMPUTES_WITHIN_S = 30.0


@asynccontextmanager
async def serving(options: Options) -> AsyncIterator[MathVerifier]:
    verifier = MathVerifier(options)
    try:
        yield verifier
    finally:
        await verifier.close()


def pool_of(verifier: MathVerifier) -> GradingPool:
    return SHARED_POOL.join(verifier, 1)


async def grade(verifier: MathVerifier, gold: str, answer: str) -> tuple[float, str]:
    verdict = (await verifier.verify(MathTask(expected_answer=gold), boxed(answer), None)).model_dump()
    return verdict["reward"], verdict["library_outcome"]


async def the_one_that_computes(verifier: MathVerifier) -> int:
    """The pid of the child that uses processor time first."""
    before = {pid: ticks(pid) for pid in pool_of(verifier).pids}
    deadline = time.monotonic() + COMPUTES_WITHIN_S
    while time.monotonic() < deadline:
        await asyncio.sleep(0.02)
        for pid, used in before.items():
            if ticks(pid) > used + 10:
                return pid
    raise AssertionError("no child computes")


@pytest.mark.behaviour("MA-1")
async def test_answers_without_end_are_told_as_timeouts_while_the_server_goes_on() -> None:
    async with serving(Options(timeout_s=1.5)) as verifier:
        await verifier.warm()
        async with heartbeat() as held:
            graded = await asyncio.gather(*(grade(verifier, gold, answer) for gold, answer in RUNAWAYS))
        assert [reward for reward, _ in graded] == [0.0] * len(RUNAWAYS)
        assert {outcome for _, outcome in graded} <= {Outcome.TIMEOUT, Outcome.MEMORY}
        assert graded[0] == graded[2] == (0.0, Outcome.TIMEOUT)
        assert held
        assert max(held) < LONGEST_HOLD_S
        assert await grade(verifier, r"\frac12", "0.5") == (1.0, Outcome.EQUAL)
    assert children_of_this_process() == []


async def test_the_heartbeat_tells_when_a_comparison_is_made_in_a_thread_instead() -> None:
    async with heartbeat() as held:
        await asyncio.sleep(0.05)
        # Arithmetic with big integers keeps the interpreter's lock: what the children are for.
        await asyncio.to_thread(pow, 9, 9**7)
        await asyncio.sleep(0.05)
    assert max(held) > LONGEST_HOLD_S


async def test_a_spare_stands_ready_where_a_child_was_killed() -> None:
    async with serving(Options(timeout_s=1.0, children=1)) as verifier:
        await verifier.warm()
        before = set(pool_of(verifier).pids)
        assert (await grade(verifier, "5", "9^{9^{9}}"))[1] == Outcome.TIMEOUT
        (spare,) = before & set(pool_of(verifier).pids)
        assert await grade(verifier, "5", "10/2") == (1.0, Outcome.EQUAL)
        assert spare in pool_of(verifier).pids


async def test_memory_is_bounded_and_told() -> None:
    async with serving(Options(timeout_s=60, memory_mib=256)) as verifier:
        watch = asyncio.create_task(_largest_mib(verifier))
        assert await grade(verifier, "5", "2^{10^{9}}") == (0.0, Outcome.MEMORY)
        assert await grade(verifier, "5", "10/2") == (1.0, Outcome.EQUAL)
        watch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watch


async def _largest_mib(verifier: MathVerifier) -> None:
    while True:
        assert all(resident_mib(pid) <= 256 for pid in pool_of(verifier).pids)
        await asyncio.sleep(0.02)


async def test_children_start_at_the_first_need_and_are_at_most_one_more_than_work() -> None:
    async with serving(Options(children=2)) as verifier:
        assert children_of_this_process() == []
        assert await grade(verifier, "5", "10/2") == (1.0, Outcome.EQUAL)
        assert len(pool_of(verifier).pids) == 2
        await asyncio.gather(*(grade(verifier, f"{n}", f"{2 * n}/2") for n in range(50)))
        assert len(pool_of(verifier).pids) == 3
        assert len(children_of_this_process()) == 3


async def test_all_entries_share_the_children_and_the_last_one_ends_them() -> None:
    first, second = MathVerifier(Options()), MathVerifier(Options(children=1))
    await grade(first, "5", "10/2")
    pids = pool_of(first).pids
    await grade(second, "5", "10/2")
    assert pool_of(second).pids == pids
    await first.close()
    await first.close()
    assert await grade(second, "6", "12/2") == (1.0, Outcome.EQUAL)
    await second.close()
    assert children_of_this_process() == []


async def test_a_child_that_is_killed_from_outside_is_replaced_and_the_answer_graded_anew() -> None:
    async with serving(Options(timeout_s=2, children=1)) as verifier:
        await verifier.warm()
        grading = asyncio.create_task(grade(verifier, "5", "9^{9^{9}}"))
        killed = await the_one_that_computes(verifier)
        os.kill(killed, signal.SIGKILL)
        assert await grading == (0.0, Outcome.TIMEOUT)
        assert killed not in pool_of(verifier).pids


async def test_children_that_are_killed_from_outside_again_and_again_are_never_a_grade() -> None:
    async with serving(Options(timeout_s=60, children=1)) as verifier:
        await verifier.warm()
        grading = asyncio.create_task(grade(verifier, "5", "9^{9^{9}}"))
        for _ in range(2):
            os.kill(await the_one_that_computes(verifier), signal.SIGKILL)
        with pytest.raises(GraderUnavailableError, match="two grading children in turn") as raised:
            await grading
        assert not raised.value.terminal


async def test_a_comparison_that_crashes_its_process_twice_is_told() -> None:
    async with serving(Options(timeout_s=60, children=1)) as verifier:
        await verifier.warm()
        grading = asyncio.create_task(grade(verifier, "5", "9^{9^{9}}"))
        for _ in range(2):
            os.kill(await the_one_that_computes(verifier), signal.SIGSEGV)
        assert await grading == (0.0, Outcome.CRASHED)


async def test_idle_children_that_are_killed_are_replaced() -> None:
    async with serving(Options(children=1)) as verifier:
        await verifier.warm()
        pids = pool_of(verifier).pids
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert await gone(pids)
        assert await grade(verifier, "5", "10/2") == (1.0, Outcome.EQUAL)
        assert not set(pids) & set(pool_of(verifier).pids)


async def test_a_cancelled_grading_ends_its_child() -> None:
    async with serving(Options(timeout_s=60, children=1)) as verifier:
        await verifier.warm()
        grading = asyncio.create_task(grade(verifier, "5", "9^{9^{9}}"))
        pid = await the_one_that_computes(verifier)
        grading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await grading
        assert pid not in pool_of(verifier).pids
        assert stat(pid) == []
        assert await grade(verifier, "5", "10/2") == (1.0, Outcome.EQUAL)


async def test_closing_ends_busy_children_and_fails_what_they_worked_on() -> None:
    verifier = MathVerifier(Options(timeout_s=60, children=1))
    await verifier.warm()
    grading = asyncio.create_task(grade(verifier, "5", "9^{9^{9}}"))
    waiting = asyncio.create_task(grade(verifier, "6", "9^{9^{9}}"))
    await the_one_that_computes(verifier)
    await verifier.close()
    for task in (grading, waiting):
        with pytest.raises(GraderUnavailableError, match="stopping"):
            await task
    assert children_of_this_process() == []


async def test_idle_children_use_no_processor_time() -> None:
    async with serving(Options()) as verifier:
        await verifier.warm()
        before = [ticks(pid) for pid in pool_of(verifier).pids]
        await asyncio.sleep(0.5)
        assert [ticks(pid) for pid in pool_of(verifier).pids] == before


async def test_children_inherit_no_secret_and_no_terminal_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDOCK_MODEL_API_KEY", "not-for-children")
    async with serving(Options()) as verifier:
        await verifier.warm()
        for pid in pool_of(verifier).pids:
            assert variables(pid) == {"PYTHONPATH", "PYTHONHASHSEED", "PYTHONUTF8", "LANG"}
            assert os.getsid(pid) == pid


@pytest.mark.parametrize("answer", ["10/2", "9^{9^{9}}"])
async def test_children_die_with_a_server_that_is_killed(answer: str) -> None:
    program = f"""
import asyncio
from services.resources.grading.pool import SHARED_POOL
from services.resources.verifiers.math import MathTask, MathVerifier, Options
from tests.verifiers.math_answers import boxed

async def main():
    verifier = MathVerifier(Options(timeout_s=600))
    await verifier.warm()
    grading = asyncio.create_task(verifier.verify(MathTask(expected_answer="5"), boxed("{answer}"), None))
    await asyncio.sleep(0.2)
    print(*SHARED_POOL.join(verifier, 1).pids, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    async with asyncio.timeout(60):
        pids = [int(pid) for pid in (await server.stdout.readline()).split()]
    assert len(pids) == 3
    assert all(runs(pid) for pid in pids)
    server.kill()
    await server.wait()
    assert await gone(pids)


async def test_the_server_process_never_loads_the_library() -> None:
    program = """
import asyncio, sys
from services.resources.verifiers.math import MathTask, MathVerifier, Options
from tests.verifiers.math_answers import boxed

async def main():
    verifier = MathVerifier(Options())
    verdict = await verifier.verify(MathTask(expected_answer="5"), boxed("10/2"), None)
    await verifier.close()
    print(verdict.reward, "math_verify" in sys.modules, "sympy" in sys.modules)

asyncio.run(main())
"""
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    async with asyncio.timeout(60):
        assert (await server.stdout.readline()).split() == [b"1.0", b"False", b"False"]
        assert await server.wait() == 0


async def test_an_expected_answer_that_exceeds_a_limit_by_itself_is_no_grade() -> None:
    async with serving(Options(timeout_s=1, memory_mib=256)) as verifier:
        with pytest.raises(VerifierError, match=r"expected_answer cannot be read within the time limit"):
            await verifier.verify(MathTask(expected_answer="(" * 400 + "1" + ")" * 400), boxed("4"), None)
        assert await grade(verifier, "5", "10/2") == (1.0, Outcome.EQUAL)


async def test_an_answer_nested_beyond_all_measure_earns_nothing_and_holds_up_nothing() -> None:
    async with serving(Options(timeout_s=1)) as verifier:
        reward, outcome = await grade(verifier, "1", "(" * 5000 + "1" + ")" * 5000)
        assert (reward, outcome in {Outcome.TIMEOUT, Outcome.UNREADABLE}) == (0.0, True)
        assert await grade(verifier, "1", "2/2") == (1.0, Outcome.EQUAL)


@pytest.mark.parametrize("turns", range(1, 12))
async def test_a_start_that_is_given_up_at_any_turn_of_the_loop_neither_hangs_nor_leaves_a_child(turns: int) -> None:
    verifier = MathVerifier(Options(children=2))
    warming = asyncio.create_task(pool_of(verifier).warm())
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(COMPUTES_WITHIN_S):
        await verifier.close()
        await asyncio.gather(warming, return_exceptions=True)
    assert children_of_this_process() == []


async def test_a_large_server_does_not_make_its_children_look_large() -> None:
    ballast = bytearray(700 * 2**20)
    ballast[::4096] = b"x" * len(ballast[::4096])
    async with serving(Options(children=1)) as verifier:
        await verifier.warm()
        before = set(pool_of(verifier).pids)
        for n in range(1, 6):
            assert await grade(verifier, f"{n}", f"{2 * n}/2") == (1.0, Outcome.EQUAL)
        assert set(pool_of(verifier).pids) == before
    del ballast
