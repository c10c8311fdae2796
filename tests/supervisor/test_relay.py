"""The relay: a TCP port of the loopback interface that is a Unix socket elsewhere."""

import asyncio
import contextlib
import os
import signal
import socket
import struct
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from shared.supervisor.protocol import ExitStatus, relay_command
from tests.serving import free_port
from tests.supervisor.rig import children, eventually, kill, memory_kib, running

WITHIN_S = 30
MANY = 400

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextmanager
def relaying(program: Path, target: Path, *, descriptors: int = 4096) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """The relay's port and process, once it listens."""
    port = free_port()
    limited = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh"]
    with subprocess.Popen([*limited, *relay_command(str(program), port, str(target), detach=False)],
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield port, process
        finally:
            process.kill()


@asynccontextmanager
async def served(place: Path, serve: Serve) -> AsyncIterator[Path]:
    """Ends when all that was accepted is served and closed."""
    path = place / "served"
    under_way: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        under_way.add(task)
        try:
            await serve(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    server = await asyncio.start_unix_server(handle, path, backlog=4096)
    try:
        yield path
    finally:
        server.close()
        await asyncio.gather(*under_way, return_exceptions=True)


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.write(b"END")


async def _said(port: int, message: bytes) -> bytes:
    """What comes back after the whole message and the end of our side."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(message)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


async def test_both_directions_pass_and_each_ends_by_itself(program: Path, place: Path) -> None:
    async with asyncio.timeout(WITHIN_S), served(place, _echo) as path:
        with relaying(program, path) as (port, _):
            assert await _said(port, b"hello") == b"helloEND"
            assert await _said(port, b"") == b"END"


async def test_much_data_passes_unchanged(program: Path, place: Path) -> None:
    content = os.urandom(1 << 20) * 24
    async with asyncio.timeout(WITHIN_S), served(place, _echo) as path:
        with relaying(program, path) as (port, _):
            assert await _said(port, content) == content + b"END"


async def test_data_comes_at_once_while_the_connection_stays_open(program: Path, place: Path) -> None:
    async with asyncio.timeout(WITHIN_S), served(place, _echo) as path:
        with relaying(program, path) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for number in range(200):
                writer.write(b"%d\n" % number)
                assert await reader.readline() == b"%d\n" % number
            writer.close()


async def test_many_connections_are_open_at_once_in_one_process(program: Path, place: Path) -> None:
    async with asyncio.timeout(WITHIN_S), served(place, _echo) as path:
        with relaying(program, path) as (port, process):
            pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MANY)]
            for number, (_, writer) in enumerate(pairs):
                writer.write(b"%d\n" % number)
            for number, (reader, _) in enumerate(pairs):
                assert await reader.readline() == b"%d\n" % number
            assert children(process.pid) == []
            for _, writer in pairs:
                writer.close()
                await writer.wait_closed()
            descriptors = Path(f"/proc/{process.pid}/fd")
            assert await asyncio.to_thread(eventually, lambda: len(list(descriptors.iterdir())) < 10)


async def test_a_reader_that_waits_holds_up_its_own_writer_only(program: Path, place: Path) -> None:
    async with asyncio.timeout(WITHIN_S), served(place, _echo) as path:
        with relaying(program, path) as (port, process):
            _, flooding = await asyncio.open_connection("127.0.0.1", port)
            flooding.write(b"x" * (64 << 20))
            assert await _said(port, b"quick") == b"quickEND"
            assert memory_kib(process.pid, "VmRSS") < 2048
            flooding.transport.abort()


async def test_without_free_descriptors_callers_wait_and_are_served_later(program: Path, place: Path) -> None:
    async with asyncio.timeout(WITHIN_S), served(place, _echo) as path:
        with relaying(program, path, descriptors=24) as (port, _):
            waiting = [asyncio.create_task(_said(port, b"%d" % number)) for number in range(60)]
            answers = await asyncio.gather(*waiting, return_exceptions=True)
            assert sum(answer == b"%dEND" % number for number, answer in enumerate(answers)) >= 10
            assert await _said(port, b"later") == b"laterEND"


async def test_a_full_queue_of_the_socket_is_waited_for(program: Path, place: Path) -> None:
    path = place / "slow"
    with socket.socket(socket.AF_UNIX) as listener, relaying(program, path) as (port, _):
        listener.bind(str(path))
        listener.listen(1)
        callers = [asyncio.create_task(_said(port, b"x")) for _ in range(10)]
        await asyncio.sleep(0.3)
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(WITHIN_S):
            for _ in callers:
                peer, _ = await loop.sock_accept(listener)
                await loop.sock_sendall(peer, b"served")
                peer.close()
            answers = await asyncio.gather(*callers, return_exceptions=True)
        assert [answer for answer in answers if answer != b"served" and not isinstance(answer, OSError)] == []


async def test_a_caller_is_told_by_a_reset_when_nobody_serves_and_is_served_once_somebody_does(
    program: Path, place: Path
) -> None:
    async with asyncio.timeout(WITHIN_S):
        with relaying(program, place / "served") as (port, _):
            with pytest.raises(OSError, match=r"104|reset|Broken"):
                await _said(port, b"anyone?")
            async with served(place, _echo):
                assert await _said(port, b"again") == b"againEND"


async def test_a_server_that_breaks_off_is_no_orderly_end_and_a_client_that_does_reaches_the_server(
    program: Path, place: Path
) -> None:
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readline() == b"break\n":
            writer.transport.abort()  # with our data unread, which is what a killed server looks like
            return
        try:
            while await reader.read(100):
                pass
        except ConnectionError:
            pass
        ended.set()

    async with asyncio.timeout(WITHIN_S), served(place, serve) as path:
        with relaying(program, path) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"break\n")
            assert await reader.read() == b""
            writer.close()
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"go\n")
            await writer.drain()
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
            await ended.wait()


async def test_a_detached_relay_listens_when_its_command_has_ended(program: Path, place: Path) -> None:
    port = free_port()
    async with asyncio.timeout(WITHIN_S), served(place, _echo) as path:
        command = relay_command(str(program), port, str(path))
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=10, check=False)
        try:
            assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
            assert await _said(port, b"hello") == b"helloEND"
            again = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=10, check=False)
            assert again.returncode == ExitStatus.TAKEN
            assert f"cannot listen on 127.0.0.1:{port}: Address already in use".encode() in again.stderr
        finally:
            kill(*running(program))
    assert await asyncio.to_thread(eventually, lambda: not running(program))


def test_only_the_loopback_interface_listens_and_term_ends_it(program: Path, place: Path) -> None:
    with relaying(program, place / "nobody") as (port, process):
        lines = Path("/proc/net/tcp").read_text().splitlines()
        assert [line.split()[1] for line in lines if f":{port:04X} " in line.split()[1] + " " and " 0A " in line] == [
            f"0100007F:{port:04X}"
        ]
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM
