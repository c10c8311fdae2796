"""Checks of `exec`."""

import asyncio
import gc
import os
import resource
import secrets
import time
from typing import Final

from shared.errors import CommandNotStartedError, ExitUnknownError, SandboxRefusedError
from shared.sandbox.selfcheck.rig import Checks, Rig, expect, expecting

CHECKS = Checks()
ALL_BYTES: Final = bytes(range(256))
FLOOD_BYTES: Final = 200_000_000
MEMORY_GROWTH_MIB: Final = 64
PROMPT_S: Final = 5.0
"""What takes no time may take this long on a busy machine."""


def _seconds() -> str:
    """An argument for `sleep` by which its process is found again."""
    return f"{secrets.randbelow(90_000) + 10_000}.{secrets.randbelow(90_000) + 10_000}"


def _root(rig: Rig) -> str | None:
    return "0:0" if rig.features.users else None


@CHECKS
async def exit_codes_are_those_of_the_command(rig: Rig) -> None:
    for code in (0, 1, 7, 126, 127, 128, 137, 255):
        result = await rig.sh(f"exit {code}")
        expect((result.exit_code, result.signal) == (code, None), f"{result.exit_code}/{result.signal} for exit {code}")


@CHECKS
async def an_end_by_signal_is_told_as_that_signal(rig: Rig) -> None:
    for number in (9, 15, 6):
        result = await rig.sh(f"kill -{number} $$")
        expect((result.exit_code, result.signal) == (None, number), f"{result.exit_code}/{result.signal} for {number}")
        expect(not result.ok, "an end by signal is called ok")


@CHECKS
async def both_streams_carry_every_byte_and_stay_apart(rig: Rig) -> None:
    result = await rig.sh("cat; cat >&2 <<E\nother\nE", stdin=ALL_BYTES)
    expect(result.stdout.data == ALL_BYTES, f"stdout was {result.stdout.data[:80]!r} …")
    expect(result.stderr.data == b"other\n", f"stderr was {result.stderr.data!r}")


@CHECKS
async def stdin_is_given_whole_and_ends(rig: Rig) -> None:
    data = os.urandom(1 << 16) * 48
    result = await rig.box.exec(["cat"], stdin=data, output_limit_bytes=len(data))
    expect(result.stdout.data == data, f"{len(result.stdout.data)} of {len(data)} bytes came back")
    expect((await rig.box.exec(["cat"])).stdout.data == b"", "an empty stdin gave output")


@CHECKS
async def a_command_that_reads_no_stdin_still_ends(rig: Rig) -> None:
    result = await rig.sh("exec 0<&-; echo done", stdin=bytes(1 << 20))
    expect((result.exit_code, result.stdout.data) == (0, b"done\n"), f"{result}")


@CHECKS
async def arguments_arrive_as_they_were(rig: Rig) -> None:
    words = ["", " a b ", "line\nbreak", "$HOME `id` \"'", "ü€", "-n", "*", "x" * 100_000]
    result = await rig.box.exec(["sh", "-c", 'for a; do printf "%s\\n--\\n" "$a"; done', "sh", *words])
    seen = result.stdout.data.decode().split("\n--\n")[:-1]
    expect(seen == words, f"{[word[:20] for word in seen]}")


@CHECKS
async def variables_are_added_and_stand_on_no_command_line(rig: Rig) -> None:
    secret = f"secret-{secrets.token_hex(8)}"
    shown = await rig.out('printf %s "$PADDOCK_TEST"', env={"PADDOCK_TEST": f"{secret} a=b\n'"})
    expect(shown == f"{secret} a=b\n'", f"the variable was {shown!r}")
    expect(await rig.out("echo $PATH") != "", "the sandbox's own PATH is gone")
    waiting = asyncio.create_task(rig.sh("sleep 1; true", env={"PADDOCK_TEST": secret}))
    try:
        expect(not await rig.processes(secret), "the variable stands on a command line")
    finally:
        await waiting


@CHECKS
async def a_command_works_where_it_is_told_to(rig: Rig) -> None:
    expect(await rig.out("pwd") == rig.box.place.workdir, "it did not start in the work folder")
    expect(await rig.out("pwd", cwd="/proc") == "/proc", "it did not start in the given folder")


@CHECKS
async def a_missing_folder_is_no_exit_code(rig: Rig) -> None:
    async with expecting(CommandNotStartedError, "/nonesuch/folder"):
        await rig.sh("true", cwd="/nonesuch/folder")


@CHECKS
async def a_missing_program_is_named(rig: Rig) -> None:
    async with expecting(CommandNotStartedError, "no-such-program"):
        await rig.box.exec(["no-such-program", "--help"])
    async with expecting(CommandNotStartedError, "/nonesuch/program"):
        await rig.box.exec(["/nonesuch/program"])


@CHECKS
async def a_file_that_is_no_program_is_named(rig: Rig) -> None:
    path = f"{rig.box.place.workdir}/no-program"
    await rig.box.upload(b"text", path, mode=0o644)
    async with expecting(CommandNotStartedError, path):
        await rig.box.exec([path])


@CHECKS
async def commands_run_after_the_work_folder_was_deleted(rig: Rig) -> None:
    rig.need(rig.features.isolated, "makes no work folders of a given name")
    async with rig.fresh(workdir="/task/work") as box:
        expect(await rig.out("pwd; touch x", box) == "/task/work", "it was not made for the user of commands")
        await rig.out("rm -r /task/work || mv /task/work /task/gone", box, cwd="/", user=_root(rig))
        expect(await rig.out("pwd", box) == "/", "it did not fall back to /")


@CHECKS
async def a_command_runs_as_another_user_or_is_refused(rig: Rig) -> None:
    if not rig.features.users:
        async with expecting(SandboxRefusedError, "4321"):
            await rig.box.exec(["id"], user="4321")
        return
    expect(await rig.out("id -u; id -g", user="4321:1234") == "4321\n1234", "it ran as somebody else")
    expect(await rig.out("id -u") == str(rig.box.place.uid), "the sandbox's own user is another")


@CHECKS
async def a_time_limit_keeps_what_was_written(rig: Rig) -> None:
    result = await rig.sh("echo started; sleep 30; echo late", timeout_s=0.5)
    expect(result.timed_out and result.exit_code is None and not result.ok, f"{result}")
    expect(result.stdout.data == b"started\n", f"stdout was {result.stdout.data!r}")


@CHECKS
async def a_time_limit_leaves_nothing_alive(rig: Rig) -> None:
    bystander, mark = _seconds(), _seconds()
    await rig.stays(rig.box, ["sh", "-c", f"sleep {bystander} >/dev/null 2>&1 &"])
    escapes = (
        f"(trap '' TERM HUP INT; sleep {mark}; :) & "
        f"nohup sleep {mark} >/dev/null 2>&1 & "
        f"command -v setsid >/dev/null && setsid sleep {mark} & "
        f"sh -c '(sh -c \"sleep {mark} & exit\" &); exit 0'; "
        f"env -i sh -c 'sleep {mark} & wait' & "
        f"sleep {mark}"
    )
    result = await rig.sh(escapes, timeout_s=0.8)
    expect(result.timed_out, f"{result}")
    left = await rig.processes(mark)
    expect(not left, f"{len(left)} processes live on: {left}")
    expect(await rig.processes(bystander), "a process of an earlier command was killed, too")
    await rig.end(f"sleep {bystander}")


@CHECKS
async def an_abandoned_command_leaves_nothing_alive(rig: Rig) -> None:
    mark = _seconds()
    running = asyncio.create_task(rig.sh(f"sleep {mark} & sleep {mark}"))

    async def started() -> bool:
        return len(await rig.processes(f"sleep {mark}")) >= 2

    await rig.until("the command runs", started)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    left = await rig.processes(f"sleep {mark}")
    expect(not left, f"{left} live on after the caller was cancelled")


@CHECKS
async def a_command_that_ends_may_leave_a_process_and_is_not_held_up_by_it(rig: Rig) -> None:
    mark = _seconds()
    began = time.monotonic()
    result = await rig.sh(f"sleep {mark} & echo done")
    expect(result.stdout.data == b"done\n", f"{result.stdout.data!r}")
    expect(time.monotonic() - began < PROMPT_S, f"it took {time.monotonic() - began:.1f} s")
    expect(await rig.processes(f"sleep {mark}"), "the process was killed")
    await rig.end(f"sleep {mark}")


@CHECKS
async def a_flood_is_capped_with_head_and_tail(rig: Rig) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    script = f"echo HEAD-MARK; yes ABCDEFGH | head -c {FLOOD_BYTES}; echo; echo TAIL-MARK"
    result = await rig.sh(script, output_limit_bytes=1 << 20)
    kept, dropped = len(result.stdout.data), result.stdout.dropped
    expect(result.stdout.head.startswith(b"HEAD-MARK\n"), "the head is gone")
    expect(result.stdout.tail.endswith(b"TAIL-MARK\n"), "the tail is gone")
    expect(kept <= 1 << 20, f"{kept} bytes were kept")
    expect(kept + dropped == FLOOD_BYTES + 21, f"{kept} kept and {dropped} dropped do not add up")
    gc.collect()
    growth_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    expect(growth_mib < MEMORY_GROWTH_MIB, f"memory grew by {growth_mib:.0f} MiB")


@CHECKS
async def an_endless_flood_ends_at_its_time_limit(rig: Rig) -> None:
    result = await rig.sh("echo HEAD-MARK; yes", timeout_s=1.0, output_limit_bytes=1 << 16)
    expect(result.timed_out, f"it ended with {result.exit_code}")
    expect(result.stdout.head.startswith(b"HEAD-MARK\n"), "the head is gone")
    expect(result.stdout.dropped > 0, "nothing was dropped")


@CHECKS
async def quick_commands_with_children_give_the_right_codes(rig: Rig) -> None:
    async def one(number: int) -> int | None:
        return (await rig.sh(f"(sleep 0.01 &); exit {number % 7}")).exit_code

    codes = [code for at in range(0, 48, 12) for code in await asyncio.gather(*(one(n) for n in range(at, at + 12)))]
    wrong = [(n, code) for n, code in enumerate(codes) if code != n % 7]
    expect(not wrong, f"wrong codes: {wrong}")


@CHECKS
async def orphans_do_not_stay_as_zombies(rig: Rig) -> None:
    await rig.out("for i in 1 2 3 4 5 6 7 8; do (sh -c 'sleep 0.05 &' &); done")

    async def none_left() -> bool:
        script = "cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z ' || :"
        if not rig.features.isolated:  # there other people's processes are in sight, too
            script = f"ps -u {rig.box.place.uid} -o stat= 2>/dev/null | grep -c ^Z || :"
        return await rig.out(script) == "0"

    await rig.until("orphans are reaped", none_left)


@CHECKS
async def an_end_that_nobody_told_is_an_error(rig: Rig) -> None:
    async with expecting(ExitUnknownError):
        await rig.sh("kill -9 $PPID; sleep 5")


@CHECKS
async def commands_run_side_by_side(rig: Rig) -> None:
    began = time.monotonic()
    results = await asyncio.gather(*(rig.sh(f"sleep 1; echo {n}") for n in range(8)))
    expect([result.stdout.data for result in results] == [b"%d\n" % n for n in range(8)], "answers were mixed up")
    expect(time.monotonic() - began < 8, "they ran one after the other")
