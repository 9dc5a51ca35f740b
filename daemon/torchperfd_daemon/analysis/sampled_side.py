"""One side of a comparison: the mean and the spread of each row over the steps of its ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from torchperfd_daemon.analysis.compared_cells import Cells
from torchperfd_daemon.analysis.significance import Float64, Spread
from torchperfd_daemon.analysis.summary import Summary
from torchperfd_daemon.analysis.trace import Int64


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one side over its steps; ``calls`` is the mean a step."""

    number: dict[str, int]
    spread: Spread
    calls: Float64 | None

    def mean(self, name: str) -> float:
        """Return a row's mean per step; 0 if there is no such row."""
        return float(self.spread.mean[self.number[name]]) if name in self.number else 0.0

    def mean_calls(self, name: str) -> float | None:
        """Return a row's calls per step; None for a row without calls."""
        if self.calls is None:
            return None
        return float(self.calls[self.number[name]]) if name in self.number else 0.0


class SampledSide:
    """The steps of one side, in which its rows are measured.

    Args:
        per_step: Whether each step counts by itself; otherwise the whole recording counts as one.
    """

    def __init__(self, summaries: Sequence[Summary], per_step: bool) -> None:
        shared = {index: at for at, index in enumerate(shared_steps(summaries))} if per_step else {}
        self.count = len(shared) or 1
        self._summaries = summaries
        # For each rank's steps their place among the shared ones, -1 for none.
        self._places = [
            np.array(
                [shared.get(step.index, -1) for step in summary.steps]
                if per_step
                else [0] * (len(summary.steps) or 1),
                dtype=np.int64,
            )
            for summary in summaries
        ]

    def rows(self, cells_of: Callable[[Summary], Cells]) -> Rows:
        """Return the mean and variance of every row over the steps."""
        number: dict[str, int] = {}
        keys, values, calls = [], [], []
        for summary, places in zip(self._summaries, self._places, strict=True):
            cells = cells_of(summary)
            rows = np.array([number.setdefault(name, len(number)) for name in cells.names], dtype=np.int64)
            place = places[cells.step]
            counts = np.zeros_like(cells.value) if cells.calls is None else cells.calls
            kept = (place >= 0) & ((cells.value != 0) | (counts != 0))
            keys.append((rows[cells.row] * self.count + place)[kept])
            values.append(cells.value[kept])
            calls.append(counts[kept])
        return self._summed(
            number, *map(np.concatenate, (keys, values, calls)), called=cells.calls is not None
        )

    def _summed(
        self, number: dict[str, int], key: Int64, value: Int64, calls: Int64, *, called: bool
    ) -> Rows:
        """Return the rows that have cells, each step's sum divided by the number of ranks."""
        ranks = len(self._summaries)
        cells, cell = np.unique(key, return_inverse=True)
        sums = np.bincount(cell, value, len(cells)) / ranks
        present, row = np.unique(cells // self.count, return_inverse=True)
        mean = np.bincount(row, sums, len(present)) / self.count
        # Steps without a cell took nothing, and differ from the mean by all of it.
        without = self.count - np.bincount(row, minlength=len(present))
        squares = np.bincount(row, (sums - mean[row]) ** 2, len(present)) + without * mean**2
        counted = np.bincount(row, np.bincount(cell, calls, len(cells)), len(present)) / ranks / self.count
        names = list(number)
        return Rows(
            {names[each]: at for at, each in enumerate(present.tolist())},
            Spread(mean, squares / max(self.count - 1, 1), self.count),
            counted if called else None,
        )


def shared_steps(summaries: Sequence[Summary]) -> list[int]:
    """Return the indices of the steps that every rank recorded."""
    return sorted(
        set.intersection(
            *({step.index for step in summary.steps if not step.is_stub} for summary in summaries)
        )
    )
