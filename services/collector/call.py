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
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self.tries - 1, 16)) * random.uniform(0.75, 1.25)
        pause_s = max(pause_s, asked_s or 0.0)
        spent = now - self.since + pause_s > self.patience_s
        return None if spent and (self.tries >= LEAST_TRIES or pause_s > LONGEST_PAUSE_S) else pause_s


@dataclass(slots=True)
class Call:
    """What is known so far about one episode's calls."""

    episode: Episode
    away: Trouble
    busy: Trouble
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
