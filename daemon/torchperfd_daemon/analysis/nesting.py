"""Nests the calls of each thread: each is under the innermost one that contains it."""

from array import array
from dataclasses import dataclass
from typing import Final

import numpy as np

from torchperfd_daemon.analysis.trace import Int64, Trace

# Columns become Python integers this many at a time: all at once they would outweigh the trace.
_SLICE: Final = 1 << 15


@dataclass(frozen=True, slots=True)
class Nesting:
    """Calls as parallel columns, thread after thread, a parent before its children.

    Attributes:
        row: Each call's row in the trace.
        parent: The position of its parent in these columns, -1 for none.
        stop: The position after its last descendant.
    """

    row: Int64
    parent: Int64
    stop: Int64

    def __len__(self) -> int:
        return len(self.row)


def nest(trace: Trace, rows: Int64) -> Nesting:
    """Nest the calls in ``rows``, in order of (start, -end) on each thread, ties as in the file.

    A call that outlasts an open one closes it: torch gives no parent to calls that overlap without
    containment.
    """
    rows = rows[np.lexsort((-trace.end[rows], trace.start[rows], trace.thread[rows]))]
    starts, ends = trace.start[rows], trace.end[rows]
    edges = np.flatnonzero(np.diff(trace.thread[rows])) + 1
    parent, stop = array("q", bytes(8 * len(rows))), array("q", bytes(8 * len(rows)))
    for first, last in zip([0, *edges.tolist()], [*edges.tolist(), len(rows)], strict=True):
        _nest_thread(starts, ends, first, last, parent, stop)
    return Nesting(rows, np.frombuffer(parent, np.int64), np.frombuffer(stop, np.int64))


def _nest_thread(
    starts: Int64, ends: Int64, first: int, last: int, parent: "array[int]", stop: "array[int]"
) -> None:
    """Fill ``parent`` and ``stop`` for the calls of one thread."""
    open_calls: list[int] = []
    open_ends: list[int] = []
    for begin in range(first, last, _SLICE):
        until = min(begin + _SLICE, last)
        calls = zip(starts[begin:until].tolist(), ends[begin:until].tolist(), strict=True)
        for call, (start, end) in enumerate(calls, begin):
            while open_ends and (start >= open_ends[-1] or end > open_ends[-1]):
                open_ends.pop()
                stop[open_calls.pop()] = call
            parent[call] = open_calls[-1] if open_calls else -1
            open_calls.append(call)
            open_ends.append(end)
    for call in open_calls:
        stop[call] = last
