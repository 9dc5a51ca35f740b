"""Checkpoints that are saved beside the steps, by another thread than the one that trains."""

import time
from collections import deque
from collections.abc import Callable
from itertools import count


class BackgroundSaves:
    """Counts saves in the background, and for how long at least one was under way; no lock.

    :meth:`begin` and :meth:`end` may be called on any thread, everything else belongs to one.

    Attributes:
        calls: How often one has begun while no other was under way: a save may use several threads.
        training_waits: Whether the training thread waits for a save of its own.
    """

    __slots__ = ("_clock", "_ended", "_ids", "_ns", "_open", "_until", "calls", "training_waits")

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.calls = 0
        self.training_waits = False
        self._clock = clock
        self._ids = count(1)
        # By id, when a save began; and from when to when those took that have ended since the last look.
        self._open: dict[int, int] = {}
        self._ended: deque[tuple[int, int, int]] = deque()
        self._ns = 0
        self._until = 0

    def begin(self) -> int:
        """A save begins; return its id."""
        save = next(self._ids)
        self.calls += not self._open
        self._open[save] = self._clock()
        return save

    def end(self, save: int) -> None:
        """A save has ended; a second call has no effect."""
        began = self._open.get(save)
        if began is not None:
            # In this order, and looked at in the other: a save that ends meanwhile is never in neither.
            self._ended.append((save, began, self._clock()))
            self._open.pop(save, None)

    def ns(self) -> int:
        """Return for how many nanoseconds at least one save was under way until now."""
        now = self._clock()
        intervals = {save: (began, now) for save, began in [*self._open.items()]}
        while self._ended:
            save, began, ended = self._ended.popleft()
            intervals[save] = began, ended
        for began, ended in sorted(intervals.values()):
            self._ns += max(0, ended - max(began, self._until))
            self._until = max(self._until, ended)
        return self._ns
