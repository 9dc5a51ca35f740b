"""Compares two captures, or two ranks of one, row by row: what is new, gone, or changed beyond noise.

Rows are compared per step, so that captures of different lengths are comparable. The variation of a row from
step to step shows how much of a difference is noise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from torchperfd.model.significance import holm
from torchperfd_daemon.analysis import comparison_samples as cells
from torchperfd_daemon.analysis.comparison_samples import (
    Cells,
    Rows,
    SampledSide,
    Spread,
    shared_steps,
    welch,
)
from torchperfd_daemon.analysis.summary import Summary
from torchperfd_daemon.analysis.trace import Flags
from torchperfd_daemon.errors import UsageError

Status = Literal["new", "gone", "changed", "same"]
ComparedTable = Literal["phases", "device", "operators", "launched", "kernels", "memory"]
# The share of tables without a real difference in which one may be reported.
LEVEL: Final = 0.05
# A difference below this part of the step is not reported, however certain it is.
NEGLIGIBLE_OF_STEP: Final = 0.001
# Where noise is unknown, a difference counts from this part of the row and of the step on.
UNKNOWN_NOISE_OF_ROW: Final = 0.10
UNKNOWN_NOISE_OF_STEP: Final = 0.01
# A device that is busy for this part of the steps determines their length.
_BUSY: Final = 0.5
# The headline names at most so many rows, each with this part of the difference or more.
_CAUSES: Final = 3
_WORTH_NAMING: Final = 0.10


@dataclass(frozen=True, slots=True)
class Change:
    """One row, before and after: means per step, times in ns, memory in bytes.

    Attributes:
        name: The operator or kernel, the part of a `Breakdown`, the kind of `MemorySteps`.
        calls_before: Its calls per step of the first side; None for a row without calls.
        p_value: The chance that noise alone makes such a difference, for this row alone; None where noise
            is unknown or the row is on one side only.
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
        """The increase; negative for a saving."""
        return self.after - self.before

    @property
    def percent(self) -> float | None:
        """The difference in percent of the first side; None if that is 0."""
        return 100 * self.difference / abs(self.before) if self.before else None


@dataclass(frozen=True, slots=True)
class Side:
    """The traces and steps of one side of a comparison.

    Attributes:
        steps: The steps that count: those of all its ranks. 0 where the whole recording counts.
    """

    paths: tuple[str, ...]
    steps: int
    device_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every row of two sides. Tables are ordered by absolute difference, the largest first.

    Attributes:
        per_step: Values are per step. Otherwise they are of whole recordings, since one has no steps.
        noise_known: Both have several steps, so that ``changed`` means beyond noise.
        step: Time of a step, on the device where the host runs ahead of it; or of the recording.
        phases: Host time of a step by phase; empty without steps.
        device: The device's time in a step, by the parts of `Breakdown`; empty without a device.
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

    Several ranks count as one: a row's value is the mean over ranks, in the steps that all of them recorded.
    Ranks wait for one another, so their steps are no independent measurements.

    Raises:
        UsageError: A side has no summary, the other does not match it, or one was made without samples.
    """
    if not before or len(before) != len(after):
        raise UsageError(f"{len(before)} traces cannot be compared with {len(after)}", "give the same ranks")
    if any(summary.samples is None for summary in (*before, *after)):
        raise UsageError("a comparison needs to know each step", "summarise with samples=True")
    per_step = bool(shared_steps(before) and shared_steps(after))
    sides = SampledSide(before, per_step), SampledSide(after, per_step)
    (step,) = _changes(*sides, cells.durations)
    longest = max(step.before, step.after)
    has_memory = all(
        summary.samples and summary.samples.memory and (per_step or not summary.steps)
        for summary in (*before, *after)
    )
    names = [summary.rank for summary in before] if ranks is None else ranks
    pairs = zip(names, before, after, strict=True) if len(before) > 1 else ()
    return Comparison(
        before=_side(before, sides[0].count if per_step else 0),
        after=_side(after, sides[1].count if per_step else 0),
        per_step=per_step,
        noise_known=min(side.count for side in sides) > 1,
        step=step,
        phases=_changes(*sides, cells.phases, longest) if per_step else (),
        device=_changes(*sides, cells.device_parts, longest),
        operators=_changes(*sides, cells.operators, longest),
        launched=_changes(*sides, cells.launched, longest),
        kernels=_changes(*sides, cells.kernels, longest),
        memory=_changes(*sides, cells.memory) if has_memory else (),
        ranks=tuple((rank, compare([one], [other]).step) for rank, one, other in pairs),
    )


def _side(summaries: Sequence[Summary], steps: int) -> Side:
    devices = dict.fromkeys(name for summary in summaries for name in summary.device_names)
    return Side(tuple(summary.path for summary in summaries), steps, tuple(devices))


def _changes(
    before: SampledSide, after: SampledSide, cells_of: Callable[[Summary], Cells], longest: float = 0.0
) -> tuple[Change, ...]:
    """Return one table.

    Args:
        longest: The longer side's step in ns; changes below a fixed share of it do not count. 0 counts all.
    """
    one, other = before.rows(cells_of), after.rows(cells_of)
    both = [name for name in one.number if name in other.number and (one.mean(name) or other.mean(name))]
    left, right = (_picked(rows, both) for rows in (one, other))
    if min(before.count, after.count) > 1:
        chances = welch(left, right)
        p_values: list[float | None] = list(chances.tolist())
        moved = np.zeros(len(both), dtype=np.bool_)
        moved[holm(chances.tolist(), LEVEL)] = True
        moved &= np.abs(right.mean - left.mean) >= NEGLIGIBLE_OF_STEP * longest
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


def _picked(rows: Rows, names: Sequence[str]) -> Spread:
    at = [rows.number[name] for name in names]
    return Spread(rows.spread.mean[at], rows.spread.variance[at], rows.spread.count)


def _moved(before: Spread, after: Spread, longest: float) -> Flags:
    """Return which rows differ by more than what counts where noise is unknown."""
    larger = np.maximum(np.abs(before.mean), np.abs(after.mean))
    least = np.maximum(UNKNOWN_NOISE_OF_ROW * larger, UNKNOWN_NOISE_OF_STEP * longest)
    moved: Flags = (np.abs(after.mean - before.mean) >= least) & (larger > 0)
    return moved
