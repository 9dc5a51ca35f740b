"""Statistics of detectors: a robust deviation, the noise of block means, and a series in fixed memory.

Means over blocks of steps separate noise that averages out from noise that does not.
"""

import math
import statistics
from array import array
from collections.abc import Collection
from typing import Final

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

MAD_TO_SIGMA: Final = 1.4826
"""For normally distributed values, the median absolute deviation times this is the standard deviation."""


def robust_deviation(values: Collection[float], middle: float | None = None) -> float:
    """Return the standard deviation by the median absolute deviation, which outliers do not move.

    Args:
        values: At least one value.
        middle: Their median, if it is known already.
    """
    center = statistics.median(values) if middle is None else middle
    return MAD_TO_SIGMA * statistics.median([abs(value - center) for value in values])


def median_of(values: Float64) -> float:
    """Return the median of at least one value; numpy's takes many times as long for few of them."""
    return float(medians_of(values))


def medians_of(rows: Float64) -> Float64:
    """Return the median of each column of at least one row."""
    ordered, count = np.sort(rows, axis=0), len(rows)
    medians: Float64 = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    return medians


def spaced_quantiles(values: Float64, count: int) -> Float64:
    """Return so many quantiles of at least one value, in the middles of equal parts (Hazen)."""
    places = (np.arange(count) + 0.5) / count * len(values) - 0.5
    return np.interp(places, np.arange(len(values)), np.sort(values))


LENGTHS: Final = (8, 32, 128, 512)
"""The blocks' lengths in steps."""

_MEMORY: Final = 256
_LONG: Final = 2


class BlockNoise:
    """Blocks of all :data:`LENGTHS` over a stream of differences from a reference; of fixed size."""

    __slots__ = ("_blocks", "_counts", "_latest", "_squares", "_totals", "_variances", "steps")

    def __init__(self) -> None:
        self.steps = 0
        self._totals = [0.0] * len(LENGTHS)
        self._counts = [0] * len(LENGTHS)
        self._blocks = [0] * len(LENGTHS)
        self._latest = [0.0] * len(LENGTHS)
        self._squares = [0.0] * len(LENGTHS)
        self._variances = [0.0] * len(LENGTHS)

    def add(self, value: float) -> None:
        """Add a step. Blocks of one length make up those of the next."""
        self.steps += 1
        full = LENGTHS[0]
        for index, length in enumerate(LENGTHS):
            self._totals[index] += value
            self._counts[index] += 1
            if self._counts[index] < full:
                return
            value = self._totals[index] / full
            self._totals[index] = 0.0
            self._counts[index] = 0
            self._observe(index, length, value)
            full = LENGTHS[1] // LENGTHS[0]

    def variance(self) -> float:
        """Return the variance of one step that explains the scatter of means at every length.

        The mean of ``n`` independent steps has ``1/n`` of one step's variance. A larger variance shows
        correlated noise. Neighbouring blocks are compared (Allan, Proc. IEEE 54, 1966), so that slow drift
        does not count. The greatest of few estimates is too great by chance, so each is first reduced by its
        standard error. For the squared differences of n independent neighbours this is ``sqrt(3 / n)`` of the
        variance (Lesage and Audoin, IEEE Trans. Instrum. Meas. 22, 1973).
        """
        return max(
            0.0,
            *(
                variance * (1 - math.sqrt(3 / max(1, blocks - 1)))
                for variance, blocks in zip(self._variances, self._blocks, strict=True)
            ),
        )

    def wander(self) -> float:
        """Return how far means of long blocks lie from the reference: noise that does not average out."""
        return math.sqrt(max(self._squares[_LONG:]))

    def _observe(self, index: int, length: int, mean: float) -> None:
        self._blocks[index] += 1
        blocks = self._blocks[index]
        self._squares[index] += (mean * mean - self._squares[index]) / min(blocks, _MEMORY)
        if blocks > 1:
            found = length * (mean - self._latest[index]) ** 2 / 2
            self._variances[index] += (found - self._variances[index]) / min(blocks - 1, _MEMORY)
        self._latest[index] = mean


CAPACITY: Final = 128


class Reservoir:
    """Keeps every ``2**k``-th point of a series, with the smallest ``k`` that fits.

    Args:
        capacity: The largest number of points, an even number; a full reservoir drops every second point.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._seen = 0
        self._stride = 1
        self._times = array("d")
        self._values = array("d")

    def __len__(self) -> int:
        return len(self._values)

    def add(self, time: float, value: float) -> None:
        """Add the next point."""
        if self._seen % self._stride == 0:
            if len(self._values) == self._capacity:
                self._times = self._times[::2]
                self._values = self._values[::2]
                self._stride *= 2
            self._times.append(time)
            self._values.append(value)
        self._seen += 1

    def points(self) -> tuple[Float64, Float64]:
        """Return the times and the values kept, oldest first."""
        return np.array(self._times), np.array(self._values)
