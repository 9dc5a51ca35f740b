"""The operator table, in total and by step: calls of each operator, own and inclusive time, and memory.

The numbers are those of ``torch.profiler``'s ``key_averages()``, to the nanosecond and byte. The values by
step let a comparison distinguish differences from noise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import msgspec
import numpy as np

from torchperfd_daemon.analysis.callers import Callers, Links, find_links
from torchperfd_daemon.analysis.categories import ANNOTATION, LAUNCHES, OPERATOR, PYTHON, with_one_step
from torchperfd_daemon.analysis.operator_sums import (
    DEVICE_MEMORY,
    HOST_MEMORY,
    Operator,
    OperatorSteps,
    memory_outside,
    sum_calls,
)
from torchperfd_daemon.analysis.steps import Step, edges
from torchperfd_daemon.analysis.trace import Flags, Int64, Trace, distinct

GroupBy = Literal["name", "shape", "stack", "module"]
GROUPS: Final[tuple[GroupBy, ...]] = get_args(GroupBy)
GROUP_FIELDS: Final[dict[GroupBy, str]] = {"shape": "shapes", "stack": "stack", "module": "module"}
"""The field of `Operator` that distinguishes rows of one name."""
_HOST: Final = LAUNCHES - {"mtia_driver"} | {OPERATOR, ANNOTATION, "overhead"}
# torch leaves these out before it nests.
_HIDDEN: Final = frozenset(
    {
        "profiler::_record_function_enter",
        "profiler::_record_function_enter_new",
        "profiler::_record_function_exit",
        "aten::is_leaf",
        "aten::output_nr",
        "aten::_version",
    }
)
# Default number of frames by which a table distinguishes stacks.
_FRAMES: Final = 5


def operators(
    trace: Trace,
    *,
    group_by: GroupBy = "name",
    python_functions: bool = False,
    frames: int = _FRAMES,
    links: Links | None = None,
) -> list[Operator]:
    """Return the table, most self CPU time first.

    Args:
        group_by: Calls of one name are one row if they also share: nothing more, their input shapes
            (``record_shapes=True``), their Python stack or their module (both ``with_stack=True``).
        python_functions: Whether Python frames are rows and parents, as in torch's own table, or are
            left out so that self time stays with the operators.
    """
    host = _on_host(trace)
    key, labels = _groups(trace, group_by, host, frames)
    if python_functions:
        host |= trace.of_categories({PYTHON})
    sums = sum_calls(trace, key, host, links or find_links(trace))
    table = [Operator(**labels(group), **values) for group, values in sums.rows()]
    table += memory_outside(trace, np.flatnonzero(host))
    return sorted(table, key=lambda row: (-row.self_cpu_ns, row.name, row.category))


def operators_by_step(trace: Trace, step: Int64, links: Links) -> OperatorSteps:
    """Return the operator table by name, taken apart by step.

    Args:
        step: For each event of the trace the step that it ran in, numbered from 0; -1 for none, which leaves
            it out. A device event counts to the step of its launch, whenever it ran.
    """
    host = _on_host(trace)
    key, labels = _groups(trace, "name", host, 0)
    step = _of_launcher(step, links)
    steps = int(step.max()) + 2
    cells, cell = distinct(key * steps + step + 1)
    sums = sum_calls(trace, cell, host, links)
    group, place = np.divmod(cells, steps)
    wanted = (sums["calls"] > 0) & (place > 0)
    groups, row = distinct(group[wanted])
    heads = [labels(each) for each in groups.tolist()]
    return OperatorSteps(
        names=tuple(head["name"] for head in heads),
        categories=tuple(head["category"] for head in heads),
        row=row,
        step=place[wanted] - 1,
        calls=sums["calls"][wanted],
        self_cpu_ns=sums["self_cpu_ns"][wanted],
        self_device_ns=sums["self_device_ns"][wanted],
    )


def _of_launcher(step: Int64, links: Links) -> Int64:
    """Return the steps, those of device events replaced by the steps in which they were launched."""
    launcher = np.where(links.operator >= 0, links.operator, links.launch)
    known = launcher >= 0
    step = step.copy()
    step[links.event[known]] = step[launcher[known]]
    return step


def _on_host(trace: Trace) -> Flags:
    """Return which events are rows of torch's table and ran on the host, Python frames aside."""
    return trace.of_categories(_HOST) & ~trace.of_names(_HIDDEN.__contains__)


def _groups(
    trace: Trace, group_by: GroupBy, host: Flags, frames: int
) -> tuple[Int64, Callable[[int], dict[str, Any]]]:
    """Return each event's group, and the fields of `Operator` that its calls share."""
    texts, renamed = with_one_step(trace.names)
    further, table = _further(trace, group_by, host, frames)
    of_one_name = renamed.take(trace.name) * len(trace.categories) + trace.category
    keys, group = distinct(of_one_name * len(table) + further)

    def label(group: int) -> dict[str, Any]:
        key, part = divmod(int(keys[group]), len(table))
        name, category = divmod(key, len(trace.categories))
        row: dict[str, Any] = {"name": texts[name], "category": trace.categories[category]}
        return row if group_by == "name" else row | {GROUP_FIELDS[group_by]: table[part]}

    return group, label


def _further(
    trace: Trace, group_by: GroupBy, host: Flags, frames: int
) -> tuple[Int64 | int, Sequence[str | tuple[str, ...]]]:
    """Return the key that distinguishes groups of one name: an index for each event, and its table."""
    if group_by == "shape":
        table: dict[str, int] = {}
        numbers = [table.setdefault(_shapes(text), len(table)) for text in trace.shapes]
        return np.array(numbers, dtype=np.int64)[trace.shape], list(table)
    if group_by == "stack":
        return Callers(trace, host).stacks(frames)
    if group_by == "module":
        return Callers(trace, host).modules()
    return 0, [""]


def _shapes(text: str) -> str:
    """Return ``Input Dims`` as torch's tables have them: a list of tensors has no dimensions there."""
    try:
        inputs = msgspec.json.decode(text or "[]", type=list[list[int | list[int]]])
    except msgspec.DecodeError:
        return text
    return str([[] if any(isinstance(size, list) for size in each) else each for each in inputs])


@dataclass(frozen=True, slots=True)
class MemorySteps:
    """The allocator's work in each step, in bytes; columns as long as there are steps.

    Attributes:
        host_allocated: All allocations on the host, freed again or not.
        host_peak: The most allocated on the host at once, above the level when recording began.
        device_allocated: As ``host_allocated``, on devices.
        device_peak: As ``host_peak``, on devices.
    """

    host_allocated: Int64
    host_peak: Int64
    device_allocated: Int64
    device_peak: Int64


@dataclass(frozen=True, slots=True)
class Samples:
    """One trace by step; a trace without steps counts as one step, from its start to its end."""

    operators: OperatorSteps
    memory: MemorySteps | None


def sample(trace: Trace, found: Sequence[Step], links: Links) -> Samples:
    """Return the values of each step.

    A call counts to the step that the host was in when it began, on any thread. A device event counts to the
    step that launched it; if that is unknown, to the step in whose host time it began.
    """
    if not found:
        found = [Step(0, 0, trace.duration_ns + 1)]
    starts, ends = edges(found, host=True)
    step = np.searchsorted(starts, trace.start, side="right") - 1
    step[trace.start >= ends[step]] = -1
    memory = _memory(trace, starts, ends) if len(trace.memory.time) else None
    return Samples(operators_by_step(trace, step, links), memory)


def _memory(trace: Trace, starts: Int64, ends: Int64) -> MemorySteps:
    order = np.argsort(trace.memory.time, kind="stable")
    first, last = (np.searchsorted(trace.memory.time[order], each) for each in (starts, ends))
    columns: list[Int64] = []
    for kinds in (HOST_MEMORY, DEVICE_MEMORY):
        changes = np.where(np.isin(trace.memory.device_type, kinds), trace.memory.allocated, 0)[order]
        held, given = (np.concatenate(([0], np.cumsum(each))) for each in (changes, np.maximum(changes, 0)))
        spans = zip(first.tolist(), last.tolist(), strict=True)
        peaks = np.array([held[begin : end + 1].max() for begin, end in spans], dtype=np.int64)
        columns += [given[last] - given[first], peaks]
    return MemorySteps(*columns)
