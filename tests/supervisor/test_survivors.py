"""The declared policies for what a harness leaves running."""

import os
import signal
import socket
from pathlib import Path

import pytest

from shared.supervisor.protocol import ExitStatus
from tests.serving import free_port
from tests.supervisor.conftest import MakeActivation
from tests.supervisor.rig import Activation, alive, bystanders, eventually, kill

SERVER = """
import os, socket, sys, time
listener = socket.socket({family})
listener.bind({address})
listener.listen()
{more}
open({mark!r}, "a").write(str(os.getpid()) + "\\n")
while True:
    try:
        peer, _ = listener.accept()
        print("served", flush=True)
        peer.sendall(b"hello")
        peer.close()
    except OSError:
        time.sleep(0.01)
"""


def _server(place: Path, name: str, address: object, *, family: str = "AF_INET", more: str = "") -> Path:
    """A program that serves at the address; once it listens, its pid stands in the file `name`."""
    path = place / f"{name}.py"
    mark = str(place / name)
    path.write_text(SERVER.format(family=f"socket.{family}", address=repr(address), mark=mark, more=more))
    return path


def _hello(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        return connection.recv(100)


def _pids(mark: Path) -> list[int]:
    return [int(line) for line in mark.read_text().splitlines()] if mark.exists() else []


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def harness(place: Path, port: int) -> list[str]:
    """Leaves behind a detached server, a detached idler, and a server in its own group."""
    server = _server(place, "server", ("127.0.0.1", port))
    attached = _server(place, "attached", str(place / "socket"), family="AF_UNIX")
    script = f"""
    setsid python3 {server} &
    setsid sh -c 'echo $$ > {place}/idler; exec sleep 300' &
    python3 {attached} &
    until test -s {place}/server && test -s {place}/idler && test -s {place}/attached; do sleep 0.01; done
    exit 3
    """
    return ["sh", "-c", script]


@pytest.mark.behaviour("SB-27")
def test_drain_leaves_nothing(activation: Activation, place: Path, harness: list[str]) -> None:
    activation.launch(*harness)
    receipt = activation.receipt(activation.wait())
    assert (receipt.survivors, receipt.tree_empty, receipt.policy) == ((), True, "drain")
    pids = [pid for name in ("server", "idler", "attached") for pid in _pids(place / name)]
    assert len(pids) == 3
    assert not any(alive(pid) for pid in pids)


@pytest.mark.behaviour("SB-27")
def test_keep_services_leaves_detached_listeners_and_nothing_else(
    activation: Activation, place: Path, harness: list[str], port: int
) -> None:
    with bystanders():
        activation.launch(*harness, survivors="keep_services")
        receipt = activation.receipt(activation.wait())
    (server,) = _pids(place / "server")
    assert receipt.survivors is not None
    assert [process.pid for process in receipt.survivors] == [server]
    assert (receipt.exit_code, receipt.tree_empty, receipt.cleanup_confirmed) == (3, False, True)
    assert not alive(_pids(place / "idler")[0])
    assert not alive(_pids(place / "attached")[0])
    for _ in range(20):
        assert _hello(port) == b"hello"
    verified = activation.ask(activation.commands.verify(), expect=[ExitStatus.DONE])
    assert verified.left == ()


@pytest.mark.behaviour("SB-27")
def test_keep_all_leaves_what_is_detached_and_ends_the_harnesss_own_group(
    activation: Activation, place: Path, harness: list[str], port: int
) -> None:
    activation.launch(*harness, survivors="keep_all")
    receipt = activation.receipt(activation.wait())
    assert receipt.survivors is not None
    assert {process.pid for process in receipt.survivors} == {*_pids(place / "server"), *_pids(place / "idler")}
    assert not alive(_pids(place / "attached")[0])
    assert _hello(port) == b"hello"
    assert activation.ask(activation.commands.verify(), expect=[ExitStatus.DONE]).left == ()


@pytest.mark.behaviour("SB-27")
@pytest.mark.parametrize("ending", ["stop", "deadline"])
def test_services_are_kept_after_a_forced_end_too(
    activation: Activation, place: Path, harness: list[str], port: int, ending: str
) -> None:
    script = harness[2].replace("exit 3", "sleep 60")
    deadline_s = 3.0 if ending == "deadline" else None
    activation.launch("sh", "-c", script, survivors="keep_services", deadline_s=deadline_s)
    assert eventually(lambda: all((place / name).exists() for name in ("server", "idler", "attached")))
    receipt = activation.receipt(activation.stop() if ending == "stop" else activation.wait())
    assert receipt.state == ("stopped" if ending == "stop" else "deadline")
    assert receipt.survivors is not None
    assert [process.pid for process in receipt.survivors] == _pids(place / "server")
    assert _hello(port) == b"hello"


def test_a_service_lives_with_its_ancestors_and_its_helpers_but_not_with_their_other_children(
    activation: Activation, place: Path, port: int
) -> None:
    more = """
if os.fork() == 0:
    listener.close()
    open(%r, "a").write(str(os.getpid()))
    while True:
        time.sleep(60)
"""
    server = _server(place, "server", ("127.0.0.1", port), more=more % str(place / "helper"))
    script = f"""
    setsid sh -c 'echo $$ > {place}/ancestor; sleep 300 & echo $! > {place}/sibling; python3 {server}; true' &
    until test -s {place}/server && test -s {place}/helper && test -s {place}/sibling; do sleep 0.01; done
    """
    activation.launch("sh", "-c", script, survivors="keep_services")
    receipt = activation.receipt(activation.wait())
    kept = [pid for name in ("ancestor", "server", "helper") for pid in _pids(place / name)]
    assert receipt.survivors is not None
    assert {process.pid for process in receipt.survivors} == set(kept)
    assert not alive(_pids(place / "sibling")[0])
    assert all(alive(pid) for pid in kept)
    assert _hello(port) == b"hello"


@pytest.mark.parametrize("family", ["tcp6", "unix"])
def test_listeners_of_other_families_are_services_too(activation: Activation, place: Path, family: str) -> None:
    address: object = ("::1", free_port()) if family == "tcp6" else str(place / "socket")
    mark = place / "server"
    server = _server(place, "server", address, family="AF_INET6" if family == "tcp6" else "AF_UNIX")
    script = f"setsid python3 {server} & until test -s {mark}; do sleep 0.01; done"
    activation.launch("sh", "-c", script, survivors="keep_services")
    receipt = activation.receipt(activation.wait())
    assert receipt.survivors is not None
    assert [process.pid for process in receipt.survivors] == _pids(mark)


def test_a_service_that_was_stopped_by_itself_stays_stopped_and_others_go_on(
    activation: Activation, place: Path, harness: list[str], port: int
) -> None:
    until = f"until grep -q ') T ' /proc/$(cat {place}/idler)/stat; do sleep 0.01; done"
    stopped = harness[2].replace("exit 3", f"kill -STOP $(cat {place}/idler); {until}")
    activation.launch("sh", "-c", stopped, survivors="keep_all")
    activation.receipt(activation.wait())
    (idler,) = _pids(place / "idler")
    assert Path(f"/proc/{idler}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    assert _hello(port) == b"hello"


def test_a_kept_service_neither_waits_nor_dies_of_its_output(activation: Activation, place: Path, port: int) -> None:
    server = _server(place, "server", ("127.0.0.1", port), more="import signal; signal.signal(13, signal.SIG_DFL)")
    server.write_text(server.read_text().replace('"served"', '"x" * 200_000'))
    script = f"setsid python3 {server} & until test -s {place}/server; do sleep 0.01; done"
    activation.launch("sh", "-c", script, survivors="keep_services")
    activation.receipt(activation.wait())
    for _ in range(30):
        assert _hello(port) == b"hello"


def test_the_folder_of_an_activation_with_survivors_can_be_removed(
    activation: Activation, harness: list[str], port: int
) -> None:
    activation.launch(*harness, survivors="keep_services")
    activation.receipt(activation.wait())
    assert activation.ask(activation.commands.remove(), expect=[ExitStatus.DONE]).state == "closed"
    assert _hello(port) == b"hello"


def test_a_sweep_ends_survivors_too(activation: Activation, harness: list[str], place: Path) -> None:
    activation.launch(*harness, survivors="keep_all")
    receipt = activation.receipt(activation.wait())
    swept = activation.ask(activation.commands.sweep(), expect=[ExitStatus.DONE])
    assert activation.receipt(swept) == receipt
    assert not any(alive(pid) for name in ("server", "idler") for pid in _pids(place / name))
    assert activation.ask(activation.commands.verify(), expect=[ExitStatus.DONE]).left == ()


def test_verify_finds_what_carries_the_marker_and_is_no_survivor(activations: MakeActivation) -> None:
    activation = activations()
    activation.launch("true")
    receipt = activation.receipt(activation.wait())
    assert activation.ask(activation.commands.verify(), expect=[ExitStatus.DONE]).left == ()
    pid = os.posix_spawn("/bin/sleep", ["sleep", "60"], {"PADDOCK_SUPERVISOR": str(receipt.nonce)})
    try:
        verified = activation.ask(activation.commands.verify(), expect=[ExitStatus.UNPROVEN])
        assert verified.left == (f"sleep ({pid})",)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.behaviour("SB-26")
def test_what_left_the_tree_is_found_by_its_marker(activations: MakeActivation, place: Path) -> None:
    """Another process starts it with the harness's environment, as a job queue outside the tree would."""
    activation = activations()
    answer = activation.launch("sleep", "60")
    assert answer.detail is not None
    markers = {"PADDOCK_SUPERVISOR": answer.detail.nonce}
    pid = os.posix_spawn("/bin/sleep", ["sleep", "60"], markers)
    prefix = os.posix_spawn("/bin/sleep", ["sleep", "60"], {"PADDOCK_SUPERVISOR": answer.detail.nonce[:-1]})
    longer = os.posix_spawn("/bin/sleep", ["sleep", "60"], {"PADDOCK_SUPERVISOR": answer.detail.nonce + "0"})
    try:
        stopping = activation.spawn(activation.commands.stop(20))
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        stopping.communicate(timeout=30)
        receipt = activation.receipt(activation.status())
        assert receipt.marker_killed == 1
        assert alive(prefix)
        assert alive(longer)
    finally:
        kill(prefix, longer)
        os.waitpid(prefix, 0)
        os.waitpid(longer, 0)
