"""Whether a rank has stopped making steps, measured by what its own steps usually take."""

import math
from array import array
from dataclasses import dataclass
from enum import Enum
from typing import Final

LEAST_SECONDS: Final = 10.0
TIMES: Final = 8.0
"""A stall is a time without a step of so many times the 99.9th percentile, and of :data:`LEAST_SECONDS`."""
LEAST_ELSEWHERE_SECONDS: Final = 600.0
"""The least for validation passes and checkpoints, of which there are too few to know what is usual."""

_QUANTILE: Final = 0.999
_SHORTEST: Final = 1e-5
_GROWTH: Final = 1.05
_BUCKETS: Final = 512


class Doing(Enum):
    """What a rank does, as far as stalls are concerned."""

    IDLE = "idle"
    TRAINING = "training"
    ELSEWHERE = "elsewhere"


@dataclass(frozen=True, slots=True)
class Stall:
    """No step for longer than is plausible; seconds."""

    waited_seconds: float
    limit_seconds: float
    usual_seconds: float


class StallDetector:
    """Follows one rank's progress by times that the caller tells, all of one clock that does not go back.

    The usual step time is kept as counts in 512 buckets that grow by 5 %, from 10 µs on.
    """

    def __init__(self) -> None:
        self._doing = Doing.IDLE
        self._progress_at: float | None = None
        self._counts = array("q", bytes(8 * _BUCKETS))
        self._seen = 0
        self._longest_elsewhere = 0.0

    def step(self, now: float) -> None:
        """Take the end of a training step."""
        if self._doing is Doing.TRAINING and self._progress_at is not None:
            self._counts[_bucket(now - self._progress_at)] += 1
            self._seen += 1
        self._doing = Doing.TRAINING
        self._progress_at = now

    def enter(self, doing: Doing, now: float) -> None:
        """Take a change of what the rank does. It counts as progress; the same again does not."""
        if doing is self._doing:
            return
        if self._doing is Doing.ELSEWHERE and self._progress_at is not None:
            self._longest_elsewhere = max(self._longest_elsewhere, now - self._progress_at)
        self._doing = doing
        self._progress_at = now

    @property
    def usual_seconds(self) -> float:
        """The 99.9th percentile of the time from step to step, up to 5 % too high; 0 without any."""
        left = self._seen - math.floor(_QUANTILE * self._seen)
        for index in range(_BUCKETS - 1, -1, -1):
            left -= self._counts[index]
            if left <= 0:
                return _SHORTEST * _GROWTH**index if self._seen else 0.0
        return 0.0

    def check(self, now: float) -> Stall | None:
        """Return the stall that there is now. Before two steps have been made nothing is plausible or not."""
        if self._progress_at is None or self._doing is Doing.IDLE or not self._seen:
            return None
        usual = self.usual_seconds
        if self._doing is Doing.TRAINING:
            limit = max(LEAST_SECONDS, TIMES * usual)
        else:
            limit = max(LEAST_ELSEWHERE_SECONDS, TIMES * self._longest_elsewhere)
        waited = now - self._progress_at
        return Stall(waited, limit, usual) if waited > limit else None


def _bucket(seconds: float) -> int:
    """Return the first bucket whose upper bound is not below a time."""
    if seconds <= _SHORTEST:
        return 0
    return min(_BUCKETS - 1, math.ceil(math.log(seconds / _SHORTEST) / math.log(_GROWTH)))
