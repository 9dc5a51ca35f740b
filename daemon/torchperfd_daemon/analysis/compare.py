"""Compares two captures, or two ranks of one, row by row.

Rows are compared per step, so that captures of different lengths are comparable. The variation of a row from
step to step shows how much of a difference is noise.
"""

from collections.abc import Callable, Sequence

import numpy as np

from torchperfd_daemon.analysis import compared_cells as cells
from torchperfd_daemon.analysis.compared_cells import Cells
from torchperfd_daemon.analysis.comparison import (
    LEVEL,
    NEGLIGIBLE_OF_STEP,
    UNKNOWN_NOISE_OF_ROW,
    UNKNOWN_NOISE_OF_STEP,
    Change,
    Comparison,
    Side,
    Status,
)
from torchperfd_daemon.analysis.sampled_side import Rows, SampledSide, shared_steps
from torchperfd_daemon.analysis.significance import Spread, holm, welch
from torchperfd_daemon.analysis.summary import Summary
from torchperfd_daemon.analysis.trace import Flags
from torchperfd_daemon.errors import UsageError


def compare(
    before: Sequence[Summary], after: Sequence[Summary], ranks: Sequence[int | None] | None = None
) -> Comparison:
    """Compare two sides, rank by rank and as a whole.

    Several ranks count as one: a row's value is the mean over ranks, in the steps that all of them recorded.
    Ranks wait for one another, so their steps are no independent measurements.

    Args:
        before: The summary of each rank, made with ``samples=True``.
        after: The same ranks of the other side, in the same order.
        ranks: The names of the ranks; None for those in the traces.

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
        noise_known=_noise_known(*sides),
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


def _noise_known(before: SampledSide, after: SampledSide) -> bool:
    return before.count > 1 and after.count > 1


def _changes(
    before: SampledSide, after: SampledSide, cells_of: Callable[[Summary], Cells], longest: float = 0.0
) -> tuple[Change, ...]:
    """Return one table.

    Args:
        cells_of: Returns the table's values of one trace.
        longest: The longer side's step in ns; changes below a fixed share of it do not count. 0 counts all.
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


def _picked(rows: Rows, names: Sequence[str]) -> Spread:
    at = [rows.number[name] for name in names]
    return Spread(rows.spread.mean[at], rows.spread.variance[at], rows.spread.count)


def _moved(before: Spread, after: Spread, longest: float) -> Flags:
    """Return which rows differ by more than what counts where noise is unknown."""
    larger = np.maximum(np.abs(before.mean), np.abs(after.mean))
    least = np.maximum(UNKNOWN_NOISE_OF_ROW * larger, UNKNOWN_NOISE_OF_STEP * longest)
    moved: Flags = (np.abs(after.mean - before.mean) >= least) & (larger > 0)
    return moved
