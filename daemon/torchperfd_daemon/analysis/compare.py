"""Two captures, or two ranks of one, side by side: what is new, gone, or changed beyond noise.

Rows are compared per step, so that captures of different lengths can be. How much a row differs from one
step to the next says how much of a difference is noise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from torchperfd_daemon.analysis.breakdown import DEVICE
from torchperfd_daemon.analysis.operators import ON_DEVICE
from torchperfd_daemon.analysis.significance import Float64, Spread, holm, welch
from torchperfd_daemon.analysis.summary import Summary
from torchperfd_daemon.analysis.trace import Flags, Int64
from torchperfd_daemon.errors import UsageError

Status = Literal["new", "gone", "changed", "same"]
ComparedTable = Literal["phases", "device", "operators", "launched", "kernels", "memory"]
# In how many of all tables without a real difference one may be seen.
LEVEL: Final = 0.05
# Less than this part of the step is not worth a word, however certain it is.
NEGLIGIBLE_OF_STEP: Final = 0.001
# Where noise is unknown, a difference counts from this part of the row and of the step on.
UNKNOWN_NOISE_OF_ROW: Final = 0.10
UNKNOWN_NOISE_OF_STEP: Final = 0.01
# A device that is busy for this part of the steps is what they wait for.
_BUSY: Final = 0.5
# The headline names at most so many rows, each with this part of the difference or more.
_CAUSES: Final = 3
_WORTH_NAMING: Final = 0.10
_PARTS: Final = ("busy", "compute", "comm", "memcpy", "exposed_comm", "exposed_memcpy", "idle")
_KINDS_OF_MEMORY: Final = ("host_allocated", "host_peak", "device_allocated", "device_peak")


@dataclass(frozen=True, slots=True)
class Change:
    """One row, before and after: means per step, times in ns, memory in bytes.

    Attributes:
        name: The operator or kernel, the part of a `Breakdown`, the kind of `MemorySteps`.
        before: What it took in a step of the first side.
        after: The same in the second.
        calls_before: How often it was called in a step of the first side; None for what is not called.
        calls_after: The same in the second.
        p_value: The chance that noise alone makes such a difference, this row looked at by itself; None
            where noise is unknown or the row is on one side only.
        status: ``new`` and ``gone`` are on one side only; ``changed`` is beyond noise, and more than a
            thousandth of the step.
    """

    name: str
    before: float
    after: float
    calls_before: float | None
    calls_after: float | None
    p_value: float | None
    status: Status

    @property
    def difference(self) -> float:
        """What was added; negative for what was saved."""
        return self.after - self.before

    @property
    def percent(self) -> float | None:
        """The difference in percent of what was before; None where that is nothing."""
        return 100 * self.difference / abs(self.before) if self.before else None


@dataclass(frozen=True, slots=True)
class Side:
    """What one side of a comparison is made of.

    Attributes:
        paths: Its trace files, one a rank.
        steps: The steps that count: those of all its ranks. 0 where the whole recording counts.
    """

    paths: tuple[str, ...]
    steps: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every row of two sides. Tables are ordered by absolute difference, the largest first.

    Attributes:
        before: The first side.
        after: The second.
        per_step: Values are per step. Otherwise they are of whole recordings, since one has no steps.
        noise_known: Both have several steps, so that ``changed`` means beyond noise.
        step: Time of a step, on the device where the host runs ahead of it; or of the recording.
        phases: Host time of a step by phase; empty without steps.
        device: What the device did in a step, the parts of `Breakdown`; empty without a device.
        operators: Self CPU time by name; over the rows of one thread it adds up to the step.
        launched: Device time by the name of the operator that launched it.
        kernels: Time of kernels, copies and fills by name.
        memory: The kinds of `MemorySteps`; empty unless both recordings have memory.
        ranks: The step of each rank, where several are compared. The tables are then of their mean.
    """

    before: Side
    after: Side
    per_step: bool
    noise_known: bool
    step: Change
    phases: tuple[Change, ...]
    device: tuple[Change, ...]
    operators: tuple[Change, ...]
    launched: tuple[Change, ...]
    kernels: tuple[Change, ...]
    memory: tuple[Change, ...]
    ranks: tuple[tuple[int | None, Change], ...]

    def table(self, name: ComparedTable) -> tuple[Change, ...]:
        """Return the rows of one table."""
        rows: tuple[Change, ...] = getattr(self, name)
        return rows

    def causes(self) -> tuple[Change, ...]:
        """Return the rows that explain most of the step's difference, at most three, largest first.

        They are kernels where the device is busy for half of both steps, and operators otherwise.
        """
        busy = next((row for row in self.device if row.name == "busy"), None)
        waits_for_device = busy is not None and (
            busy.before >= _BUSY * self.step.before and busy.after >= _BUSY * self.step.after
        )
        whole = self.step.difference
        found = [
            row
            for row in (self.kernels if waits_for_device else self.operators)
            if row.status != "same" and row.difference * whole > 0
        ]
        return tuple(row for row in found[:_CAUSES] if abs(row.difference) >= _WORTH_NAMING * abs(whole))

    def kernels_beside(self) -> tuple[Change, ...]:
        """Return the kernels that changed though the step did not, at most three, largest first."""
        if self.step.status != "same":
            return ()
        least = NEGLIGIBLE_OF_STEP * max(self.step.before, self.step.after)
        changed = (row for row in self.kernels if row.status != "same" and abs(row.difference) >= least)
        return tuple(changed)[:_CAUSES]


def compare(
    before: Sequence[Summary], after: Sequence[Summary], ranks: Sequence[int | None] | None = None
) -> Comparison:
    """Compare two sides, rank by rank and as a whole.

    Several ranks count as one: a row takes what it takes in the mean over ranks, in the steps that all of
    them recorded. Ranks wait for one another, so that their steps are no independent measurements.

    Args:
        before: The summary of each rank, made with ``samples=True``.
        after: The same ranks of the other side, in the same order.
        ranks: What the ranks are called; None for what the traces say.

    Raises:
        UsageError: A side has no summary, the other does not match it, or one was made without samples.
    """
    if not before or len(before) != len(after):
        raise UsageError(f"{len(before)} traces cannot be compared with {len(after)}", "give the same ranks")
    if any(summary.samples is None for summary in (*before, *after)):
        raise UsageError("a comparison needs to know each step", "summarise with samples=True")
    per_step = bool(_shared_steps(before) and _shared_steps(after))
    sides = _Sampled(before, per_step), _Sampled(after, per_step)
    (step,) = _changes(*sides, _durations)
    longest = max(step.before, step.after)
    has_memory = all(
        summary.samples and summary.samples.memory and (per_step or not summary.steps)
        for summary in (*before, *after)
    )
    names = [summary.rank for summary in before] if ranks is None else ranks
    pairs = zip(names, before, after, strict=True) if len(before) > 1 else ()
    return Comparison(
        before=Side(tuple(summary.path for summary in before), sides[0].count if per_step else 0),
        after=Side(tuple(summary.path for summary in after), sides[1].count if per_step else 0),
        per_step=per_step,
        noise_known=_noise_known(*sides),
        step=step,
        phases=_changes(*sides, _phases, longest) if per_step else (),
        device=_changes(*sides, _device_parts, longest),
        operators=_changes(*sides, _operators, longest),
        launched=_changes(*sides, _launched, longest),
        kernels=_changes(*sides, _kernels, longest),
        memory=_changes(*sides, _memory) if has_memory else (),
        ranks=tuple((rank, compare([one], [other]).step) for rank, one, other in pairs),
    )


@dataclass(frozen=True, slots=True)
class _Cells:
    """What rows took in the steps of one trace, sparse; ``calls`` is None for what is not called."""

    names: Sequence[str]
    row: Int64
    step: Int64
    value: Int64
    calls: Int64 | None


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of one side over its steps; ``calls`` is the mean a step."""

    number: dict[str, int]
    spread: Spread
    calls: Float64 | None

    def mean(self, name: str) -> float:
        """Return what a row took in a step; 0 where there is no such row."""
        return float(self.spread.mean[self.number[name]]) if name in self.number else 0.0

    def mean_calls(self, name: str) -> float | None:
        """Return how often a row was called in a step; None for what is not called."""
        if self.calls is None:
            return None
        return float(self.calls[self.number[name]]) if name in self.number else 0.0


class _Sampled:
    """The steps of one side, in which its rows are measured.

    Args:
        summaries: Its ranks.
        per_step: Whether each step counts by itself; otherwise all that was recorded counts as one.
    """

    def __init__(self, summaries: Sequence[Summary], per_step: bool) -> None:
        shared = {index: at for at, index in enumerate(_shared_steps(summaries))} if per_step else {}
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

    def rows(self, cells_of: Callable[[Summary], _Cells]) -> _Rows:
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
    ) -> _Rows:
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
        return _Rows(
            {names[each]: at for at, each in enumerate(present.tolist())},
            Spread(mean, squares / max(self.count - 1, 1), self.count),
            counted if called else None,
        )


def _shared_steps(summaries: Sequence[Summary]) -> list[int]:
    """Return the indices of the steps that every rank recorded."""
    return sorted(set.intersection(*({step.index for step in summary.steps} for summary in summaries)))


def _noise_known(before: _Sampled, after: _Sampled) -> bool:
    return before.count > 1 and after.count > 1


def _changes(
    before: _Sampled, after: _Sampled, cells_of: Callable[[Summary], _Cells], longest: float = 0.0
) -> tuple[Change, ...]:
    """Return one table.

    Args:
        before: The first side.
        after: The second.
        cells_of: What of a trace is in the table.
        longest: The longer side's step in ns, of which a row must change a part to count; 0 for any part.
    """
    one, other = before.rows(cells_of), after.rows(cells_of)
    both = [name for name in one.number if name in other.number and (one.mean(name) or other.mean(name))]
    left, right = (_picked(rows, both) for rows in (one, other))
    if _noise_known(before, after):
        chances = welch(left, right)
        moved = holm(chances, LEVEL) & (np.abs(right.mean - left.mean) >= NEGLIGIBLE_OF_STEP * longest)
        p_values: list[float | None] = list(chances.tolist())
    else:
        moved = _moved(left, right, longest)
        p_values = [None] * len(both)
    found: list[tuple[str, float | None, Status]] = [
        (name, p_value, "changed" if beyond else "same")
        for name, p_value, beyond in zip(both, p_values, moved.tolist(), strict=True)
    ]
    found += [(name, None, "gone") for name in one.number.keys() - other.number.keys()]
    found += [(name, None, "new") for name in other.number.keys() - one.number.keys()]
    changes = [
        Change(
            name=name,
            before=one.mean(name),
            after=other.mean(name),
            calls_before=one.mean_calls(name),
            calls_after=other.mean_calls(name),
            p_value=p_value,
            status=status,
        )
        for name, p_value, status in found
    ]
    return tuple(
        sorted(
            (row for row in changes if row.before or row.after),
            key=lambda row: (-abs(row.difference), row.name),
        )
    )


def _picked(rows: _Rows, names: Sequence[str]) -> Spread:
    at = [rows.number[name] for name in names]
    return Spread(rows.spread.mean[at], rows.spread.variance[at], rows.spread.count)


def _moved(before: Spread, after: Spread, longest: float) -> Flags:
    """Return which rows differ by more than what counts where noise is unknown."""
    larger = np.maximum(np.abs(before.mean), np.abs(after.mean))
    least = np.maximum(UNKNOWN_NOISE_OF_ROW * larger, UNKNOWN_NOISE_OF_STEP * longest)
    moved: Flags = (np.abs(after.mean - before.mean) >= least) & (larger > 0)
    return moved


def _durations(summary: Summary) -> _Cells:
    return _dense({"step": [step.duration_ns for step in summary.steps] or [summary.duration_ns]})


def _phases(summary: Summary) -> _Cells:
    names = sorted({name for step in summary.step_phases for name in step})
    return _dense({name: [step.get(name, 0) for step in summary.step_phases] for name in names})


def _device_parts(summary: Summary) -> _Cells:
    if not summary.breakdown.n_gpu_events:
        return _dense({})
    steps = summary.step_breakdowns or (summary.breakdown,)
    return _dense({part: [getattr(step, f"{part}_ns") for step in steps] for part in _PARTS})


def _memory(summary: Summary) -> _Cells:
    memory = summary.samples and summary.samples.memory
    return _dense({kind: getattr(memory, kind) for kind in _KINDS_OF_MEMORY})


def _dense(rows: dict[str, Any]) -> _Cells:
    values = np.array([list(row) for row in rows.values()], dtype=np.int64)
    row, step = np.indices(values.shape) if rows else (values, values)
    return _Cells(tuple(rows), row.ravel(), step.ravel(), values.ravel(), None)


def _operators(summary: Summary) -> _Cells:
    return _called(summary, lambda category: category not in ON_DEVICE, "self_cpu_ns")


def _launched(summary: Summary) -> _Cells:
    return _called(summary, lambda category: category not in ON_DEVICE, "self_device_ns")


def _kernels(summary: Summary) -> _Cells:
    return _called(summary, lambda category: category in DEVICE, "self_device_ns")


def _called(summary: Summary, wanted: Callable[[str], bool], column: str) -> _Cells:
    assert summary.samples is not None
    table = summary.samples.operators
    chosen = np.array([wanted(category) for category in table.categories], dtype=np.bool_)[table.row]
    values: Int64 = getattr(table, column)[chosen]
    return _Cells(table.names, table.row[chosen], table.step[chosen], values, table.calls[chosen])
