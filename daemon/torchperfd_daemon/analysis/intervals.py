"""Unions of time intervals, exact in integer nanoseconds."""

import numpy as np

from torchperfd_daemon.analysis.trace import Int64


class Cover:
    """The union of intervals.

    Args:
        start: Their starts in ns, in any order.
        end: Their ends, none before its start.
    """

    def __init__(self, start: Int64, end: Int64) -> None:
        order = np.argsort(start, kind="stable")
        self._start, self._end = start[order], end[order]
        if len(order):
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
