"""A harness under the supervisor's own user can write every file of its activation; what it forges is found out."""

import os
import re
from pathlib import Path

import pytest

from shared.supervisor.receipt import Answer
from tests.supervisor.conftest import MakeActivation
from tests.supervisor.rig import OTHER_UID, Activation, eventually, kill


def _ended(activation: Activation) -> bytes:
    activation.launch("sh", "-c", "exit 3")
    line = activation.wait().receipt_line
    assert line is not None
    assert eventually(lambda: not activation.status().live)
    return line


def _written(activation: Activation, line: bytes) -> Answer:
    (activation.folder / "receipt.json").write_bytes(line + b"\n")
    return activation.status()


@pytest.mark.behaviour("SB-31")
@pytest.mark.parametrize(
    ("was", "is_now"),
    [
        (rb'"exit_code":3', b'"exit_code":0'),
        (rb'"killed":0', b'"killed":1'),
        (rb'"state":"exited"', b'"state":"stopped"'),
        (rb'"mac":"[0-9a-f]{4}', b'"mac":"0000'),
        (rb'"mac":"[0-9a-f]{64}"', b'"mac":null'),
        (rb'"mac":"[0-9a-f]{64}"', b'"mac":""'),
        (rb',"mac":"[0-9a-f]{64}"', b""),
    ],
)
def test_a_changed_receipt_is_found_out(activation: Activation, was: bytes, is_now: bytes) -> None:
    line = _ended(activation)
    assert activation.receipt(activation.status()).exit_code == 3
    forged = re.sub(was, is_now, line, count=1)
    assert forged != line
    proof = activation.proof(_written(activation, forged))
    assert proof.finding == "negative"
    assert "signature is" in proof.why


def test_the_receipt_of_another_activation_is_found_out(activations: MakeActivation) -> None:
    one, other = activations(), activations()
    line = _ended(one)
    _ended(other)
    assert "signature is forged" in other.proof(_written(other, line)).why
    other.key = one.key
    other.folder = one.folder
    line = line.replace(b'"id":"act-1"', b'"id":"act-2"')
    assert not other.proof(_written(other, line)).confirmed


def test_that_it_was_never_launched_is_not_believed_once_it_ran(activation: Activation) -> None:
    line = _ended(activation)
    fenced = re.sub(rb'"mac":".*"', b'"mac":null', line.replace(b'"exited"', b'"fenced"'))
    for forged in (fenced, b""):
        proof = activation.proof(_written(activation, forged))
        assert not proof.confirmed
    for path in activation.folder.iterdir():
        path.unlink()
    assert activation.status().state == "absent"
    assert activation.proof(activation.status()).finding == "negative"
    answer = activation.stop()
    assert answer.state == "fenced"
    assert activation.proof(answer).finding == "negative"


def test_the_key_cannot_be_read_by_a_harness_of_the_same_user(activations: MakeActivation) -> None:
    """Not even by one that knows whom to look at; root of a machine may, root of a container may not."""
    activation = activations(OTHER_UID if os.geteuid() == 0 else os.geteuid())
    script = """
    read guardian supervisor < "$PIDS"
    for pid in $guardian $supervisor; do
        for name in mem environ maps fd/0 cwd/. map_files; do
            head -c 1 /proc/$pid/$name && echo "$pid $name can be read"
        done
    done
    head -c 1 /proc/self/maps
    """
    pids = activation.folder.parent / "pids"
    os.mkfifo(pids)
    pids.chmod(0o644)
    answer = activation.launch("sh", "-c", script, env={"PIDS": str(pids)})
    assert answer.detail is not None
    assert answer.detail.guardian is not None
    assert answer.detail.supervisor is not None
    pids.write_text(f"{answer.detail.guardian.pid} {answer.detail.supervisor.pid}\n")
    assert activation.receipt(activation.wait()).exit_code == 0
    assert len(activation.output()) == 1
    assert activation.output("stderr").count(b"Permission denied") == 12


def test_the_key_stands_on_no_command_line_in_no_environment_and_in_no_file(activation: Activation) -> None:
    answer = activation.launch("sleep", "60")
    assert answer.detail is not None
    assert answer.detail.supervisor is not None
    assert answer.detail.guardian is not None
    assert answer.detail.worker is not None
    secrets = (activation.key, activation.key.hex().encode())
    for pid in (answer.detail.supervisor.pid, answer.detail.guardian.pid, answer.detail.worker.pid):
        for name in ("cmdline", "environ"):
            content = Path(f"/proc/{pid}/{name}").read_bytes()
            assert not any(secret in content for secret in secrets), (pid, name)
    assert activation.receipt(activation.stop()).mac is not None
    for path in activation.folder.iterdir():
        assert not any(secret in path.read_bytes() for secret in secrets), path


def test_the_harness_inherits_no_memory_with_the_key(activation: Activation) -> None:
    """Between fork and exec it holds a copy, which it wipes; after the exec there is none."""
    answer = activation.launch("sleep", "60")
    assert answer.detail is not None
    assert answer.detail.worker is not None
    pid = answer.detail.worker.pid
    found = []
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            start, end = (int(text, 16) for text in line.split()[0].split("-"))
            try:
                memory.seek(start)
                content = memory.read(end - start)
            except (OSError, OverflowError, ValueError):
                continue
            found += [line] if activation.key in content or activation.key.hex().encode() in content else []
    assert found == []
    activation.receipt(activation.stop())


def test_without_a_key_the_receipt_is_not_signed_and_the_callers_folder_is_believed(activation: Activation) -> None:
    activation.prepare()
    answer = activation.ask(activation.commands.run(), activation.request("true").frame(None))
    activation.launch_seen = answer.state == "running"
    ended = activation.wait()
    assert activation.proof(ended).finding == "negative"
    assert ended.receipt_line is not None
    assert ended.receipt_line.endswith(b',"mac":null}')


def test_a_harness_that_kills_its_supervisors_and_writes_a_receipt_gains_nothing(activation: Activation) -> None:
    answer = activation.launch("sleep", "60")
    assert answer.detail is not None
    assert answer.detail.supervisor is not None
    assert answer.detail.guardian is not None
    kill(answer.detail.guardian.pid, answer.detail.supervisor.pid)
    forged = b'{"v":1,"state":"exited","cleanup_confirmed":true,"timed_out":false,"reason":"exit","id":"act-1",'
    forged += b'"exit_code":0,"remaining_count":0,"survivors_count":0,"mac":"' + b"0" * 64 + b'"}'
    proof = activation.proof(_written(activation, forged))
    assert proof.finding == "negative"
    assert activation.proof(activation.stop(sweep=True)).finding == "negative"
    activation.ask(activation.commands.sweep())
    assert eventually(lambda: activation.left() == [])
