"""When the last gradient of a backward of ``DistributedDataParallel`` was ready."""

import time
import weakref
from typing import Any

Pending = dict[int, tuple["weakref.ref[Any]", int, int]]
"""Reducers that are prepared for a backward, by id: the reducer, and from when to when that took (ns)."""


class GradientTimes:
    """Reads from reducers when each of their gradients was ready.

    A reducer notes this by itself, in nanoseconds since it was prepared for the backward. From the last
    gradient on, the backward waits for the other ranks.
    """

    def __init__(self) -> None:
        # References without callbacks: Python drops what a signal handler raises within one.
        self._pending: Pending = {}
        # How late each gradient was in the newest backward. No two backwards agree in all of them, to the
        # nanosecond: where a reducer repeats them, it had no part in the backward.
        self._newest: dict[int, tuple[weakref.ref[Any], list[int]]] = {}

    @property
    def remembered_count(self) -> int:
        """The number of reducers whose newest times are kept."""
        return len(self._newest)

    @property
    def are_expected(self) -> bool:
        """Whether a reducer is prepared for a backward that has not begun."""
        return bool(self._pending)

    def note_prepared(self, reducer: Any, began_ns: int) -> None:
        """Note that a reducer has been prepared, and began to count, between ``began_ns`` and now."""
        self._pending[id(reducer)] = weakref.ref(reducer), began_ns, time.perf_counter_ns()

    def take_pending(self) -> Pending:
        """Return the reducers that are prepared. A backward within the backward then finds none."""
        pending, self._pending = self._pending, {}
        return pending

    def last_ready(self, pending: Pending, began_ns: int) -> int | None:
        """Return when the last gradient of a backward was ready, in ns; None if no reducer took part in it.

        Args:
            pending: The reducers that were prepared before it. Those of other models, whose backward is yet
                to come, are pending again afterwards.
            began_ns: When the backward began.
        """
        last = None
        for own, (reference, earliest, latest) in pending.items():
            reducer = reference()
            if reducer is None:
                continue
            times = reducer.get_backward_stats()
            known, newest = self._newest.get(own, (None, []))
            if times and times == (newest if known is not None and known() is reducer else [0] * len(times)):
                self._pending.setdefault(own, (reference, earliest, latest))
                continue
            self._newest = {other: seen for other, seen in self._newest.items() if seen[0]() is not None}
            self._newest[own] = reference, times
            if times and latest + max(times) >= began_ns:
                last = max(earliest + max(times), began_ns, last or 0)
        return last
