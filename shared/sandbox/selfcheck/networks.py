"""Checks of what is reached from inside. Other sides are real listeners of this process."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import urlsplit

from shared.errors import SandboxRefusedError
from shared.ports.sandbox import Sandbox
from shared.sandbox.selfcheck.rig import Checks, Rig, expect, expecting

CHECKS = Checks()
WAIT_MS: Final = 700
_QUESTION: Final = b"GET /healthz HTTP/1.0\r\n\r\n"


async def _reaches(box: Sandbox, address: str, port: int) -> bytes | None:
    """What an address answers from inside; None when it is not reached."""
    command = [box.place.supervisor, "reach", address, str(port), str(WAIT_MS)]
    result = await box.exec(command, stdin=_QUESTION, timeout_s=20)
    return result.stdout.data if result.ok else None


@asynccontextmanager
async def _listener(address: str) -> AsyncIterator[int]:
    """Somebody on this machine who answers; gives the port."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"reached")
        writer.close()

    server = await asyncio.start_server(answer, address, 0)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()


def _own_addresses() -> list[str]:
    """Addresses of this machine that others may use."""
    found = {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it only picks the interface
            found.add(str(probe.getsockname()[0]))
        except OSError:
            pass
    return sorted(found)


async def _gateway(rig: Rig, box: Sandbox) -> str | None:
    """The default route's next hop, as the sandbox sees it."""
    for line in (await rig.out("cat /proc/net/route", box)).splitlines()[1:]:
        fields = line.split()
        if fields[1] == "00000000" and fields[2] != "00000000":
            return ".".join(str(part) for part in reversed(bytes.fromhex(fields[2])))
    return None


async def _interfaces(rig: Rig, box: Sandbox) -> list[str]:
    lines = (await rig.out("cat /proc/net/dev", box)).splitlines()[2:]
    return [line.partition(":")[0].strip() for line in lines]


async def _expect_no_machine(rig: Rig, box: Sandbox) -> None:
    """Neither loopback services of this machine nor those on its other addresses are reached."""
    async with _listener("127.0.0.1") as loopback, _listener("0.0.0.0") as everywhere:
        addresses = [*_own_addresses(), "127.0.0.1"]
        gateway = await _gateway(rig, box)
        for address in [*addresses, *([gateway] if gateway else [])]:
            for port in (loopback, everywhere):
                expect(await _reaches(box, address, port) is None, f"{address}:{port} of this machine is reached")


@CHECKS
async def without_a_network_nothing_is_reached(rig: Rig) -> None:
    if "none" not in rig.features.networks:
        async with expecting(SandboxRefusedError, "none"):
            await rig.provider.create(rig.spec(network="none"))
        return
    async with rig.fresh(network="none") as box:
        expect(box.place.model_base_url is None, f"the model is said to be at {box.place.model_base_url}")
        expect(await _interfaces(rig, box) == ["lo"], f"interfaces {await _interfaces(rig, box)}")
        await _expect_no_machine(rig, box)


@CHECKS
async def over_the_proxy_network_the_model_is_reached_and_nothing_else(rig: Rig) -> None:
    if "proxy" not in rig.features.networks:
        async with expecting(SandboxRefusedError, "proxy"):
            await rig.provider.create(rig.spec(network="proxy"))
        return
    async with rig.fresh(network="proxy") as box:
        expect(box.place.model_base_url is not None, "no address of the model is told")
        address = urlsplit(box.place.model_base_url or "")

        async def answers() -> bool:
            told = await _reaches(box, address.hostname or "", address.port or 80)
            return told is not None and b"the model" in told

        await rig.until("the model answers", answers)
        expect(any(_QUESTION in told for told in rig.model_told), "the model was not asked by the sandbox")
        expect(await _interfaces(rig, box) == ["lo"], f"interfaces {await _interfaces(rig, box)}")
        await _expect_no_machine(rig, box)


@CHECKS
async def on_an_open_network_loopback_and_other_sandboxes_are_out_of_reach(rig: Rig) -> None:
    rig.need(rig.features.images, "shares the machine's network when it is open")
    async with rig.fresh(network="open") as box, rig.fresh(network="open") as other:
        expect(len(await _interfaces(rig, box)) > 1, "there is no network")
        gateway = await _gateway(rig, box)
        expect(gateway, "there is no way out")
        async with _listener("127.0.0.1") as loopback:
            for address in [str(gateway), *_own_addresses()]:
                expect(await _reaches(box, address, loopback) is None, f"loopback is reached over {address}")
        script = "grep -B1 '32 host LOCAL' /proc/net/fib_trie | grep -o '[0-9][0-9.]*$' | grep -v ^127 | head -1"
        address = await rig.out(script, other)
        # Where packets get through, a port that nobody listens on refuses; where they do not, there is no answer.
        result = await box.exec([box.place.supervisor, "reach", address, "9", str(WAIT_MS)])
        expect("timed out" in result.stderr.text(), f"another sandbox answers at {address}: {result.stderr.text()}")
