"""Checks of `create`, `attach`, `list`, `detach` and `stop`."""

import asyncio
import secrets
import time
from typing import Final

from shared.errors import ProviderError, ProviderLostError
from shared.ports.sandbox import StopReceipt
from shared.sandbox.selfcheck.rig import MESH, Checks, Rig, expect, expecting

CHECKS = Checks()
AT_ONCE: Final = 6
STOP_S: Final = 3.0
"""A stop takes far less than a second; a busy machine gets the rest."""


async def _count(rig: Rig, session: str) -> int:
    return len(await rig.provider.list(mesh=MESH, session=session))


@CHECKS
async def the_provider_says_that_it_can_work(rig: Rig) -> None:
    await rig.provider.check()


@CHECKS
async def a_new_sandbox_runs_commands(rig: Rig) -> None:
    async with rig.fresh() as box:
        expect((await rig.sh("true", box)).ok, "its first command failed")
        expect((await box.status()).state == "running", f"it is {(await box.status()).state}")


@CHECKS
async def a_sandbox_is_found_by_its_labels(rig: Rig) -> None:
    session = secrets.token_hex(8)
    async with rig.fresh(session=session) as box:
        (found,) = await rig.provider.list(mesh=MESH, service="selfcheck", session=session)
        expect((found.id, found.state) == (box.id, "running"), f"found {found}")
        expect(found.labels.session == session and found.labels.expires_at > time.time(), f"labels {found.labels}")
        expect(not await rig.provider.list(mesh="another", session=session), "found under another mesh")
    expect(await _count(rig, session) == 0, "still found after its stop")


@CHECKS
async def another_process_attaches_by_the_descriptor(rig: Rig) -> None:
    token = secrets.token_hex(8)
    path = f"{rig.box.place.state_dir}/token"
    await rig.box.upload(token.encode(), path)
    access = rig.box.access.model_dump(mode="json")
    seen = await rig.reattach({"access": access, "path": path})
    expect(seen == token, f"the other process read {seen!r}")
    expect((await rig.sh("true")).ok, "the first process lost it")


@CHECKS
async def a_wrong_descriptor_is_refused(rig: Rig) -> None:
    connection = rig.box.access.connection
    async with expecting(ProviderLostError):
        await rig.provider.attach(connection.model_copy(update={"descriptor": {"id": "x"}}))


@CHECKS
async def detaching_leaves_the_sandbox_as_it_is(rig: Rig) -> None:
    async with rig.fresh() as box:
        await rig.out(f"echo kept > {box.place.workdir}/kept", box)
        await box.detach()
        await box.detach()
        async with expecting(ProviderError, "detached"):
            await box.exec(["true"])
        again = await rig.provider.attach(box.access.connection)
        expect(await rig.out("cat kept", again) == "kept", "it is not the same")


@CHECKS
async def a_stop_is_confirmed_and_quick(rig: Rig) -> None:
    session = secrets.token_hex(8)
    async with rig.fresh(session=session) as box:
        await rig.stays(box, ["sh", "-c", "(trap '' TERM INT HUP; while :; do sleep 1; done) >/dev/null 2>&1 &"])
        began = time.monotonic()
        receipt = await box.stop()
        took_s = time.monotonic() - began
        expect(receipt == StopReceipt("stopped"), f"{receipt}")
        expect(took_s < STOP_S, f"it took {took_s:.1f} s")
        expect((await box.status()).state == "gone", f"it is {(await box.status()).state}")
        expect(await _count(rig, session) == 0, "it is still found")


@CHECKS
async def stops_at_once_and_again_give_equal_receipts(rig: Rig) -> None:
    async with rig.fresh() as box:
        receipts = [*await asyncio.gather(box.stop(), box.stop(), box.stop()), await box.stop()]
        expect(set(receipts) == {StopReceipt("stopped")}, f"{receipts}")


@CHECKS
async def stopping_what_is_gone_succeeds(rig: Rig) -> None:
    async with rig.fresh() as box:
        expect(await rig.provider.remove(box.id) == StopReceipt("stopped"), "the removal was not confirmed")
        expect(await rig.provider.remove(box.id) == StopReceipt("already_absent"), "nothing was removed twice")
        expect(await box.stop() == StopReceipt("already_absent"), "its own stop did not notice")


@CHECKS
async def a_stopped_sandbox_is_lost_to_its_users(rig: Rig) -> None:
    async with rig.fresh() as box:
        connection = box.access.connection
        other = await rig.provider.attach(connection)
        await box.stop()
        async with expecting(ProviderLostError):
            await other.exec(["true"])
        async with expecting(ProviderLostError):
            await rig.provider.attach(connection)


@CHECKS
async def a_creation_that_is_cancelled_leaves_nothing(rig: Rig) -> None:
    session = secrets.token_hex(8)
    for delay_s in (0.0, 0.02, 0.06, 0.15, 0.3):
        making = asyncio.create_task(rig.provider.create(rig.spec(session)))
        await asyncio.sleep(delay_s)
        making.cancel()
        await asyncio.sleep(0)
        making.cancel()
        (made,) = await asyncio.gather(making, return_exceptions=True)
        if not isinstance(made, BaseException):
            await made.stop()
    expect(await _count(rig, session) == 0, "something was left")


@CHECKS
async def sandboxes_are_made_side_by_side_and_apart(rig: Rig) -> None:
    session = secrets.token_hex(8)
    boxes = await asyncio.gather(*(rig.provider.create(rig.spec(session)) for _ in range(AT_ONCE)))
    try:
        expect(len({box.id for box in boxes}) == AT_ONCE, "ids repeat")
        await asyncio.gather(*(rig.out(f"echo {box.id} > me", box) for box in boxes))
        seen = await asyncio.gather(*(rig.out("cat me; ls", box) for box in boxes))
        expect(all(box.id in told for box, told in zip(boxes, seen, strict=True)), "files were mixed up")
        expect(await _count(rig, session) == AT_ONCE, "not all are found")
    finally:
        receipts = await asyncio.gather(*(box.stop() for box in boxes))
    expect(all(receipt.status == "stopped" for receipt in receipts), f"{receipts}")
    expect(await _count(rig, session) == 0, "something was left")
