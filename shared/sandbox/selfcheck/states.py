"""Checks of sandboxes to which something happens from outside, and of their limits."""

import asyncio
import secrets

from shared.errors import ProviderError, ProviderLostError
from shared.ports.sandbox import Limits
from shared.sandbox.selfcheck.rig import Checks, Rig, expect, expecting

CHECKS = Checks()


@CHECKS
async def a_paused_sandbox_is_told_and_goes_on_afterwards(rig: Rig) -> None:
    rig.need(rig.features.pauses, "pauses nothing")
    async with rig.fresh() as box:
        await box.interfere("pause")
        try:

            async def paused() -> bool:
                return (await box.status()).state == "paused"

            await rig.until("its pause is told", paused)
            async with expecting(ProviderError, "paused"):
                await box.exec(["true"])
        finally:
            await box.interfere("resume")
        expect((await rig.sh("true", box)).ok, "it does not go on")


@CHECKS
async def a_dead_sandbox_is_told_and_lost(rig: Rig) -> None:
    async with rig.fresh() as box:
        await box.interfere("kill")

        async def stopped() -> bool:
            return (await box.status()).state == "stopped"

        await rig.until("its death is told", stopped)
        async with expecting(ProviderLostError):
            await box.exec(["true"])
        async with expecting(ProviderLostError):
            await box.upload(b"x", "/tmp/x")
        async with expecting(ProviderLostError):
            await rig.provider.attach(box.access.connection)
        expect((await box.stop()).status == "stopped", "what is left of it was not removed")


@CHECKS
async def a_restarted_sandbox_is_not_used_in_silence(rig: Rig) -> None:
    rig.need(rig.features.restarts, "restarts nothing")
    async with rig.fresh() as box:
        await box.interfere("restart")

        async def replaced() -> bool:
            return (await box.status()).state == "replaced"

        await rig.until("the restart is told", replaced)
        async with expecting(ProviderLostError, "restarted"):
            await box.exec(["true"])
        async with expecting(ProviderLostError):
            await rig.provider.attach(box.access.connection)


@CHECKS
async def a_sandbox_that_vanishes_under_a_command_is_lost(rig: Rig) -> None:
    async with rig.fresh() as box:
        running = asyncio.create_task(rig.sh("echo started; sleep 60", box))
        await asyncio.sleep(0.3)
        await rig.provider.remove(box.id)
        async with expecting(ProviderLostError):
            async with asyncio.timeout(20):
                await running
        expect((await box.status()).state == "gone", f"it is {(await box.status()).state}")


@CHECKS
async def a_command_that_outgrows_the_memory_is_told_with_evidence(rig: Rig) -> None:
    rig.need("memory_mib" in rig.features.limits, "limits no memory")
    async with rig.fresh(limits=Limits(memory_mib=64)) as box:
        result = await rig.sh("head -c 300m /dev/zero | tail", box)
        outer = await rig.sh("head -c 300m /dev/zero | tail; exit $?", box)
        expect(9 in {result.signal, (result.exit_code or 0) - 128}, f"it ended with {result.exit_code}/{result.signal}")
        expect(outer.exit_code == 137, f"the shell saw {outer.exit_code}")
        expect((result.oom_kills or 0) >= 1, f"the evidence is {result.oom_kills}")
        expect((await rig.sh("true", box)).ok, "the sandbox did not live on")


@CHECKS
async def processes_are_limited_and_stopping_still_works(rig: Rig) -> None:
    rig.need("pids" in rig.features.limits, "limits no processes")
    async with rig.fresh(limits=Limits(pids=32)) as box:
        result = await rig.sh("for i in $(seq 100); do sleep 20 & done; wait", box, timeout_s=2)
        expect(not result.ok, "a hundred processes were started")
        expect((await rig.sh("true", box)).ok, "the sandbox did not recover")


@CHECKS
async def processors_are_limited(rig: Rig) -> None:
    rig.need("cpus" in rig.features.limits, "limits no processors")
    async with rig.fresh(limits=Limits(cpus=0.25)) as box:
        script = "timeout 2 sh -c 'while :; do :; done'; cat /proc/self/task/*/../../[0-9]*/stat >/dev/null 2>&1; times"
        used = await rig.sh(script, box, timeout_s=20)
        seconds = [float(word.partition("m")[2].rstrip("s")) for word in used.stdout.text().split()]
        expect(sum(seconds) < 1.2, f"2 s of work used {sum(seconds):.1f} s of a quarter processor")


@CHECKS
async def ids_are_never_used_again(rig: Rig) -> None:
    session = secrets.token_hex(8)
    async with rig.fresh(session=session) as first:
        stale = await rig.provider.attach(first.access.connection)
        await first.stop()
    async with rig.fresh(session=session) as second:
        expect(second.id != stale.id, "two sandboxes have one id")
        async with expecting(ProviderLostError):
            await stale.exec(["true"])
        expect((await rig.sh("true", second)).ok, "the new one is not usable")
