"""Clients that die in the middle of a call, and calls that are made again."""

import threading
from pathlib import Path

from shared.supervisor.protocol import ExitStatus
from tests.supervisor.rig import Activation, eventually


def test_a_client_that_is_killed_in_the_middle_of_a_launch_may_repeat_it(activation: Activation, place: Path) -> None:
    count = place / "count"
    count.touch()
    count.chmod(0o666)
    request = activation.request("sh", "-c", f"echo x >> {count}; sleep 60")
    activation.prepare()
    first = activation.spawn(activation.commands.run())
    assert first.stdin is not None
    first.stdin.write(request.frame(activation.key))
    first.stdin.close()
    eventually((activation.folder / "started").exists)
    first.kill()
    first.wait()
    for stream in (first.stdout, first.stderr):
        assert stream is not None
        stream.close()
    assert eventually(lambda: activation.run(request).state in {"running", "lost"})
    answer = activation.stop(sweep=True)
    if answer.state == "lost":  # killed between the claim and the fork: nothing runs, and the box is given up
        assert count.read_text() == ""
        assert activation.proof(answer).finding == "negative"
    else:
        assert activation.receipt(answer).state == "stopped"
        assert count.read_text() == "x\n"


def test_a_client_that_is_killed_before_its_frame_is_whole_launches_nothing(activation: Activation) -> None:
    activation.prepare()
    client = activation.spawn(activation.commands.run())
    assert client.stdin is not None
    client.stdin.write(activation.request("true").frame(activation.key)[:-5])
    client.stdin.close()
    assert client.wait(30) == ExitStatus.FAILED
    assert client.stderr is not None
    assert b"incomplete" in client.stderr.read()
    for stream in (client.stdout, client.stderr):
        assert stream is not None
        stream.close()
    assert activation.status().state == "absent"


def test_a_stop_whose_client_is_killed_goes_on_and_may_be_repeated_by_many(activation: Activation) -> None:
    activation.launch("sh", "-c", "trap '' TERM; while :; do sleep 0.05; done", grace_s=0.5)
    first = activation.spawn(activation.commands.stop(20))
    assert eventually((activation.folder / "stop").exists)
    first.kill()
    first.communicate()
    lines = []
    threads = [threading.Thread(target=lambda: lines.append(activation.stop().receipt_line)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(lines) == 6
    assert len(set(lines)) == 1
    assert activation.receipt(activation.status()).state == "stopped"
