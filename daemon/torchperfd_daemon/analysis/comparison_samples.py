"""One side of a comparison: the mean and spread of each row over steps, and whether a difference is noise.

Welch's test is for one row. A table has hundreds, of which some always differ at five in a hundred:
:func:`torchperfd.model.significance.holm` corrects for that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from torchperfd.model.significance import two_sided
from torchperfd_daemon.analysis.categories import DEVICE
from torchperfd_daemon.analysis.operator_sums import ON_DEVICE
from torchperfd_daemon.analysis.summary import Summary
from torchperfd_daemon.analysis.trace import Float64, Int64


@dataclass(frozen=True, slots=True)
class Spread:
    """Rows measured ``count`` times each.

    Attributes:
        variance: Its sample variance (divisor ``count - 1``); 0 where it was measured once.
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
    difference = after.mean - before.mean
    chances = np.where(difference == 0, 1.0, 0.0)
    varies = np.flatnonzero(shares[0] + shares[1] > 0)
    one, other = (each[varies] for each in shares)
    error = one + other
    freedom = 1 / ((one / error) ** 2 / (before.count - 1) + (other / error) ** 2 / (after.count - 1))
    t = difference[varies] / np.sqrt(error)
    chances[varies] = list(map(two_sided, t.tolist(), freedom.tolist()))
    return chances


_PARTS: Final = ("busy", "compute", "comm", "memcpy", "exposed_comm", "exposed_memcpy", "idle")
_KINDS_OF_MEMORY: Final = ("host_allocated", "host_peak", "device_allocated", "device_peak")


@dataclass(frozen=True, slots=True)
class Cells:
    """The values of rows in the steps of one trace, sparse; ``calls`` is None for rows without calls."""

    names: Sequence[str]
    row: Int64
    step: Int64
    value: Int64
    calls: Int64 | None


def durations(summary: Summary) -> Cells:
    """Return the duration of each step in ns; of the whole recording where there are no steps."""
    return _dense({"step": [step.duration_ns for step in summary.steps] or [summary.duration_ns]})


def phases(summary: Summary) -> Cells:
    """Return the host time of each phase in each step."""
    names = sorted({name for step in summary.step_phases for name in step})
    return _dense({name: [step.get(name, 0) for step in summary.step_phases] for name in names})


def device_parts(summary: Summary) -> Cells:
    """Return the parts of each step's device time; no rows without a device."""
    if not summary.breakdown.n_gpu_events:
        return _dense({})
    steps = summary.step_breakdowns or (summary.breakdown,)
    return _dense({part: [getattr(step, f"{part}_ns") for step in steps] for part in _PARTS})


def memory(summary: Summary) -> Cells:
    """Return each step's memory in bytes."""
    memory = summary.samples and summary.samples.memory
    return _dense({kind: getattr(memory, kind) for kind in _KINDS_OF_MEMORY})


def _dense(rows: dict[str, Any]) -> Cells:
    values = np.array([list(row) for row in rows.values()], dtype=np.int64)
    row, step = np.indices(values.shape) if rows else (values, values)
    return Cells(tuple(rows), row.ravel(), step.ravel(), values.ravel(), None)


def operators(summary: Summary) -> Cells:
    """Return the self CPU time of each operator in each step."""
    return _called(summary, lambda category: category not in ON_DEVICE, "self_cpu_ns")


def launched(summary: Summary) -> Cells:
    """Return the device time that each operator launched in each step."""
    return _called(summary, lambda category: category not in ON_DEVICE, "self_device_ns")


def kernels(summary: Summary) -> Cells:
    """Return the device time of each kernel, copy and fill in each step."""
    return _called(summary, lambda category: category in DEVICE, "self_device_ns")


def _called(summary: Summary, wanted: Callable[[str], bool], column: str) -> Cells:
    assert summary.samples is not None
    table = summary.samples.operators
    chosen = np.array([wanted(category) for category in table.categories], dtype=np.bool_)[table.row]
    values: Int64 = getattr(table, column)[chosen]
    return Cells(table.names, table.row[chosen], table.step[chosen], values, table.calls[chosen])


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
