"""Random stops against launches, with fixed seeds: whatever the order, nothing leaks and nobody else is harmed."""

import os
import random
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.needs import probe
from tests.supervisor.conftest import MakeActivation
from tests.supervisor.rig import Activation, bystanders, named

TRIALS = 500 if probe("full") is None else 60
NAME = "pdk-trial"


@dataclass
class Trial:
    """One launch and what comes across it, decided by the seed alone."""

    seed: int
    activation: Activation
    escapes: Path

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.count = self.activation.folder.parent / f"count-{self.seed}"
        self.count.touch()
        self.count.chmod(0o666)
        self.seen: list[str] = []

    def command(self) -> list[str]:
        then = self.dice.choice(["exit", "stay"])
        way = self.dice.choice(["setsid", "double_fork", "own_group", "everything", "clone_parent", "ignored_signals"])
        ways = [
            f"echo x >> {self.count}; exit 0",
            f"echo x >> {self.count}; sleep 30",
            f"echo x >> {self.count}; setsid sleep 30 & sleep 30 & wait",
            f"trap '' TERM; echo x >> {self.count}; while :; do sleep 0.01; done",
            f"echo x >> {self.count}; exec {self.escapes} {way} {NAME} /dev/null 0 {then}",
        ]
        return ["sh", "-c", self.dice.choice(ways)]

    def launch(self, frame: bytes, die_after_s: float | None) -> None:
        with self.activation.spawn(self.activation.commands.run()) as process:
            assert process.stdin is not None
            process.stdin.write(frame)
            process.stdin.close()
            if die_after_s is not None:
                time.sleep(die_after_s)
                process.kill()
            assert process.stdout is not None
            self.seen.append(process.stdout.read().decode())

    def interfere(self, how: str, delay_s: float) -> None:
        time.sleep(delay_s)
        folder = self.activation.folder
        if how in {"file", "both"}:
            (folder / "stop").touch()
        if how in {"command", "both"}:
            self.seen.append(self.activation.call(self.activation.commands.stop(20)).stdout.decode())
        if how == "killed command":
            with self.activation.spawn(self.activation.commands.stop(20)) as process:
                time.sleep(delay_s / 4)
                process.kill()
        if how == "signal":
            with suppress(FileNotFoundError, AssertionError, ProcessLookupError):
                answer = self.activation.status()
                assert answer.detail is not None
                assert answer.detail.supervisor is not None
                os.kill(answer.detail.supervisor.pid, signal.SIGTERM)

    def run(self) -> None:
        frame = self.activation.request(*self.command(), grace_s=0.05).frame(self.activation.key)
        self.activation.prepare()
        deaths = [self.dice.choice([None, None, None, self.dice.uniform(0, 0.02)]) for _ in range(2)]
        threads = [threading.Thread(target=self.launch, args=(frame, deaths[0]))]
        if self.dice.random() < 0.3:
            threads.append(threading.Thread(target=self.launch, args=(frame, deaths[1])))
        hows = ["file", "command", "both", "killed command", "signal", "none"]
        for _ in range(self.dice.randint(1, 2)):
            arguments = (self.dice.choice(hows), self.dice.uniform(0, 0.08))
            threads.append(threading.Thread(target=self.interfere, args=arguments))
        self.dice.shuffle(threads)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()

    def judge(self) -> str:
        """How it ended; fails where something that must hold does not."""
        self.activation.launch_seen = any('"state":"running"' in line.partition("\n")[0] for line in self.seen)
        answer = self.activation.stop(sweep=True)
        launched = self.count.read_text().count("x")
        assert launched <= 1, (self.seed, "launched more than once")
        if answer.state == "lost":
            assert launched == 0, (self.seed, "a supervisor vanished", self.seen)
            assert any(text == "" for text in self.seen), (self.seed, "lost, and no client was killed")
        else:
            receipt = self.activation.receipt(answer)
            assert receipt.state in {"fenced", "stopped", "exited"}, (self.seed, receipt)
            assert receipt.state != "fenced" or launched == 0, (self.seed, "fenced, and it ran")
            assert receipt.state != "exited" or receipt.exit_code in {0, 7}, (self.seed, receipt)
        assert self.activation.status().receipt_line == answer.receipt_line
        assert self.activation.left() == [], (self.seed, "leaked")
        assert named(NAME) == [], (self.seed, "leaked")
        return answer.state


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.behaviour("SB-15", "SB-16", "SB-20", "SB-30")
def test_no_order_of_launches_stops_and_deaths_leaks_or_kills_another(
    activations: MakeActivation, uid: int, escapes: Path
) -> None:
    ended: dict[str, int] = {}
    with bystanders(6):
        for seed in range(TRIALS):
            trial = Trial(seed, activations(uid), escapes)
            trial.run()
            state = trial.judge()
            ended[state] = ended.get(state, 0) + 1
    print(f"\n{TRIALS} trials under uid {uid}: {ended}")  # noqa: T201
    assert {"fenced", "stopped", "exited"} <= ended.keys()
