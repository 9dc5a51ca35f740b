"""Student's t distribution, and Holm's correction for many tests at once.

Comparisons of runs and of captures both test with these. Nothing here imports numpy: a training process does
not load it to compare itself with the run before.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_Numbers = TypeVar("_Numbers", float, "npt.NDArray[np.float64]")


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


def beta_fraction(x: _Numbers, a: _Numbers, b: _Numbers, terms: int) -> _Numbers:
    """Return the continued fraction of the regularised incomplete beta function (DLMF 8.17.22).

    Args:
        x: Numbers from 0 to 1, below the distribution's mean; one number, or an array as ``a`` and ``b`` are.
        terms: How many are taken. It needs about the square root of the larger parameter.
    """
    fraction = 0 * x + 1
    for m in range(terms, -1, -1):
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        fraction = 1 + odd / fraction
        if m:
            fraction = 1 + m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)) / fraction
    return fraction


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
    fraction = beta_fraction(x, a, b, 20 + 2 * math.isqrt(math.ceil(max(a, b))))
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    return math.exp(a * math.log(x) + b * math.log1p(-x) - log_beta) / a / fraction
