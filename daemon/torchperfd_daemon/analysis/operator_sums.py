"""Rows of the operator table, and sums over the calls of operators: own and inclusive time, and memory.

The rules are read from ``torch/autograd/profiler_util.py`` (``_populate_cpu_children``,
``_remove_dup_nodes``) and ``_parse_kineto_results``.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from torchperfd_daemon.analysis.callers import Links
from torchperfd_daemon.analysis.categories import ANNOTATION, DEVICE, GPU_ANNOTATION, STEP_MARK
from torchperfd_daemon.analysis.intervals import Cover, Nesting, nest
from torchperfd_daemon.analysis.trace import Flags, Int64, Trace

# Device events are rows of their own too, in torch's table and in this one.
ON_DEVICE: Final = DEVICE | {GPU_ANNOTATION}


@dataclass(frozen=True, slots=True)
class Operator:
    """One row, over all calls of one group. Times in ns, memory in bytes.

    Attributes:
        name: The operator; every ``ProfilerStep#N`` counts as ``ProfilerStep*``.
        category: Kineto's category, such as ``cpu_op``, ``user_annotation`` or ``kernel``.
        self_cpu_ns: Host time outside its children. Negative where children on record outlast it.
        total_cpu_ns: Host time, children included.
        self_device_ns: Time of the kernels, copies and fills it launched itself.
        self_cpu_memory: Host memory allocated less freed while it ran, outside its children.
        self_device_memory: As ``self_cpu_memory``, on the device.
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
        row: The row of each cell, an index into ``names``.
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


# torch's numbers for the kinds of device that memory is on.
HOST_MEMORY: Final = (0, 2, 5)
DEVICE_MEMORY: Final = (1, 6, 12, 20)
_MEMORY: Final = "[memory]"


def memory_during(trace: Trace, rows: Int64) -> tuple[Int64, Int64]:
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


def memory_outside(trace: Trace, rows: Int64) -> list[Operator]:
    """Return torch's row for the memory allocated and freed while none of ``rows`` ran, if there was any."""
    memory = trace.memory
    outside = ~Cover(trace.start[rows], trace.end[rows] + 1).contains(memory.time)
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


# c10d's Work objects open a span on one thread and close it on another. torch marks such spans as
# asynchronous, outside all nesting and without self time; the trace shows them only by their name. torch
# treats spans that were never closed as asynchronous too.
ASYNC_PREFIXES: Final = ("gloo:", "nccl:", "mpi:", "ucc:", "xccl:")


class OperatorSums:
    """Adds up columns by group."""

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


def sum_calls(trace: Trace, group: Int64, host: Flags, links: Links) -> OperatorSums:
    """Add up the calls in ``host`` and the device events, by each event's group."""
    asynchronous = trace.unfinished | (
        trace.of_categories({ANNOTATION}) & trace.of_names(lambda name: name.startswith(ASYNC_PREFIXES))
    )
    sums = OperatorSums(group)
    _add_calls(sums, trace, nest(trace, np.flatnonzero(host & ~asynchronous)), links)
    rows = np.flatnonzero(host & asynchronous)
    host_memory, device_memory = memory_during(trace, rows)
    spans = trace.end[rows] - trace.start[rows]
    sums.add(rows, total_cpu_ns=spans, total_cpu_memory=host_memory, total_device_memory=device_memory)
    rows = np.flatnonzero(trace.of_categories(ON_DEVICE))
    spans = trace.end[rows] - trace.start[rows]
    sums.add(rows, self_device_ns=spans, total_device_ns=spans)
    return sums


def _add_calls(sums: OperatorSums, trace: Trace, calls: Nesting, links: Links) -> None:
    """Add the nested calls; an only child with its parent's name is merged into the parent.

    torch merges these because a redispatched operator records itself again: the parent takes over the
    child's children, and the child's kernels in place of its own.
    """
    folded = _folded(trace, calls)
    survivor = np.arange(len(calls))
    survivor[folded] = calls.parent[folded]
    while not np.array_equal(further := survivor[survivor[folded]], survivor[folded]):
        survivor[folded] = further
    device = _launched_by(trace, calls.row, links)
    # Parents come first, so of a chain of merged calls the innermost one's kernels are the last to stay.
    device[survivor[folded]] = device[folded]
    device[folded] = 0
    kept = np.ones(len(calls), dtype=np.bool_)
    kept[folded] = False
    inner = np.flatnonzero((calls.parent >= 0)[kept])
    around = (np.cumsum(kept) - 1)[survivor[calls.parent[kept][inner]]]

    def own(totals: Int64) -> Int64:
        """Subtract from each call the values of its children."""
        own = totals.copy()
        np.subtract.at(own, around, totals[inner])
        return own

    rows = calls.row[kept]
    spans = trace.end[rows] - trace.start[rows]
    columns = {"self_cpu_ns": own(spans), "total_cpu_ns": spans, "self_device_ns": device[kept]}
    running = np.concatenate(([0], np.cumsum(device)))
    columns["total_device_ns"] = running[calls.stop[kept]] - running[:-1][kept]
    if len(trace.memory.time):
        host, device = memory_during(trace, rows)
        columns |= {"self_cpu_memory": own(host), "total_cpu_memory": host}
        columns |= {"self_device_memory": own(device), "total_device_memory": device}
    sums.add(rows, **columns)


def _folded(trace: Trace, calls: Nesting) -> Int64:
    """Return the positions of the only children that have their parents' names."""
    inner = np.flatnonzero(calls.parent >= 0)
    parent = calls.parent[inner]
    alone = np.bincount(parent, minlength=len(calls))[parent] == 1
    inner, parent = inner[alone], parent[alone]
    names = trace.name[calls.row]
    is_step = np.fromiter((name.startswith(STEP_MARK) for name in trace.names), np.bool_)
    own, around = names[inner], names[parent]
    folded: Int64 = inner[(own == around) | (is_step[own] & is_step[around])]
    return folded


def _launched_by(trace: Trace, rows: Int64, links: Links) -> Int64:
    launched = np.zeros(len(trace), dtype=np.int64)
    known = links.operator >= 0
    events = links.event[known]
    np.add.at(launched, links.operator[known], trace.end[events] - trace.start[events])
    return launched[rows]
