"""Many spans of time on one thread: which is the innermost at a moment, which are the outermost."""

import numpy as np

from torchperfd_daemon.analysis.trace import Int64, Trace


class Spans:
    """Spans that may lie within, beside or across each other; each is open from its start to before its end.

    Args:
        start: Their starts in ns, in any order.
        end: Their ends, none before its start.
    """

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
