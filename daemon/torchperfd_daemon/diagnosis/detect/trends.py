"""Detects trends: memory that grows, its rate and when it will be full, and a run that becomes slower."""

import functools
import math
import statistics
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from torchperfd_daemon.diagnosis.detect.robust_statistics import CAPACITY, Reservoir, robust_deviation

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


BLOCK_STEPS: Final = 64
MIN_BLOCKS: Final = 12
MIN_CHANGE: Final = 0.05
"""A smaller loss of throughput is not reported."""

_NEWEST: Final = 4
# Shorter than the resolution of any clock.
_SHORTEST: Final = 1e-9
_UNLIKE: Final = 5.0


@dataclass(frozen=True, slots=True)
class Regression:
    """Throughput now and before.

    Attributes:
        past_per_second: The median over blocks of the run's past.
        now_per_second: The median of the newest four blocks.
        noise_per_second: The deviation of one block in the past.
        regressed: Whether the loss is at least :data:`MIN_CHANGE` and beyond the noise of the past.
    """

    past_per_second: float
    now_per_second: float
    noise_per_second: float
    regressed: bool

    @property
    def change(self) -> float:
        """The change of throughput as a share of the past's; negative when it is lower."""
        return self.now_per_second / self.past_per_second - 1


class RegressionDetector:
    """Compares the newest 256 steps with all earlier ones, which are thinned out as they grow in number."""

    def __init__(self) -> None:
        self._block: list[float] = []
        self._amount = 0.0
        self._newest: list[float] = []
        self._past = Reservoir()
        self._blocks = 0

    def observe(self, seconds: float, amount: float = 1.0) -> None:
        """Add a step and its amount of work: samples, tokens or simply one step.

        A block's throughput is its mean amount divided by its median step, so that occasional long steps are
        not a regression.
        """
        self._block.append(seconds)
        self._amount += amount
        if len(self._block) < BLOCK_STEPS:
            return
        middle = statistics.median(self._block)
        if middle > _SHORTEST:
            self._newest.append(self._amount / BLOCK_STEPS / middle)
        self._block.clear()
        self._amount = 0.0
        if len(self._newest) > _NEWEST:
            self._past.add(self._blocks, self._newest.pop(0))
            self._blocks += 1

    def find(self) -> Regression | None:
        """Return the comparison; None before the past has :data:`MIN_BLOCKS` blocks."""
        if len(self._past) < MIN_BLOCKS:
            return None
        _, past = self._past.points()
        usual = float(np.median(past))
        noise = robust_deviation(past.tolist(), usual)
        now = statistics.median(self._newest)
        lost = usual - now
        return Regression(usual, now, noise, usual > 0 and lost >= max(MIN_CHANGE * usual, _UNLIKE * noise))
