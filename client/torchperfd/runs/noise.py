"""Whether a series' mean changed beyond noise, where neighbours resemble each other and speed drifts."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from torchperfd.model.significance import quantile_95, two_sided

MIN_BLOCKS: Final = 8
"""Fewer blocks say nothing about their noise."""
GROUPS: Final = (8, 16, 32)
"""Numbers of groups that a series is divided into. Eight leave seven degrees of freedom on each side."""
RUN_TO_RUN: Final = 0.0075
"""Standard deviation from run to run, as a part of the mean, that no series shows within a run: where memory
lies, which CPU a process is on, at which clock it runs."""
_CLEAR: Final = 0.005
"""Chance from which on a test shows a change by itself."""
_LEAST_OF: Final = 1e-3
"""Means that differ by a larger factor are compared by their difference: one of them may be zero."""
_WIDEST: Final = 20.0
_CLIPPED: Final = 0.05
"""Part of the blocks at each end that the clipped mean draws in."""


@dataclass(frozen=True, slots=True)
class MeanChange:
    """A mean before and after.

    Attributes:
        before: Mean of the first series.
        after: Mean of the second.
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
        """How much the mean rose."""
        return self.after - self.before


def compare_means(before: Sequence[float], after: Sequence[float], factor: float = 1.0) -> MeanChange:
    """Compare two series by their means, and where these show no change, by means with spikes clipped.

    Args:
        before: At least ``MIN_BLOCKS`` values, in the order of time.
        after: The same.
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
        if min(means) > _LEAST_OF * max(means):
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
