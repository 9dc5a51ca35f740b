"""Whether a difference is more than noise: Student's t, Holm's correction, and means of series.

Neighbours in a series of step times resemble each other, and a machine's speed drifts.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final


def two_sided(t: float, freedom: float) -> float:
    """Return the chance that Student's t lies further from 0 than ``t``: I_x(f/2, 1/2) at x = f / (f + t²).

    Args:
        t: Any number; infinity gives 0.
        freedom: Degrees of freedom, above 0.
    """
    if math.isinf(t):
        return 0.0
    x, a, b = freedom / (freedom + t * t), freedom / 2, 0.5
    # The fraction converges below the distribution's mean; above it, its mirror image does.
    if x < (a + 1) / (a + b + 2):
        return _incomplete_beta(x, a, b)
    return 1 - _incomplete_beta(t * t / (freedom + t * t), b, a)


def quantile_95(freedom: float) -> float:
    """Return the t that is exceeded on either side in 5 % of cases: 2.228 at 10 degrees of freedom.

    The expansion in powers of 1/freedom (Cornish and Fisher), right to four digits from 5 degrees on.
    """
    z = 1.959963985
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def holm(chances: Sequence[float], level: float) -> list[int]:
    """Return the places of the tests that show a difference, the clearest first.

    Any is wrongly named in at most ``level`` of all tables (Holm's step-down procedure, Scand. J. Statistics
    6, 1979); the tests may depend on one another.
    """
    named: list[int] = []
    for place in sorted(range(len(chances)), key=chances.__getitem__):
        if chances[place] > level / (len(chances) - len(named)):
            break
        named.append(place)
    return named


def _incomplete_beta(x: float, a: float, b: float) -> float:
    if x <= 0:
        return 0.0
    # The continued fraction DLMF 8.17.22, which needs about the square root of the larger parameter in terms.
    fraction = 1.0
    for m in range(20 + 2 * math.isqrt(math.ceil(max(a, b))), -1, -1):
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        fraction = 1 + odd / fraction
        if m:
            fraction = 1 + m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)) / fraction
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    return math.exp(a * math.log(x) + b * math.log1p(-x) - log_beta) / a / fraction


MIN_BLOCKS: Final = 8
"""Fewer blocks say nothing about their noise."""
GROUPS: Final = (8, 16, 32)
"""Numbers of groups that a series is divided into. Eight leave seven degrees of freedom on each side."""
RUN_TO_RUN: Final = 0.0075
"""Standard deviation from run to run, as a part of the mean, that no series shows within a run: where memory
lies, which CPU a process is on, at which clock it runs."""
_CLEAR: Final = 0.005
"""Chance from which on a test shows a change by itself."""
_MIN_RATIO: Final = 1e-3
"""Means that differ by a larger factor are compared by their difference: one of them may be zero."""
_WIDEST: Final = 20.0
_CLIPPED: Final = 0.05
"""Part of the blocks at each end that the clipped mean draws in."""


@dataclass(frozen=True, slots=True)
class MeanChange:
    """A mean before and after.

    Attributes:
        before: Mean of the first series.
        margin: Half the width of the 95 % confidence interval of the difference, at its wider side.
        chance: How likely noise alone makes such a difference.
        is_clipped: Whether spikes were clipped before the means were taken.
    """

    before: float
    after: float
    margin: float
    chance: float
    is_clipped: bool = False

    @property
    def difference(self) -> float:
        return self.after - self.before


def compare_means(before: Sequence[float], after: Sequence[float], factor: float = 1.0) -> MeanChange:
    """Compare two series by their means, and where these show no change, by means with spikes clipped.

    Args:
        before: At least ``MIN_BLOCKS`` values, in the order of time.
        factor: What ``before`` is multiplied with first.

    Returns:
        The means as they are; clipped where only these show a change. ``chance`` is twice the smaller one of
        both tests (Bonferroni), since two were made.
    """
    scaled = [value * factor for value in before]
    plain = _test(scaled, after)
    clipped = _test(_clip(scaled), _clip(after))
    chosen = clipped if clipped.chance <= _CLEAR < plain.chance else plain
    chance = min(1.0, 2 * min(plain.chance, clipped.chance))
    return replace(chosen, chance=chance, is_clipped=chosen is clipped)


def compare_plain_means(before: Sequence[float], after: Sequence[float], factor: float = 1.0) -> MeanChange:
    """Compare two series by their means alone; see :func:`compare_means`."""
    return _test([value * factor for value in before], after)


def _test(before: Sequence[float], after: Sequence[float]) -> MeanChange:
    means = statistics.fmean(before), statistics.fmean(after)
    between = (RUN_TO_RUN * means[0]) ** 2 + (RUN_TO_RUN * means[1]) ** 2
    margin, chance = 0.0, 0.0
    for groups in GROUPS:
        if groups > min(len(before), len(after)):
            break
        squares = _squared_error(before, groups), _squared_error(after, groups)
        error = math.sqrt(sum(squares) + between)
        if not error:
            continue
        # Welch and Satterthwaite; what differs from run to run is taken as known.
        freedom = (groups - 1) * error**4 / max(sum(square**2 for square in squares), 1e-300)
        freedom = min(max(freedom, groups - 1), 1000.0)
        quantile = quantile_95(freedom)
        if min(means) > _MIN_RATIO * max(means):
            # Of the ratio: a mean's error grows with the mean, and no time is below zero.
            relative = math.sqrt(squares[0] / means[0] ** 2 + squares[1] / means[1] ** 2 + 2 * RUN_TO_RUN**2)
            t = math.log(means[1] / means[0]) / relative
            width = means[1] * math.expm1(min(quantile * relative, _WIDEST))
        else:
            t, width = (means[1] - means[0]) / error, error * quantile
        chance = max(chance, two_sided(t, freedom))
        margin = max(margin, width)
    return MeanChange(*means, margin, chance if margin or means[0] != means[1] else 1.0)


def _squared_error(series: Sequence[float], groups: int) -> float:
    """Return the squared standard error of the mean, from the means of so many groups of neighbours."""
    edges = [len(series) * number // groups for number in range(groups + 1)]
    means = [statistics.fmean(series[first:end]) for first, end in itertools.pairwise(edges)]
    return statistics.variance(means) / groups


def _clip(series: Sequence[float]) -> list[float]:
    ordered = sorted(series)
    drawn_in = math.floor(_CLIPPED * len(ordered))
    low, high = ordered[drawn_in], ordered[-1 - drawn_in]
    return [min(max(value, low), high) for value in series]
