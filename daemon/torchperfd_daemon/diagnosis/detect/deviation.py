"""The robust standard deviation that all detectors use."""

import statistics
from collections.abc import Collection
from typing import Final

MAD_TO_SIGMA: Final = 1.4826
"""The median absolute deviation times this is the standard deviation, where values vary normally."""


def robust_deviation(values: Collection[float], middle: float | None = None) -> float:
    """Return the standard deviation by the median absolute deviation, which outliers do not move.

    Args:
        values: One at least.
        middle: Their median, where it is known.
    """
    center = statistics.median(values) if middle is None else middle
    return MAD_TO_SIGMA * statistics.median([abs(value - center) for value in values])
