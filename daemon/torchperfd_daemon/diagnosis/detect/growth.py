"""Detects growing memory: its rate, its certainty and when it will be full."""

import functools
import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from torchperfd_daemon.diagnosis.detect.reservoir import CAPACITY, Reservoir

Float64 = npt.NDArray[np.float64]

MIN_POINTS: Final = 16
MIN_SHARE: Final = 0.01
"""Growth by less than this share of the level, over the observed time, is not a leak."""

# Two-sided 99.9 %, since a run is tested many times.
_DEVIATIONS: Final = 3.29


@dataclass(frozen=True, slots=True)
class Slope:
    """A straight line through a series.

    Attributes:
        low: The lower end of the slope's 99.9 % confidence interval.
        level: The line's value at the newest point.
    """

    per_second: float
    low: float
    high: float
    level: float


@dataclass(frozen=True, slots=True)
class Growth:
    """How memory grows; bytes and seconds.

    Attributes:
        grows: Whether the growth is certain and large enough to report.
        seconds_to_full: At this rate; None without growth or without a known capacity.
    """

    slope: Slope
    seconds: float
    grows: bool
    seconds_to_full: float | None


class GrowthDetector:
    """Follows one amount of memory: a rank's resident memory, or that of its allocator.

    To detect fragmentation, pass the reserved bytes less the allocated bytes.

    Args:
        capacity: Bytes at which memory is full; None if unknown.
        readings: The largest number of readings kept; 64 are the least that always suffice.
    """

    def __init__(self, capacity: float | None = None, readings: int = CAPACITY) -> None:
        self._capacity = capacity
        self._points = Reservoir(readings)

    def observe(self, seconds: float, value: float) -> None:
        """Add a reading in bytes; times ascend."""
        self._points.add(seconds, value)

    def find(self) -> Growth | None:
        """Return the growth in the newer half of the observed time; None with too few readings.

        The older half is left out, since memory always grows while a run starts.
        """
        times, values = self._points.points()
        newer = slice(len(times) // 2, None)
        times, values = times[newer], values[newer]
        if len(times) < MIN_POINTS or times[0] == times[-1]:
            return None
        slope = theil_sen(times, values)
        seconds = float(times[-1] - times[0])
        grown = slope.per_second * seconds
        grows = slope.low > 0 and grown >= MIN_SHARE * abs(slope.level)
        left = None
        if grows and self._capacity is not None:
            left = max(0.0, self._capacity - slope.level) / slope.per_second
        return Growth(slope, seconds, grows, left)


def theil_sen(times: Float64, values: Float64) -> Slope:
    """Return the median of the slopes between all pairs of points, with its confidence interval.

    Sen, J. American Statistical Association 63, 1968: the interval's ends are the slopes at the ranks
    ``(N ± z √(n (n - 1) (2n + 5) / 18)) / 2`` of all ``N``, after the variance of Kendall's tau. Points of
    equal times make no pair; without any pair the slope is 0 and its interval has no ends.
    """
    first, second = _pairs(len(times))
    run = times[second] - times[first]
    apart = run != 0
    slopes = np.sort((values[second] - values[first])[apart] / run[apart])
    count, pairs = len(times), len(slopes)
    if not pairs:
        return Slope(0.0, -math.inf, math.inf, float(np.median(values)))
    middle = float(np.median(slopes))
    half = _DEVIATIONS * math.sqrt(count * (count - 1) * (2 * count + 5) / 18) / 2
    low, high = math.floor(pairs / 2 - half) - 1, math.ceil(pairs / 2 + half)
    return Slope(
        middle,
        float(slopes[low]) if low >= 0 else -math.inf,
        float(slopes[high]) if high < pairs else math.inf,
        float(np.median(values - middle * (times - times[-1]))),
    )


@functools.lru_cache(maxsize=4)
def _pairs(count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the indices of all pairs of ``count`` points; cached, since all ranks have equal counts."""
    first, second = np.triu_indices(count, 1)
    return first, second
