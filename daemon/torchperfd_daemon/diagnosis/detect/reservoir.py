"""A series of any length in fixed memory, thinned out evenly."""

from array import array
from typing import Final

import numpy as np
import numpy.typing as npt

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

    def points(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return the times and the values kept, oldest first."""
        return np.array(self._times), np.array(self._values)
