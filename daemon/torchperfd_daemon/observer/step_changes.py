"""How one rank's steps change: steps that grow over time, and steps beside which a checkpoint is saved."""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from torchperfd_daemon.diagnosis.detect.robust_statistics import median_of
from torchperfd_daemon.diagnosis.detect.straggler import MIN_SHARE
from torchperfd_daemon.diagnosis.detect.trends import theil_sen
from torchperfd_daemon.observer.rank_window import Float64

_MAX_POINTS: Final = 32
_MIN_SPANS: Final = 12
_FIND_EVERY: Final = 2
MIN_GROWTH_SHARE: Final = 0.05
"""Growth by less than this share of the step, over the whole run, is not reported."""
_STEADY: Final = 0.3
"""Each half of the run grows at this part of the whole rate at least; else the step has changed once."""


class StepGrowth:
    """Follows the mean step from sample to sample over the whole run, in memory of fixed size.

    Attributes:
        seconds: By how much each step is longer than the one before; 0 unless that is certain.
        grown_seconds: By how much the newest step is longer than the first.
        column: The index of the phase that contains most of that; -1 without growth.
    """

    def __init__(self) -> None:
        self.seconds = self.grown_seconds = 0.0
        self.column = -1
        self._points: list[Float64] = []
        self._every = 1
        self._samples = 0

    def observe(self, steps: float, ns: float, phases_ns: Float64) -> None:
        """Add a sample.

        Args:
            steps: Steps so far.
            ns: What they have taken.
            phases_ns: The same by phase; shape (phases,), of one length for all samples.
        """
        self._samples += 1
        if self._samples % self._every:
            return
        self._points.append(np.concatenate(((steps, ns), phases_ns)))
        if len(self._points) > _MAX_POINTS:
            # Sums: what lies between two points stays as it is.
            del self._points[1::2]
            self._every *= 2
        if len(self._points) % _FIND_EVERY == 0 or self.seconds:
            self._find()

    def _find(self) -> None:
        self.seconds, self.grown_seconds, self.column = 0.0, 0.0, -1
        if len(self._points) <= _MIN_SPANS:
            return
        points = np.array(self._points)
        added = np.diff(points, axis=0)
        added = added[added[:, 0] > 0]
        if len(added) < _MIN_SPANS:
            return
        at = points[0, 0] + np.cumsum(added[:, 0]) - added[:, 0] / 2
        means = added[:, 1:] / added[:, :1] / 1e9
        slope = theil_sen(at, means[:, 0])
        grown = slope.per_second * (at[-1] - at[0])
        if slope.low <= 0 or grown < MIN_GROWTH_SHARE * slope.level:
            return
        half = len(at) // 2
        halves = [theil_sen(at[part], means[part, 0]) for part in (slice(half), slice(half, None))]
        if min(each.per_second for each in halves) < _STEADY * slope.per_second:
            return
        if _has_one_change(means[:, 0], slope.level + slope.per_second * (at - at[-1])):
            return
        self.seconds, self.grown_seconds = slope.per_second, grown
        self.column = int(np.argmax([theil_sen(at, column).per_second for column in means[:, 1:].T]))


def _has_one_change(steps: Float64, line: Float64) -> bool:
    """Return whether two levels, one after the other, describe the steps better than a line does.

    The halves of a run alone do not show it, where the steps also drift: both of them rise a little then.
    """
    apart = float(np.abs(steps - line).sum())
    for place in range(2, len(steps) - 1):
        levels = (steps[:place], steps[place:])
        if sum(float(np.abs(each - median_of(each)).sum()) for each in levels) < apart:
            return True
    return False


_BESIDE: Final = 0.5
"""The steps of a sample are beside a save if one was under way for this part of its time."""
_KEPT: Final = 10
_MIN_SAMPLES: Final = 5
_MIN_ERRORS: Final = 5.0
"""The difference must be this multiple of its standard error."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """The training steps of one sample."""

    steps: int
    seconds: float


class StepsBesideSaves:
    """Compares the steps beside one rank's newest save with those before and after it, in fixed memory.

    A save begins and ends at random times. Steps that are longer beside it than both before and after it are
    longer because of it. While it is under way, those before it are all there is to compare with.
    """

    def __init__(self) -> None:
        self._before: deque[_Sample] = deque(maxlen=_KEPT)
        self._beside: deque[_Sample] = deque(maxlen=_KEPT)
        self._after: deque[_Sample] = deque(maxlen=_KEPT)

    def add(self, saving: float, steps: int, seconds: float) -> None:
        """Add the training steps of a sample.

        Args:
            saving: For which part of its time a save was under way, 0 to 1.
            steps: Their number.
            seconds: Their total time.
        """
        if steps <= 0:
            return
        sample = _Sample(steps, seconds)
        if saving >= _BESIDE:
            if self._after:
                self._before.extend(self._after)
                self._after.clear()
                self._beside.clear()
            self._beside.append(sample)
        elif not saving:
            (self._after if self._beside else self._before).append(sample)

    @property
    def extra_seconds(self) -> float:
        """By how much the mean step beside the newest save is longer; 0 unless that is beyond chance."""
        if len(self._beside) < _MIN_SAMPLES or len(self._before) < _MIN_SAMPLES:
            return 0.0
        others = [each for each in (self._before, self._after) if len(each) >= _MIN_SAMPLES]
        return min(_longer(self._beside, each) for each in others)


def _longer(beside: Sequence[_Sample], others: Sequence[_Sample]) -> float:
    longer = _mean(beside) - _mean(others)
    error = math.hypot(_error(beside), _error(others))
    return longer if longer >= max(MIN_SHARE * _mean(others), _MIN_ERRORS * error) else 0.0


def _mean(samples: Sequence[_Sample]) -> float:
    return sum(each.seconds for each in samples) / sum(each.steps for each in samples)


def _error(samples: Sequence[_Sample]) -> float:
    """Return the standard error of the mean step, from the means of samples."""
    return statistics.stdev(each.seconds / each.steps for each in samples) / math.sqrt(len(samples))
