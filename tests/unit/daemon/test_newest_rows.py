"""The newest rows of running sums, and how certain a mean over them is."""

import numpy as np
import pytest

from torchperfd_daemon.observer.newest_rows import NewestRows, error_of_means


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


def test_newest_rows_push_out_the_oldest() -> None:
    rows = NewestRows(2, 1)
    for number in range(3):
        rows.add()[0] = number
    assert [float(row[0]) for row in rows.newest(5)] == [1.0, 2.0]
    assert float(rows[0][0]) == 2.0
