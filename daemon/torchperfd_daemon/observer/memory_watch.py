"""Follows the memory of one rank: how fast it grows, and how much is free."""

from typing import Final

import numpy as np
import numpy.typing as npt

from torchperfd_daemon.diagnosis.detect import GrowthDetector
from torchperfd_daemon.diagnosis.detect.growth import MIN_SHARE, theil_sen
from torchperfd_daemon.diagnosis.memory_growth import FULL_SOON_S

_READINGS: Final = 64
_GROWTH_EVERY: Final = 10

Float64 = npt.NDArray[np.float64]


class MemoryWatch:
    """Finds slow growth over the whole run, and fast growth in the newest samples.

    Attributes:
        free_bytes: What the rank may still take, as last seen; None if unknown.
    """

    def __init__(self) -> None:
        self.free_bytes: float | None = None
        self._detector = GrowthDetector(readings=_READINGS)
        self._measured = 0
        self._grows_by = self._grows_for = 0.0

    def observe(self, now: float, resident: float, free_bytes: float | None) -> None:
        """Add a sample: monotonic seconds, and bytes."""
        self.free_bytes = free_bytes
        self._detector.observe(now, resident)
        self._measured += 1
        if self._measured % _GROWTH_EVERY == 0:
            growth = self._detector.find()
            grows = growth is not None and growth.grows
            self._grows_by = growth.slope.per_second if growth is not None and grows else 0.0
            self._grows_for = growth.seconds if growth is not None and grows else 0.0

    def growth(self, at: Float64, resident: Float64) -> tuple[float, float]:
        """Return the growth in bytes per second, and its observed time in seconds; 0 if none.

        Args:
            at: When the newest samples with steps were taken, in monotonic seconds.
            resident: Their bytes.
        """
        if self._grows_by or self.free_bytes is None:
            return self._grows_by, self._grows_for
        gained, seconds = resident[-1] - resident[0], float(at[-1] - at[0])
        if self.free_bytes * seconds > gained * FULL_SOON_S or gained < MIN_SHARE * resident[-1]:
            return 0.0, 0.0
        slope = theil_sen(at, resident)
        return (slope.per_second, seconds) if slope.low > 0 else (0.0, 0.0)
