"""Finds what happened to single steps: another process had the CPU, or the profiler waited for memory.

Steps of one loop make the same calls. So each place of a step, between two neighbouring begins or ends of
operators, has its like in the other steps. Where it takes far longer than in half of them, the rest of the
time has another cause than the loop. Such times are in the mean step, but not in most calls: without them the
cost of recording a call is the mean step's excess, divided by the calls.
"""

from typing import Final

import numpy as np

from torchperfd_daemon.analysis.intervals import Cover
from torchperfd_daemon.analysis.trace import Int64, Trace

# A place is disturbed if it takes this much longer than in half of the steps, and so many times as long.
_LONGER_NS: Final = 20_000
_TIMES: Final = 2
# With fewer steps no time of a place is the usual one.
_MIN_STEPS: Final = 3


def find_disturbances(trace: Trace, rows: Int64, starts: Int64) -> Cover:
    """Return the time by which places of a step take far longer than in half of the steps.

    A place is known by the operators around it, and by how often the two came before in its step.

    Args:
        rows: The operators in the steps, of which those of the busiest thread count.
        starts: When each step begins, in ns, in order.
    """
    rows = rows[trace.thread[rows] == trace.busiest_thread(rows)]
    if not len(rows) or len(starts) < _MIN_STEPS:
        return Cover(starts[:0], starts[:0])
    moments = np.concatenate((trace.start[rows], trace.end[rows]))
    edges = np.concatenate((trace.name[rows], trace.name[rows] + len(trace.names))).astype(np.int64)
    order = np.argsort(moments, kind="stable")
    moments, edges = moments[order], edges[order]
    begin, lasted = moments[:-1], np.diff(moments)
    step = np.searchsorted(starts, begin, side="right") - 1
    pairs = 4 * len(trace.names) ** 2
    pair = edges[:-1] * 2 * len(trace.names) + edges[1:]
    order, first, sizes = _groups(np.argsort(step * pairs + pair, kind="stable"), step * pairs + pair)
    before = np.empty(len(pair), dtype=np.int64)
    before[order] = np.arange(len(pair)) - np.repeat(first, sizes)
    order, first, sizes = _groups(np.lexsort((lasted, before * pairs + pair)), before * pairs + pair)
    usual, count = np.empty_like(lasted), np.empty_like(lasted)
    usual[order] = np.repeat(lasted[order[first + (sizes - 1) // 2]], sizes)
    count[order] = np.repeat(sizes, sizes)
    disturbed = (lasted - usual >= _LONGER_NS) & (lasted >= _TIMES * usual) & (count >= _MIN_STEPS)
    return Cover((begin + usual)[disturbed], (begin + lasted)[disturbed])


def _groups(order: Int64, keys: Int64) -> tuple[Int64, Int64, Int64]:
    """Return an order in which equal keys are neighbours, where each group begins in it, and its size."""
    first = np.flatnonzero(np.diff(keys[order], prepend=-1))
    return order, first, np.diff(np.append(first, len(keys)))
