"""`paddock run` as a process: what it prints, and how it takes signals and kills."""

import asyncio
import contextlib
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.collector.fake_environment import (
    Body,
    FakeEnvironment,
    HeldEnvironment,
    failing,
    flat_row,
    graded,
    read_jsonl,
    write_rows,
)
from tests.serving import serving

BOUND_S = 60.0
_RUN = """
import argparse, sys
from services.collector.arguments import add_run_arguments, options_of
from services.collector.run import run
parser = argparse.ArgumentParser()
add_run_arguments(parser)
arguments = parser.parse_args()
sys.exit(run(options_of(arguments), arguments.url))
"""
_DEMO = "import sys; from services.collector.demo_rows import run_demo; sys.exit(run_demo(sys.argv[1]))"


@contextlib.asynccontextmanager
async def _process(
    code: str, *arguments: object, cwd: Path, stderr: int = asyncio.subprocess.PIPE
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        code,
        *map(str, arguments),
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "TERM": "xterm"},
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _ended(process: asyncio.subprocess.Process) -> tuple[int, str, str]:
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), (err or b"").decode()


@pytest.mark.behaviour("CO-3", "CO-5")
async def test_a_killed_run_is_resumed_without_a_row_twice_or_never(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "r.jsonl", [flat_row(n=n) for n in range(40)])
    out = tmp_path / "o.jsonl"
    environment = HeldEnvironment(free=20)
    async with asyncio.timeout(BOUND_S), serving(environment.app) as url:
        arguments = (rows, "-o", out, "--url", url, "--concurrency", 8)
        async with _process(_RUN, *arguments, cwd=tmp_path) as process:
            await environment.holds(8)
            process.kill()
            await process.wait()
        kept = read_jsonl(out)
        assert len(kept) == 20
        # What a kill in the middle of a write leaves.
        with out.open("ab") as file:
            file.write(b'{"reward": 1.0, "epis')
        environment.go.set()
        async with _process(_RUN, *arguments, "--resume", cwd=tmp_path) as process:
            status, _, err = await _ended(process)
    assert status == 0, err
    assert "was cut off in the middle and is dropped" in err
    results = read_jsonl(out)
    assert sorted(result["_ng_task_index"] for result in results) == list(range(40))
    assert results[:20] == kept
    assert set(environment.starts.values()) == {1}
    assert len(environment.starts) == 40


@pytest.mark.behaviour("CO-3")
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_a_signal_ends_a_run_with_a_partial_summary(
    tmp_path: Path, number: signal.Signals, expected: int
) -> None:
    rows = write_rows(tmp_path / "r.jsonl", [flat_row(n=n) for n in range(10)])
    out = tmp_path / "o.jsonl"
    environment = HeldEnvironment(free=3)
    async with asyncio.timeout(BOUND_S), serving(environment.app) as url:
        async with _process(_RUN, rows, "-o", out, "--url", url, "--concurrency", 4, cwd=tmp_path) as process:
            await environment.holds(4)
            process.send_signal(number)
            status, shown, err = await _ended(process)
        environment.go.set()
    assert status == expected, err
    assert len(read_jsonl(out)) == 3
    assert read_jsonl(tmp_path / "o_failures.jsonl") == []
    assert "Stopped. 7 rows have no outcome yet" in err
    assert f"To run those that may be tried again (7): paddock run --resume -o {out}" in err
    assert "no outcome" in shown
    assert "Traceback" not in err


async def test_a_small_run_shows_rewards_rows_failures_and_files(tmp_path: Path) -> None:
    async def play(body: Body) -> Body:
        if body["n"] == 2:
            return failing(body, terminal=True, kind="model_auth")
        usage = {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7}
        task_id = {"taskset": "t", "task_id": "[bold]task"}
        return graded(body, float(body["n"]), response={"usage": usage}, task_id=task_id)

    rows = write_rows(tmp_path / "r.jsonl", [flat_row(n=n, environment="math") for n in range(3)] + [7])
    environment = FakeEnvironment(play)
    async with (
        asyncio.timeout(BOUND_S),
        serving(environment.app) as url,
        _process(_RUN, rows, "--url", url, cwd=tmp_path) as process,
    ):
        status, shown, err = await _ended(process)
    assert status == 1, err
    assert f"{rows}:4: a row is a JSON object, not a number" in err
    table = [line for line in shown.splitlines() if "math" in line]
    assert any("[bold]task" in line and "1.000" in line and "graded" in line and "7" in line for line in table)
    assert any("model_auth" in line for line in table)
    assert any("0.500" in line and "@1 50.0%" in line for line in table)
    assert f"1 model_auth, e.g. {rows}:3: it is model_auth" in shown
    assert "Bad rows, not run: 1" in shown
    (results,) = [path for path in (tmp_path / "results").iterdir() if path.name.count("_") == 0]
    assert results.name.startswith("r-")
    assert f"Results   results/{results.name}" in shown
    assert len(read_jsonl(results)) == 2


async def test_a_row_that_the_environment_refuses_is_named_by_line_once(tmp_path: Path) -> None:
    async def play(body: Body) -> Body:
        return failing(body, terminal=True, kind="bad_row") if body["n"] == 1 else graded(body)

    rows = write_rows(tmp_path / "r.jsonl", [flat_row(n=n) for n in range(3)])
    async with (
        asyncio.timeout(BOUND_S),
        serving(FakeEnvironment(play).app) as url,
        _process(_RUN, rows, "--url", url, "--repeats", 3, cwd=tmp_path) as process,
    ):
        status, _, err = await _ended(process)
    assert (status, err) == (1, f"{rows}:2: it is bad_row\n")


async def test_a_wrong_call_ends_with_two_and_one_sentence(tmp_path: Path) -> None:
    async with asyncio.timeout(BOUND_S), _process(_RUN, "no.jsonl", "--url", "http://x", cwd=tmp_path) as process:
        status, shown, err = await _ended(process)
    assert (status, shown, err) == (2, "", "no.jsonl does not exist.\n")


async def test_progress_is_a_bar_on_a_terminal(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "r.jsonl", [flat_row(n=n) for n in range(4)])
    environment = HeldEnvironment(free=2)
    ours, theirs = pty.openpty()
    try:
        async with (
            asyncio.timeout(BOUND_S),
            serving(environment.app) as url,
            _process(_RUN, rows, "--url", url, cwd=tmp_path, stderr=theirs) as process,
        ):
            await environment.holds(2)
            seen = b""
            while b"2/4 rows" not in seen:
                seen += await asyncio.to_thread(os.read, ours, 65_536)
            environment.go.set()
            status, _, _ = await _ended(process)
        assert b"mean reward 1.000" in seen
        assert status == 0
    finally:
        os.close(ours)
        os.close(theirs)


async def test_the_demo_runs_every_shipped_row_and_says_what_is_next(tmp_path: Path) -> None:
    environment = FakeEnvironment()
    async with (
        asyncio.timeout(BOUND_S),
        serving(environment.app) as url,
        _process(_DEMO, url, cwd=tmp_path) as process,
    ):
        status, shown, err = await _ended(process)
    assert status == 0, err
    assert {body["environment"] for body in environment.posts} == {"math", "mcqa", "gpqa", "string_match", "weather"}
    assert len(environment.posts) == 10
    assert "PADDOCK_MODEL_BASE_URL" in shown
    assert "paddock run rows.jsonl" in shown
