"""The operator table: how often each operator ran, its own and inclusive time, and its memory.

The numbers are those of ``torch.profiler``'s ``key_averages()``, to the nanosecond and byte; the rules are
read from ``torch/autograd/profiler_util.py`` (``_populate_cpu_children``, ``_remove_dup_nodes``) and
``_parse_kineto_results``.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import msgspec
import numpy as np

from torchperfd_daemon.analysis.breakdown import DEVICE
from torchperfd_daemon.analysis.callers import PYTHON, Callers
from torchperfd_daemon.analysis.links import Links, find_links
from torchperfd_daemon.analysis.nesting import Nesting, nest
from torchperfd_daemon.analysis.trace import Flags, Int64, Trace

GroupBy = Literal["name", "shape", "stack", "module"]
GROUPS: Final[tuple[GroupBy, ...]] = get_args(GroupBy)
_FIELDS: Final[dict[GroupBy, str]] = {"shape": "shapes", "stack": "stack", "module": "module"}
_ANNOTATION: Final = "user_annotation"
_HOST: Final = frozenset(
    {
        "cpu_op",
        _ANNOTATION,
        "overhead",
        "cuda_runtime",
        "cuda_driver",
        "hip_runtime",
        "hip_driver",
        "xpu_runtime",
        "xpu_driver",
        "mtia_runtime",
        "privateuse1_runtime",
        "privateuse1_driver",
    }
)
# What ran on a device is a row of its own too, in torch's table and in this one.
ON_DEVICE: Final = DEVICE | {"gpu_user_annotation"}
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
# c10d's Work objects open a span on one thread and close it on another. torch marks such spans as
# asynchronous, outside all nesting and without self time; the trace shows them only by their name. What was
# never closed torch takes for asynchronous too.
ASYNC_PREFIXES: Final = ("gloo:", "nccl:", "mpi:", "ucc:", "xccl:")
# torch's numbers for the kinds of device that memory is on.
HOST_MEMORY: Final = (0, 2, 5)
DEVICE_MEMORY: Final = (1, 6, 12, 20)
_MEMORY: Final = "[memory]"
# Frames that a table by stack tells apart, as a default.
_FRAMES: Final = 5


@dataclass(frozen=True, slots=True)
class Operator:
    """One row, over all calls of one group. Times in ns, memory in bytes.

    Attributes:
        name: The operator; every ``ProfilerStep#N`` counts as ``ProfilerStep*``.
        category: Kineto's category, such as ``cpu_op``, ``user_annotation`` or ``kernel``.
        calls: How often it ran.
        self_cpu_ns: Host time outside its children. Negative where children on record outlast it.
        total_cpu_ns: Host time, children included.
        self_device_ns: Time of the kernels, copies and fills it launched itself.
        total_device_ns: The same, children included.
        self_cpu_memory: Host memory allocated less freed while it ran, outside its children.
        total_cpu_memory: The same, children included.
        self_device_memory: As ``self_cpu_memory``, on the device.
        total_device_memory: The same, children included.
        shapes: Its inputs' shapes, in a table by shape; a list of tensors is ``[]``, as in torch.
        stack: The Python frames that called it, innermost first, in a table by stack.
        module: The innermost ``nn.Module`` that called it, in a table by module.
    """

    name: str
    category: str
    calls: int
    self_cpu_ns: int
    total_cpu_ns: int
    self_device_ns: int = 0
    total_device_ns: int = 0
    self_cpu_memory: int = 0
    total_cpu_memory: int = 0
    self_device_memory: int = 0
    total_device_memory: int = 0
    shapes: str = ""
    stack: tuple[str, ...] = ()
    module: str = ""


@dataclass(frozen=True, slots=True)
class OperatorSteps:
    """The operator table by name, taken apart by step; only the steps in which a row was called.

    Attributes:
        names: The name of each row.
        categories: Its category, as in `Operator`.
        row: The row of each cell, an index into ``names``.
        step: The step of each cell.
        calls: How often the row was called in that step.
        self_cpu_ns: Its host time outside its children.
        self_device_ns: Time of the kernels, copies and fills it launched itself, or was.
    """

    names: tuple[str, ...]
    categories: tuple[str, ...]
    row: Int64
    step: Int64
    calls: Int64
    self_cpu_ns: Int64
    self_device_ns: Int64


# Torch's names for the columns that a table can be sorted by, and how large a row is there.
SORT_KEYS: Final[dict[str, Callable[[Operator], float]]] = {
    "self_cpu_time_total": lambda row: row.self_cpu_ns,
    "cpu_time_total": lambda row: row.total_cpu_ns,
    "cpu_time": lambda row: row.total_cpu_ns / row.calls,
    "self_device_time_total": lambda row: row.self_device_ns,
    "device_time_total": lambda row: row.total_device_ns,
    "device_time": lambda row: row.total_device_ns / row.calls,
    "self_cpu_memory_usage": lambda row: row.self_cpu_memory,
    "cpu_memory_usage": lambda row: row.total_cpu_memory,
    "self_device_memory_usage": lambda row: row.self_device_memory,
    "device_memory_usage": lambda row: row.total_device_memory,
    "count": lambda row: row.calls,
}


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
        trace: The loaded trace.
        group_by: What calls of one name must share to be one row: nothing more, their input shapes
            (``record_shapes=True``), their Python stack or their module (both ``with_stack=True``).
        python_functions: Whether Python frames are rows and parents, as in torch's own table, or are
            left out so that self time stays with the operators.
        frames: How many frames of a stack count, from the innermost.
        links: What launched the trace's device events, if that has been found before.
    """
    host = _on_host(trace)
    key, labels = _groups(trace, group_by, host, frames)
    if python_functions:
        host |= trace.of_categories({PYTHON})
    sums = _sums(trace, key, host, links or find_links(trace))
    table = [Operator(**labels(group), **values) for group, values in sums.rows()]
    table += _memory_outside(trace, np.flatnonzero(host))
    return sorted(table, key=lambda row: (-row.self_cpu_ns, row.name, row.category))


def operators_by_step(trace: Trace, step: Int64, links: Links) -> OperatorSteps:
    """Return the operator table by name, taken apart by step.

    Args:
        trace: The loaded trace.
        step: For each event of the trace the step that it ran in, numbered from 0; -1 for none, which leaves
            it out. What the host launched counts to the step of the launch, whenever it ran.
        links: What launched the trace's device events.
    """
    host = _on_host(trace)
    key, labels = _groups(trace, "name", host, 0)
    step = _of_launcher(step, links)
    steps = int(step.max()) + 2
    cells, cell = np.unique(key * steps + step + 1, return_inverse=True)
    sums = _sums(trace, cell, host, links)
    group, place = np.divmod(cells, steps)
    wanted = (sums["calls"] > 0) & (place > 0)
    groups, row = np.unique(group[wanted], return_inverse=True)
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
    return trace.of_categories(_HOST) & ~_named(trace, lambda name: name in _HIDDEN)


def _sums(trace: Trace, group: Int64, host: Flags, links: Links) -> "_Sums":
    """Add up the calls in ``host`` and what ran on a device, by each event's group."""
    asynchronous = trace.unfinished | (
        trace.of_categories({_ANNOTATION}) & _named(trace, lambda name: name.startswith(ASYNC_PREFIXES))
    )
    sums = _Sums(group)
    _add_calls(sums, trace, nest(trace, np.flatnonzero(host & ~asynchronous)), links)
    rows = np.flatnonzero(host & asynchronous)
    host_memory, device_memory = _memory_during(trace, rows)
    spans = trace.end[rows] - trace.start[rows]
    sums.add(rows, total_cpu_ns=spans, total_cpu_memory=host_memory, total_device_memory=device_memory)
    rows = np.flatnonzero(trace.of_categories(ON_DEVICE))
    spans = trace.end[rows] - trace.start[rows]
    sums.add(rows, self_device_ns=spans, total_device_ns=spans)
    return sums


class _Sums:
    """Adds up columns by group.

    Args:
        group: The group of each event of the trace, numbered from 0.
    """

    def __init__(self, group: Int64) -> None:
        self._group = group
        self._totals: defaultdict[str, Int64] = defaultdict(
            lambda: np.zeros(int(group.max()) + 1, dtype=np.int64)
        )

    def add(self, rows: Int64, **columns: Int64) -> None:
        """Add the calls in ``rows``, each with its values in ``columns``."""
        groups = self._group[rows]
        self._totals["calls"] += np.bincount(groups, minlength=len(self._totals["calls"]))
        for name, values in columns.items():
            np.add.at(self._totals[name], groups, values)

    def __getitem__(self, column: str) -> Int64:
        return self._totals[column]

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each group that has calls, with its sums."""
        for group in np.flatnonzero(self._totals["calls"]).tolist():
            yield group, {name: int(totals[group]) for name, totals in self._totals.items()}


def _groups(
    trace: Trace, group_by: GroupBy, host: Flags, frames: int
) -> tuple[Int64, Callable[[int], dict[str, Any]]]:
    """Return each event's group, and what says which fields of `Operator` its calls share."""
    steps = [name for name, text in enumerate(trace.names) if text.startswith("ProfilerStep#")]
    renamed = np.arange(len(trace.names), dtype=np.int64)
    renamed[steps] = steps[0] if steps else 0
    further, table = _further(trace, group_by, host, frames)
    of_one_name = renamed[trace.name] * len(trace.categories) + trace.category
    keys, group = np.unique(of_one_name * len(table) + further, return_inverse=True)

    def label(group: int) -> dict[str, Any]:
        key, part = divmod(int(keys[group]), len(table))
        name, category = divmod(key, len(trace.categories))
        text = "ProfilerStep*" if name in steps[:1] else trace.names[name]
        row: dict[str, Any] = {"name": text, "category": trace.categories[category]}
        return row if group_by == "name" else row | {_FIELDS[group_by]: table[part]}

    return group, label


def _further(
    trace: Trace, group_by: GroupBy, host: Flags, frames: int
) -> tuple[Int64 | int, Sequence[str | tuple[str, ...]]]:
    """Return what tells groups of one name apart: an index for each event, and its table."""
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


def _add_calls(sums: _Sums, trace: Trace, calls: Nesting, links: Links) -> None:
    """Add the nested calls, an only child with its parent's name folded into the parent.

    torch folds so because a redispatched operator records itself again: the parent takes over the
    child's children, and the child's kernels in place of its own.
    """
    names, has_parent = trace.name[calls.row], calls.parent >= 0
    steps = _named(trace, lambda name: name.startswith("ProfilerStep#"))[calls.row]
    children = np.bincount(calls.parent[has_parent], minlength=len(calls))
    parent = np.where(has_parent, calls.parent, 0)
    alike = (names == names[parent]) | (steps & steps[parent])
    folded = np.flatnonzero(has_parent & alike & (children[parent] == 1))
    survivor = np.arange(len(calls))
    survivor[folded] = calls.parent[folded]
    while not np.array_equal(survivor[survivor], survivor):
        survivor = survivor[survivor]
    device = _launched_by(trace, calls.row, links)
    # Parents come first, so of a chain of folded calls the innermost one's kernels are the last to stay.
    device[survivor[folded]] = device[folded]
    device[folded] = 0
    kept = survivor == np.arange(len(calls))
    parent = np.where(has_parent, survivor[parent], -1)[kept]
    running = np.concatenate(([0], np.cumsum(device)))

    def own(totals: Int64) -> Int64:
        """Take from each call what its children have."""
        outer = np.zeros(len(calls), dtype=np.int64)
        outer[kept] = totals
        np.subtract.at(outer, parent[parent >= 0], totals[parent >= 0])
        own: Int64 = outer[kept]
        return own

    rows = calls.row[kept]
    spans = trace.end[rows] - trace.start[rows]
    host_memory, device_memory = _memory_during(trace, rows)
    sums.add(
        rows,
        self_cpu_ns=own(spans),
        total_cpu_ns=spans,
        self_device_ns=device[kept],
        total_device_ns=running[calls.stop[kept]] - running[:-1][kept],
        self_cpu_memory=own(host_memory),
        total_cpu_memory=host_memory,
        self_device_memory=own(device_memory),
        total_device_memory=device_memory,
    )


def _launched_by(trace: Trace, rows: Int64, links: Links) -> Int64:
    """Return the device time that each call launched itself."""
    launched = np.zeros(len(trace), dtype=np.int64)
    known = links.operator >= 0
    events = links.event[known]
    np.add.at(launched, links.operator[known], trace.end[events] - trace.start[events])
    return launched[rows]


def _memory_during(trace: Trace, rows: Int64) -> tuple[Int64, Int64]:
    """Return the host's and the device's bytes allocated less freed during each event, on any thread.

    As in torch, both ends of an event belong to it.
    """
    memory = trace.memory
    if not len(memory.time):
        return np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
    order = np.argsort(memory.time, kind="stable")
    times = memory.time[order]
    first = np.searchsorted(times, trace.start[rows], side="left")
    last = np.searchsorted(times, trace.end[rows], side="right")
    columns = []
    for kinds in (HOST_MEMORY, DEVICE_MEMORY):
        of_kind = np.where(np.isin(memory.device_type, kinds), memory.allocated, 0)[order]
        running = np.concatenate(([0], np.cumsum(of_kind)))
        columns.append(running[last] - running[first])
    return columns[0], columns[1]


def _memory_outside(trace: Trace, rows: Int64) -> list[Operator]:
    """Return torch's row for what was allocated and freed while none of ``rows`` ran, if anything was."""
    memory = trace.memory
    order = np.argsort(trace.start[rows], kind="stable")
    starts, reached = trace.start[rows][order], np.maximum.accumulate(trace.end[rows][order])
    begun = np.searchsorted(starts, memory.time, side="right")
    outside = begun == 0
    outside[~outside] = reached[begun[~outside] - 1] < memory.time[~outside]
    if not outside.any():
        return []
    host, device = (
        int(memory.allocated[outside & np.isin(memory.device_type, kinds)].sum())
        for kinds in (HOST_MEMORY, DEVICE_MEMORY)
    )
    return [
        Operator(
            _MEMORY,
            "cpu_instant_event",
            calls=int(outside.sum()),
            self_cpu_ns=0,
            total_cpu_ns=0,
            self_cpu_memory=host,
            total_cpu_memory=host,
            self_device_memory=device,
            total_device_memory=device,
        )
    ]


def _named(trace: Trace, wanted: Callable[[str], bool]) -> Flags:
    """Return which events have a wanted name."""
    return np.fromiter(map(wanted, trace.names), np.bool_)[trace.name]
