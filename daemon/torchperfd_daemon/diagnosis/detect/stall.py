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


class StepTimes:
    """How long steps take, as counts in 512 buckets that grow by 5 %, from 10 µs on.

    In synchronous training all ranks' steps take the same time, so that one of these is enough for a run.
    """

    def __init__(self) -> None:
        self._counts = array("q", bytes(8 * _BUCKETS))
        self.seen = 0
        """How many steps there were."""

    def add(self, seconds: float) -> None:
        """Count a step."""
        self._counts[_bucket(seconds)] += 1
        self.seen += 1

    @property
    def usual_seconds(self) -> float:
        """The 99.9th percentile, up to 5 % too high; 0 without any."""
        left = self.seen - math.floor(_QUANTILE * self.seen)
        for index in range(_BUCKETS - 1, -1, -1):
            left -= self._counts[index]
            if left <= 0:
                return _SHORTEST * _GROWTH**index if self.seen else 0.0
        return 0.0


def limit_seconds(usual_seconds: float) -> float:
    """Return for how long a rank that trains may make no step before it has stalled.

    Args:
        usual_seconds: What nearly all of its steps keep to.
    """
    return max(LEAST_SECONDS, TIMES * usual_seconds)


class StallDetector:
    """Follows one rank's progress by times that the caller tells, all of one clock that does not go back.

    Args:
        times: What steps usually take, where the caller counts that itself; else :meth:`step` does.
    """

    def __init__(self, times: StepTimes | None = None) -> None:
        self._doing = Doing.IDLE
        self._progress_at: float | None = None
        self._times = times or StepTimes()
        self._longest_elsewhere = 0.0

    @property
    def doing(self) -> Doing:
        """What the rank does, as last told."""
        return self._doing

    def step(self, now: float) -> None:
        """Take the end of a training step, and count the time since the one before."""
        if self._doing is Doing.TRAINING and self._progress_at is not None:
            self._times.add(now - self._progress_at)
        self._doing = Doing.TRAINING
        self._progress_at = now

    def progress(self, now: float) -> None:
        """Take a sign of life that is no step, or one of a step that is counted elsewhere."""
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
        return self._times.usual_seconds

    def check(self, now: float, early: float = 0.0) -> Stall | None:
        """Return the stall that there is now. Before two steps have been made nothing is plausible or not.

        Args:
            now: Seconds, on the caller's clock.
            early: By how many seconds a stall is told before its limit.
        """
        if self._progress_at is None or self._doing is Doing.IDLE or not self._times.seen:
            return None
        waited = now - self._progress_at
        if waited + early <= LEAST_SECONDS:
            return None
        usual = self.usual_seconds
        if self._doing is Doing.TRAINING:
            limit = limit_seconds(usual)
        else:
            limit = max(LEAST_ELSEWHERE_SECONDS, TIMES * self._longest_elsewhere)
        return Stall(waited, limit, usual) if waited + early > limit else None


def _bucket(seconds: float) -> int:
    """Return the first bucket whose upper bound is not below a time."""
    if seconds <= _SHORTEST:
        return 0
    return min(_BUCKETS - 1, math.ceil(math.log(seconds / _SHORTEST) / math.log(_GROWTH)))
