"""The newest rows of numbers, in memory of fixed size."""

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]


def error_of_means(rows: Float64, totals: int, counts: int) -> float:
    """Return the standard error of a mean, from the means between successive rows of two running sums.

    Args:
        rows: Oldest first; shape (rows, width).
        totals: Column of the sums.
        counts: Column of how many were summed.
    """
    added = np.diff(rows[:, counts])
    means = np.diff(rows[:, totals])[added > 0] / added[added > 0]
    return float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else 0.0


class NewestRows:
    """Rows of equal width, of which the newest are kept. Index 0 is the newest, 1 the one before it.

    Args:
        most: How many are kept.
        width: Numbers of a row.
    """

    def __init__(self, most: int, width: int) -> None:
        self._rows: Float64 = np.zeros((most, width))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, back: int) -> Float64:
        row: Float64 = self._rows[self._count - 1 - back]
        return row

    def add(self) -> Float64:
        """Return a new row of zeros, to be filled in place."""
        if self._count < len(self._rows):
            self._count += 1
        else:
            self._rows[:-1] = self._rows[1:]
        row = self[0]
        row[:] = 0.0
        return row

    def newest(self, count: int) -> Float64:
        """Return at most so many rows, the oldest first; shape (rows, width)."""
        rows: Float64 = self._rows[max(0, self._count - count) : self._count]
        return rows

    def since(self, least: float, column: int, most: int) -> int:
        """Return how many rows, at most ``most``, follow the first whose column is at least ``least``."""
        most = min(most, self._count - 1)
        while most > 0 and self[most][column] < least:
            most -= 1
        return most
