"""Intervals of time in integer nanoseconds: their unions, the innermost one at a moment, and nested calls."""

from array import array
from dataclasses import dataclass
from typing import Final

import numpy as np

from torchperfd_daemon.analysis.native_batches import NATIVE
from torchperfd_daemon.analysis.trace import Flags, Int32, Int64, Trace


class Cover:
    """The union of intervals in ns, given in any order."""

    def __init__(self, start: Int64, end: Int64) -> None:
        # Most are in order already, and to check that is far cheaper than to sort.
        if (start[1:] < start[:-1]).any():
            order = np.argsort(start, kind="stable")
            start, end = start[order], end[order]
        self._start, self._end = start, end
        if len(start):
            reached = np.maximum.accumulate(self._end)
            opens = np.concatenate(([True], self._start[1:] > reached[:-1]))
            self._start = self._start[opens]
            self._end = reached[np.concatenate((opens[1:], [True]))]
        self._before = np.concatenate(([0], np.cumsum(self._end - self._start)))

    def __or__(self, other: "Cover") -> "Cover":
        return Cover(np.concatenate((self._start, other._start)), np.concatenate((self._end, other._end)))

    @property
    def length(self) -> int:
        """All the time covered, in ns."""
        return int(self._before[-1])

    def contains(self, moments: Int64) -> Flags:
        last = np.searchsorted(self._start, moments, side="right") - 1
        contained: Flags = moments < np.append(self._end, np.iinfo(np.int64).min)[last]
        return contained

    def gaps(self, first: int, last: int) -> tuple[Int64, Int64]:
        """Return starts and ends of what is not covered between two moments, in ns."""
        begin, until = np.append(first, self._end), np.append(self._start, last)
        begin, until = np.maximum(begin, first), np.minimum(until, last)
        return begin[until > begin], until[until > begin]

    def moments_of(self, covered: Int64) -> Int64:
        """Return the moments by which so much time has been covered, in ns; each less than `length`."""
        last = np.searchsorted(self._before, covered, side="right") - 1
        moments: Int64 = self._start[last] + covered - self._before[last]
        return moments

    def up_to(self, moments: Int64) -> Int64:
        """Return the time covered before each moment, in ns."""
        covers = np.searchsorted(self._start, moments, side="right")
        if not len(self._start):
            return np.zeros_like(moments)
        last = np.maximum(covers - 1, 0)
        into = np.minimum(moments, self._end[last]) - self._start[last]
        return np.where(covers > 0, self._before[last] + into, 0)


class Spans:
    """Spans within, beside or across each other, in any order; each is open from its start, until its end."""

    def __init__(self, start: Int64, end: Int64) -> None:
        self._order = _by_start(start, end)
        self._start, self._end = start[self._order], end[self._order]
        self._outlasting = _outlasting(self._end)

    def innermost(self, moments: Int64) -> Int64:
        """Return for each moment the position of the span that began last of those open then, -1 for none.

        Of spans with one start it is the shortest, of equal spans the last.
        """
        found = np.searchsorted(self._start, moments, side="right") - 1
        climbing = np.flatnonzero(found >= 0)
        while len(climbing := climbing[self._end[found[climbing]] <= moments[climbing]]):
            # What lies in between has ended no later, so it is not open either.
            found[climbing] = self._outlasting[found[climbing]]
            climbing = climbing[found[climbing] >= 0]
        found[found >= 0] = self._order[found[found >= 0]]
        return found

    def first_ending_after(self, moments: Int64) -> Int64:
        """Return for each moment the position of the first span that ends after it, -1 for none."""
        if not len(self._order):
            return np.full(len(moments), -1, dtype=np.int64)
        found = np.searchsorted(np.maximum.accumulate(self._end), moments, side="right")
        return np.where(found < len(self._order), self._order[np.minimum(found, len(self._order) - 1)], -1)


class ByThread:
    """Rows of the trace that can be had thread by thread."""

    def __init__(self, trace: Trace, rows: Int64) -> None:
        self._rows = rows[np.argsort(trace.thread[rows], kind="stable")]
        self._threads = trace.thread[self._rows]

    def on(self, thread: int) -> Int64:
        """Return the rows that are on a thread."""
        first, last = np.searchsorted(self._threads, [thread, thread + 1])
        return self._rows[first:last]


def outermost(start: Int64, end: Int64) -> Int64:
    """Return the positions, in order of start, of the spans that begin when all earlier ones are over."""
    order = _by_start(start, end)
    reached = np.maximum.accumulate(end[order])
    return order[np.concatenate(([True], start[order][1:] >= reached[:-1]))[: len(order)]]


def _by_start(start: Int64, end: Int64) -> Int64:
    """Return the order of start; of spans with one start the longest comes first."""
    order = np.argsort(start, kind="stable")
    # One key is sorted by far faster than two, and two spans seldom start in one nanosecond.
    return np.lexsort((-end, start)) if (np.diff(start[order]) == 0).any() else order


def _outlasting(end: Int64) -> Int64:
    """Return for each span the nearest one before it that ends later, -1 for none."""
    shorter = np.concatenate(([False], end[1:] < np.maximum.accumulate(end)[:-1]))[: len(end)]
    nearest = np.where(shorter, np.arange(len(end)) - 1, -1)
    seeking = np.flatnonzero(shorter)
    while len(seeking := seeking[end[nearest[seeking]] <= end[seeking]]):
        # Each round skips what was skipped so far, so that siblings are passed in log rounds.
        nearest[seeking] = nearest[nearest[seeking]]
    return nearest


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
    threads = trace.thread[rows]
    if NATIVE is None:
        return Nesting(rows, *_nested(starts, ends, threads))
    parent, stop = np.empty(len(rows), dtype=np.int64), np.empty(len(rows), dtype=np.int64)
    NATIVE.nest(starts, ends, threads, parent, stop)
    return Nesting(rows, parent, stop)


def _nested(starts: Int64, ends: Int64, threads: Int32) -> tuple[Int64, Int64]:
    """Return the parents and stops of `Nesting`, as the C module does."""
    edges = np.flatnonzero(np.diff(threads)) + 1
    parent, stop = array("q", bytes(8 * len(starts))), array("q", bytes(8 * len(starts)))
    for first, last in zip([0, *edges.tolist()], [*edges.tolist(), len(starts)], strict=True):
        _nest_thread(starts, ends, first, last, parent, stop)
    return np.frombuffer(parent, np.int64), np.frombuffer(stop, np.int64)


def _nest_thread(
    starts: Int64, ends: Int64, first: int, last: int, parent: "array[int]", stop: "array[int]"
) -> None:
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
