"""Whether a difference is more than noise: Welch's test for one row, Holm's correction for many.

Both are needed: a table has hundreds of rows, and at five in a hundred some of them always differ.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from torchperfd_daemon.analysis.trace import Flags

Float64 = npt.NDArray[np.float64]
# Terms of the continued fraction. It needs about the square root of the degrees of freedom.
_TERMS: Final = 400


@dataclass(frozen=True, slots=True)
class Spread:
    """Rows measured ``count`` times each.

    Attributes:
        variance: Its sample variance (divisor ``count - 1``); 0 where it was measured once.
        count: How often every row was measured.
    """

    mean: Float64
    variance: Float64
    count: int


def welch(before: Spread, after: Spread) -> Float64:
    """Return for each row the chance of a difference as large as seen if there were none (two-sided).

    Welch's t test: unequal variances, degrees of freedom after Satterthwaite (Welch, Biometrika 34, 1947).
    Where neither side varies any difference is certain. Each side must have been measured twice or more.
    """
    shares = before.variance / before.count, after.variance / after.count
    squared_error = shares[0] + shares[1]
    difference = after.mean - before.mean
    varies = squared_error > 0
    error = np.where(varies, squared_error, 1.0)
    parts = (shares[0] / error) ** 2 / (before.count - 1) + (shares[1] / error) ** 2 / (after.count - 1)
    freedom = np.where(varies, 1 / np.where(varies, parts, 1.0), 1.0)
    return np.where(varies, _two_sided(difference**2 / error, freedom), np.where(difference == 0, 1.0, 0.0))


def holm(chances: Float64, level: float) -> Flags:
    """Return which rows differ, so that any is wrongly named in at most ``level`` of all tables.

    Holm's step-down procedure (Scand. J. Statistics 6, 1979), which lets rows depend on one another.
    """
    order = np.argsort(chances, kind="stable")
    passes = chances[order] <= level / np.arange(len(chances), 0, -1)
    named = np.zeros(len(chances), dtype=np.bool_)
    named[order[np.logical_and.accumulate(passes)]] = True
    return named


def _two_sided(t_squared: Float64, freedom: Float64) -> Float64:
    """Return the chance that Student's t lies further from 0: I_x(f/2, 1/2) at x = f / (f + t²)."""
    x = freedom / (freedom + t_squared)
    a, b = freedom / 2, np.full_like(freedom, 0.5)
    # The fraction converges below the distribution's mean; above it, its mirror image does.
    below = x < (a + 1) / (a + b + 2)
    value = _incomplete_beta(
        np.where(below, x, t_squared / (freedom + t_squared)), np.where(below, a, b), np.where(below, b, a)
    )
    return np.where(below, value, 1 - value)


def _incomplete_beta(x: Float64, a: Float64, b: Float64) -> Float64:
    """Return the regularised incomplete beta function by its continued fraction (DLMF 8.17.22)."""
    fraction = np.ones_like(x)
    for m in range(_TERMS, -1, -1):
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        fraction = 1 + odd / fraction
        if m:
            fraction = 1 + m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)) / fraction
    log_beta = _log_gamma(a) + _log_gamma(b) - _log_gamma(a + b)
    with np.errstate(divide="ignore"):
        front = np.exp(a * np.log(x) + b * np.log1p(-x) - log_beta) / a
    return front / fraction


def _log_gamma(values: Float64) -> Float64:
    return np.fromiter(map(math.lgamma, values.tolist()), np.float64, len(values))
