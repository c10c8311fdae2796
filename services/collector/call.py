"""What is known about one episode's calls while they are made, and how long trouble is borne."""

import random
import time
from dataclasses import dataclass, field
from typing import Final

from services.collector.outcomes import Episode
from services.collector.records import Delivery
from shared.contracts.failure import Stage

FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 15.0
LEAST_TRIES: Final = 3
FIRST_WAIT_S: Final = 5
LONGEST_WAIT_S: Final = 30


def jittered(pause_s: float) -> float:
    """Many rows meet the same trouble in the same moment; they are not to come back in the same moment, too."""
    return pause_s * random.uniform(0.75, 1.25)


@dataclass(slots=True)
class Trouble:
    """How long one thing has gone wrong, without anything better in between."""

    patience_s: float
    tries: int = 0
    since: float = 0.0

    def over(self) -> None:
        self.tries = 0

    def pause_s(self, asked_s: float | None = None) -> float | None:
        """How long to wait before the next try; None when the patience is at its end."""
        now = time.monotonic()
        if not self.tries:
            self.since = now
        self.tries += 1
        pause_s = jittered(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self.tries - 1, 16)))
        pause_s = max(pause_s, asked_s or 0.0)
        spent = now - self.since + pause_s > self.patience_s
        return None if spent and (self.tries >= LEAST_TRIES or pause_s > LONGEST_PAUSE_S) else pause_s


@dataclass(slots=True)
class Call:
    """What is known so far about one episode's calls.

    `wait_s` is how long the next request asks the environment to hold its answer back. It begins short and
    grows with every answer, so that stages are seen soon and connections stay shorter than a balancer allows.
    A first wait of 0 asks for what is there already.
    """

    episode: Episode
    away: Trouble
    busy: Trouble
    wait_s: int = FIRST_WAIT_S
    started: float = field(default_factory=time.monotonic)
    accepted: bool = False
    delivery: Delivery = Delivery.NOT_SENT
    stage: Stage = Stage.ADMISSION
    lost: int = 0

    @property
    def key(self) -> str:
        return self.episode.episode_id.key

    def possibly_delivered(self) -> None:
        if self.delivery is Delivery.NOT_SENT:
            self.delivery = Delivery.POSSIBLY_DELIVERED

    def goes_on(self, stage: Stage | None) -> None:
        """The environment has the episode."""
        self.accepted, self.delivery = True, Delivery.DELIVERED
        self.stage = stage or self.stage
        self.wait_s = min(LONGEST_WAIT_S, 2 * self.wait_s or FIRST_WAIT_S)
        self.away.over()
        if self.stage is not Stage.ADMISSION:
            self.busy.over()

    def went_wrong(self) -> None:
        """The next answer is wanted soon: it tells that the trouble is over."""
        self.wait_s = min(self.wait_s, 1)

    def begin_again(self, episode: Episode) -> None:
        """Another attempt at the same row, whose busy time goes on."""
        self.episode = episode
        self.accepted, self.delivery, self.stage = False, Delivery.NOT_SENT, Stage.ADMISSION
        self.away.over()
