"""Detects that a rank has stopped making steps, compared with its usual step time."""

import math
from array import array
from dataclasses import dataclass
from enum import Enum
from typing import Final

MIN_SECONDS: Final = 10.0
TIMES: Final = 8.0
"""A stall is a time without a step above this multiple of the 99.9th percentile and :data:`MIN_SECONDS`."""
MIN_ELSEWHERE_SECONDS: Final = 600.0
"""The least for validation passes and checkpoints, which are too rare for a usual time."""

_QUANTILE: Final = 0.999
_SHORTEST: Final = 1e-5
_GROWTH: Final = 1.05
_BUCKETS: Final = 512


class Doing(Enum):
    """A rank's activity, as stall detection distinguishes it."""

    IDLE = "idle"
    TRAINING = "training"
    ELSEWHERE = "elsewhere"


@dataclass(frozen=True, slots=True)
class Stall:
    """A time without a step that is longer than its limit; seconds."""

    waited_seconds: float
    limit_seconds: float
    usual_seconds: float


class StepTimes:
    """A histogram of step times in 512 buckets that grow by 5 %, from 10 µs on.

    In synchronous training all ranks have the same step time, so that one histogram is enough for a run.
    """

    def __init__(self) -> None:
        self._counts = array("q", bytes(8 * _BUCKETS))
        self.seen = 0
        """The number of steps so far."""

    def add(self, seconds: float) -> None:
        """Add a step."""
        self._counts[_bucket(seconds)] += 1
        self.seen += 1

    @property
    def usual_seconds(self) -> float:
        """The 99.9th percentile, up to 5 % too high; 0 without steps."""
        left = self.seen - math.floor(_QUANTILE * self.seen)
        for index in range(_BUCKETS - 1, -1, -1):
            left -= self._counts[index]
            if left <= 0:
                return _SHORTEST * _GROWTH**index if self.seen else 0.0
        return 0.0


def limit_seconds(usual_seconds: float) -> float:
    """Return the time without a step after which a rank that trains has stalled.

    Args:
        usual_seconds: The 99.9th percentile of its step times.
    """
    return max(MIN_SECONDS, TIMES * usual_seconds)


class StallDetector:
    """Follows one rank's progress. The caller passes all times, from one clock that does not go back.

    Args:
        times: The histogram of step times, if the caller fills it; else :meth:`step` fills one.
    """

    def __init__(self, times: StepTimes | None = None) -> None:
        self._doing = Doing.IDLE
        self._progress_at: float | None = None
        self._times = times or StepTimes()
        self._longest_elsewhere = 0.0

    @property
    def doing(self) -> Doing:
        """The activity that :meth:`enter` or :meth:`step` set last."""
        return self._doing

    def step(self, now: float) -> None:
        """Record the end of a training step, and add the time since the previous one."""
        if self._doing is Doing.TRAINING and self._progress_at is not None:
            self._times.add(now - self._progress_at)
        self._doing = Doing.TRAINING
        self._progress_at = now

    def progress(self, now: float) -> None:
        """Record progress that is not a step, or a step that the caller adds to the histogram."""
        self._progress_at = now

    def enter(self, doing: Doing, now: float) -> None:
        """Set the rank's activity. A change counts as progress; the same activity again does not."""
        if doing is self._doing:
            return
        if self._doing is Doing.ELSEWHERE and self._progress_at is not None:
            self._longest_elsewhere = max(self._longest_elsewhere, now - self._progress_at)
        self._doing = doing
        self._progress_at = now

    @property
    def usual_seconds(self) -> float:
        """The 99.9th percentile of the time from step to step, up to 5 % too high; 0 without steps."""
        return self._times.usual_seconds

    def check(self, now: float, early: float = 0.0) -> Stall | None:
        """Return the present stall; None without one, or before two steps have ended.

        Args:
            now: Seconds, on the caller's clock.
            early: How many seconds before its limit a stall is returned.
        """
        if self._progress_at is None or self._doing is Doing.IDLE or not self._times.seen:
            return None
        waited = now - self._progress_at
        if waited + early <= MIN_SECONDS:
            return None
        usual = self.usual_seconds
        if self._doing is Doing.TRAINING:
            limit = limit_seconds(usual)
        else:
            limit = max(MIN_ELSEWHERE_SECONDS, TIMES * self._longest_elsewhere)
        return Stall(waited, limit, usual) if waited + early > limit else None


def _bucket(seconds: float) -> int:
    """Return the first bucket whose upper bound is not below a time."""
    if seconds <= _SHORTEST:
        return 0
    return min(_BUCKETS - 1, math.ceil(math.log(seconds / _SHORTEST) / math.log(_GROWTH)))
