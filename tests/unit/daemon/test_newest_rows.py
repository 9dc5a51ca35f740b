"""The newest rows, beside a list that keeps all."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torchperfd_daemon.observer.newest_rows import NewestRows

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
