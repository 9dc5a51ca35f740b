"""Detects trends (growing memory, a run that becomes slower) and long steps with a fixed period."""

import functools
import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from torchperfd_daemon.diagnosis.detect.robust_statistics import (
    CAPACITY,
    Float64,
    Reservoir,
    median_of,
    robust_deviation,
)

LONG: Final = 1.3
"""A step is a spike from this multiple of the median on, if it also exceeds the noise."""
MIN_SPIKES: Final = 6

_RECENT: Final = 65
_MEDIAN_EVERY: Final = 16
_KEPT: Final = 64
_PHASES: Final = 32
_BEYOND: Final = 6.0
_IN_PHASE: Final = 0.9
_COVERED: Final = 0.75


@dataclass(frozen=True, slots=True)
class PeriodicSpikes:
    """Long steps with a fixed period.

    Attributes:
        period: The number of steps from one spike to the next.
        phase: The phase that is longer in them; empty if phases are unknown.
        excess_seconds: The mean time that a spike takes above the median step.
    """

    period: int
    phase: str
    excess_seconds: float

    @property
    def seconds_per_step(self) -> float:
        """The cost of the spikes, spread over all steps."""
        return self.excess_seconds / self.period


@dataclass(frozen=True, slots=True)
class _Spike:
    step: int
    excess: float
    phase: str


class SpikeDetector:
    """Reads steps one by one and keeps the newest 64 spikes."""

    def __init__(self) -> None:
        self._seen = 0
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._median = math.inf
        self._limit = math.inf
        self._usual: dict[str, float] = {}
        self._spikes: deque[_Spike] = deque(maxlen=_KEPT)

    def observe(self, seconds: float, phases: Mapping[str, float] | None = None) -> None:
        """Add the next step, with the times of its phases, in seconds."""
        step = self._seen
        self._seen += 1
        if seconds > self._limit:
            phase = max(phases, key=lambda name: phases[name] - self._usual.get(name, 0.0)) if phases else ""
            self._spikes.append(_Spike(step, seconds - self._median, phase))
        elif phases and self._median < math.inf:
            for name, value in phases.items():
                usual = self._usual.get(name, value)
                if name in self._usual or len(self._usual) < _PHASES:
                    self._usual[name] = usual + (value - usual) / _MEDIAN_EVERY
        self._recent.append(seconds)
        if self._seen % _MEDIAN_EVERY == 0:
            self._median = statistics.median(self._recent)
            spread = robust_deviation(self._recent, self._median)
            self._limit = max(LONG * self._median, self._median + _BEYOND * spread)

    def find(self) -> PeriodicSpikes | None:
        """Return the spikes' period and phase; None if fewer than :data:`MIN_SPIKES` agree on a period.

        If all spikes together have no period, those of each phase are tried, the costliest phase first.
        """
        by_phase: dict[str, list[_Spike]] = {}
        for spike in self._spikes:
            by_phase.setdefault(spike.phase, []).append(spike)
        groups = sorted(by_phase.values(), key=lambda spikes: -sum(spike.excess for spike in spikes))
        for spikes in (list(self._spikes), *groups):
            period = find_period([spike.step for spike in spikes])
            if period is not None:
                cost: dict[str, float] = {}
                for spike in spikes:
                    cost[spike.phase] = cost.get(spike.phase, 0.0) + spike.excess
                phase = max(cost, key=lambda name: cost[name])
                return PeriodicSpikes(period, phase, sum(cost.values()) / len(spikes))
        return None


def find_period(steps: list[int]) -> int | None:
    """Return the period of ascending step numbers; None without one.

    At the right period all steps have the same phase on a circle, and the mean of their directions has the
    length 1 (Rayleigh's test; Mardia and Jupp, Directional Statistics). The same holds for every divisor of
    the period, so the longest period wins. Few spikes may lie in between, and few periods may lack a spike.
    """
    if len(steps) < MIN_SPIKES:
        return None
    offsets = np.array(steps, dtype=np.float64) - steps[0]
    gaps = np.diff(offsets)
    usual = median_of(gaps)
    longest = int(usual * 1.5)
    if longest < 2:
        return None
    candidates = {*gaps.tolist(), *np.round(usual / np.arange(1, 4)).tolist()}
    for period in sorted((each for each in candidates if 2 <= each <= longest), reverse=True):
        direction = np.exp(2j * np.pi * offsets / period).mean()
        periods = {*np.round(offsets / period - np.angle(direction) / (2 * np.pi)).tolist()}
        if abs(direction) >= _IN_PHASE and len(periods) / (max(periods) - min(periods) + 1) >= _COVERED:
            return int(period)
    return None


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
        seconds: For how long it was observed.
        grows: Whether the growth is certain and large enough to report.
    """

    slope: Slope
    seconds: float
    grows: bool


class GrowthDetector:
    """Follows one amount of memory: a rank's resident memory, or that of its allocator.

    To detect fragmentation, pass the reserved bytes less the allocated bytes.

    Args:
        readings: The largest number of readings kept; 64 are the least that always suffice.
    """

    def __init__(self, readings: int = CAPACITY) -> None:
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
        return Growth(slope, seconds, slope.low > 0 and grown >= MIN_SHARE * abs(slope.level))


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
        return Slope(0.0, -math.inf, math.inf, median_of(values))
    middle = float(slopes[(pairs - 1) // 2] + slopes[pairs // 2]) / 2
    half = _DEVIATIONS * math.sqrt(count * (count - 1) * (2 * count + 5) / 18) / 2
    low, high = math.floor(pairs / 2 - half) - 1, math.ceil(pairs / 2 + half)
    return Slope(
        middle,
        float(slopes[low]) if low >= 0 else -math.inf,
        float(slopes[high]) if high < pairs else math.inf,
        median_of(values - middle * (times - times[-1])),
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
        regressed: Whether the loss is at least :data:`MIN_CHANGE` and beyond the noise of the past.
    """

    past_per_second: float
    now_per_second: float
    regressed: bool

    @property
    def change(self) -> float:
        """The change of throughput as a share of the past's; negative when it is lower."""
        return self.now_per_second / self.past_per_second - 1


class RegressionDetector:
    """Compares the newest 256 steps with all earlier ones, which are thinned out as they grow in number."""

    def __init__(self) -> None:
        self._block: list[float] = []
        self._newest: list[float] = []
        self._past = Reservoir()
        self._blocks = 0

    def observe(self, seconds: float) -> None:
        """Add a step. A block counts by its median step: occasional long steps are not a regression."""
        self._block.append(seconds)
        if len(self._block) < BLOCK_STEPS:
            return
        middle = statistics.median(self._block)
        if middle > _SHORTEST:
            self._newest.append(1 / middle)
        self._block.clear()
        if len(self._newest) > _NEWEST:
            self._past.add(self._blocks, self._newest.pop(0))
            self._blocks += 1

    def find(self) -> Regression | None:
        """Return the comparison; None before the past has :data:`MIN_BLOCKS` blocks."""
        if len(self._past) < MIN_BLOCKS:
            return None
        _, past = self._past.points()
        usual = median_of(past)
        noise = robust_deviation(past.tolist(), usual)
        now = statistics.median(self._newest)
        lost = usual - now
        return Regression(usual, now, usual > 0 and lost >= max(MIN_CHANGE * usual, _UNLIKE * noise))
