"""The robust standard deviation that all detectors use."""

import statistics
from collections.abc import Collection
from typing import Final

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
