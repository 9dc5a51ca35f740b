"""The tests of significance: against their definitions, worked out the long way."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperfd_daemon.analysis.comparison_samples import Spread, holm, welch


def spread(*columns: list[float]) -> Spread:
    table = np.array(columns)
    return Spread(table.mean(axis=1), table.var(axis=1, ddof=1), table.shape[1])


def two_sided(t: float, freedom: float) -> float:
    """The area under Student's density beyond ±t, by the midpoint rule over an angle."""
    # With t = sqrt(f) tan(angle) the density becomes cos(angle)^(f - 1), and infinity a right angle.
    edges = np.linspace(math.atan(t / math.sqrt(freedom)), math.pi / 2, 200_001)
    heights = np.cos((edges[1:] + edges[:-1]) / 2) ** (freedom - 1)
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(math.pi) / 2
    return float(2 * math.exp(log_scale) * heights.sum() * (edges[1] - edges[0]))


@given(
    st.lists(st.integers(0, 100), min_size=2, max_size=12),
    st.lists(st.integers(0, 100), min_size=2, max_size=12),
)
def test_welch_is_the_area_beyond_t(before: list[float], after: list[float]) -> None:
    left, right = (statistics.variance(side) / len(side) for side in (before, after))
    (chance,) = welch(spread(before), spread(after)).tolist()
    difference = abs(statistics.mean(after) - statistics.mean(before))
    if not left + right:
        assert chance == (0.0 if difference else 1.0)
        return
    t = difference / math.sqrt(left + right)
    freedom = (left + right) ** 2 / (left**2 / (len(before) - 1) + right**2 / (len(after) - 1))
    assert chance == pytest.approx(two_sided(t, freedom), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    ("t", "freedom", "chance"),
    # From the definition: closed forms exist for one and two degrees of freedom, and for none.
    [(1.0, 1, 0.5), (math.sqrt(2), 2, 1 - math.sqrt(0.5)), (0.0, 7, 1.0)],
)
def test_the_closed_forms_come_out(t: float, freedom: int, chance: float) -> None:
    # Two sides of n values with one variance have 2n - 2 degrees of freedom; one without any has n - 1.
    count = freedom + 1
    left = Spread(np.array([0.0]), np.array([float(count)]), count)
    right = Spread(np.array([t]), np.array([0.0]), count)
    assert welch(left, right).tolist() == pytest.approx([chance])


@given(st.lists(st.floats(0, 1), max_size=20), st.floats(0.001, 0.5))
def test_holm_names_rows_from_the_smallest_until_one_fails(chances: list[float], level: float) -> None:
    named: set[int] = set()
    for place, row in enumerate(sorted(range(len(chances)), key=lambda row: chances[row])):
        if chances[row] > level / (len(chances) - place):
            break
        named.add(row)
    assert set(np.flatnonzero(holm(np.array(chances), level)).tolist()) == named


def test_noise_alone_names_a_row_in_fewer_tables_than_the_level() -> None:
    random = np.random.default_rng(17)
    level, tables, wrong = 0.05, 400, 0
    for _ in range(tables):
        # Each row on a scale of its own, as operators are; the sides of different lengths.
        scale = random.lognormal(0, 2, (30, 1))
        before, after = (scale * random.normal(10, 1, (30, count)) for count in (4, 7))
        wrong += bool(holm(welch(spread(*before.tolist()), spread(*after.tolist())), level).any())
    # Three standard deviations of the count above what the level allows.
    assert wrong <= tables * level + 3 * math.sqrt(tables * level * (1 - level))
    assert wrong > 0
