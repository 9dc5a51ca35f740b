"""Sums over the calls of operators: own and inclusive time, and memory.

The rules are read from ``torch/autograd/profiler_util.py`` (``_populate_cpu_children``,
``_remove_dup_nodes``) and ``_parse_kineto_results``.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from torchperfd_daemon.analysis.links import Links
from torchperfd_daemon.analysis.nesting import Nesting, nest
from torchperfd_daemon.analysis.operator_memory import memory_during
from torchperfd_daemon.analysis.operator_rows import ON_DEVICE
from torchperfd_daemon.analysis.trace import Flags, Int64, Trace

_ANNOTATION: Final = "user_annotation"
# c10d's Work objects open a span on one thread and close it on another. torch marks such spans as
# asynchronous, outside all nesting and without self time; the trace shows them only by their name. torch
# treats spans that were never closed as asynchronous too.
ASYNC_PREFIXES: Final = ("gloo:", "nccl:", "mpi:", "ucc:", "xccl:")


class OperatorSums:
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


def sum_calls(trace: Trace, group: Int64, host: Flags, links: Links) -> OperatorSums:
    """Add up the calls in ``host`` and the device events, by each event's group."""
    asynchronous = trace.unfinished | (
        trace.of_categories({_ANNOTATION}) & trace.of_names(lambda name: name.startswith(ASYNC_PREFIXES))
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
    names, has_parent = trace.name[calls.row], calls.parent >= 0
    steps = trace.of_names(lambda name: name.startswith("ProfilerStep#"))[calls.row]
    children = np.bincount(calls.parent[has_parent], minlength=len(calls))
    parent = np.where(has_parent, calls.parent, 0)
    alike = (names == names[parent]) | (steps & steps[parent])
    folded = np.flatnonzero(has_parent & alike & (children[parent] == 1))
    survivor = np.arange(len(calls))
    survivor[folded] = calls.parent[folded]
    while not np.array_equal(survivor[survivor], survivor):
        survivor = survivor[survivor]
    device = _launched_by(trace, calls.row, links)
    # Parents come first, so of a chain of merged calls the innermost one's kernels are the last to stay.
    device[survivor[folded]] = device[folded]
    device[folded] = 0
    kept = survivor == np.arange(len(calls))
    parent = np.where(has_parent, survivor[parent], -1)[kept]
    running = np.concatenate(([0], np.cumsum(device)))

    def own(totals: Int64) -> Int64:
        """Subtract from each call the values of its children."""
        outer = np.zeros(len(calls), dtype=np.int64)
        outer[kept] = totals
        np.subtract.at(outer, parent[parent >= 0], totals[parent >= 0])
        own: Int64 = outer[kept]
        return own

    rows = calls.row[kept]
    spans = trace.end[rows] - trace.start[rows]
    host_memory, device_memory = memory_during(trace, rows)
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
