"""The newest rows, beside a list that keeps all, and how certain a mean over them is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperfd_daemon.observer.rank_window import NewestRows, error_of_means

KEPT = 4


@given(
    st.lists(st.integers(1, 5), max_size=12),
    st.integers(0, 60),
    st.integers(1, KEPT + 2),
)
def test_newest_rows_are_the_end_of_all(steps: list[int], least: int, most: int) -> None:
    rows, column = NewestRows(KEPT, 2), np.cumsum(steps).tolist()
    for value in column:
        row = rows.add()
        assert row.tolist() == [0.0, 0.0]
        row[1] = value
    kept = column[-KEPT:]
    assert len(rows) == len(kept)
    assert bool(rows) == bool(kept)
    assert [rows[back][1] for back in range(len(rows))] == kept[::-1]
    assert rows.newest(most)[:, 1].tolist() == kept[-most:]
    if kept:
        newest_first = kept[::-1][: most + 1]
        reached = [back for back, value in enumerate(newest_first) if value >= least]
        assert rows.since(least, 1, most) == max(reached, default=0)


def test_error_of_means_is_that_of_the_samples() -> None:
    # Ten steps a sample, of 1, 2 and 3 each.
    rows = np.array([[0.0, 0.0], [10.0, 10.0], [30.0, 20.0], [60.0, 30.0]])
    assert error_of_means(rows, 0, 1) == pytest.approx(1 / np.sqrt(3))


def test_error_of_means_leaves_out_samples_without_a_step() -> None:
    rows = np.array([[0.0, 0.0], [10.0, 10.0], [10.0, 10.0], [40.0, 20.0]])
    assert error_of_means(rows, 0, 1) == pytest.approx(np.sqrt(2) / np.sqrt(2))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_error_of_means_of_one_sample_is_zero(count: int) -> None:
    assert error_of_means(np.ones((count, 2)).cumsum(axis=0), 0, 1) == 0.0
