"""Pauses of Python's garbage collector: whatever thread runs it, training waits."""

import gc
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import itemgetter, setitem
from typing import Any, Final, NamedTuple

GENERATIONS: Final = 3
_RECENT: Final = 2048
_UNREAD: Final = 16_384
"""A thousand collections per second, over the longest time between two flushes."""


class Pause(NamedTuple):
    """One collection; nanoseconds of the monotonic clock."""

    generation: int
    start_ns: int
    end_ns: int


class _OnStart(map):  # type: ignore[type-arg]
    """Goes one on when the attribute of this name is read, without running any Python code."""

    start = property(next)


class _OnStop(map):  # type: ignore[type-arg]
    """The same with the other name."""

    stop = property(next)


class GcPauses:
    """Counts collections and what they took, by generation. Fixed memory.

    What a callback of the collector raises is lost: Python prints it and goes on. A signal handler of the
    script runs between any two instructions of Python code, so there is none in these callbacks. They are
    built-in functions put together. The collector calls each with a phase and a dict. Then
    ``setitem(newest, phase, dict)`` keeps the dict, and ``getattr(iterator, phase, dict)`` appends the time
    to what :meth:`update` reads.

    Attributes:
        calls: Collections since :meth:`install`, by generation, as of the last :meth:`update`.
        ns: Nanoseconds that they took.
        callbacks: The entries for ``gc.callbacks``, in their order.
        recent: The newest of them, in the order of time, for the one reader that takes them out.
    """

    __slots__ = ("_starts", "_stops", "callbacks", "calls", "ns", "recent")

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.calls = [0] * GENERATIONS
        self.ns = [0] * GENERATIONS
        self.recent: deque[Pause] = deque(maxlen=_RECENT)
        self._starts: deque[int] = deque(maxlen=_UNREAD)
        self._stops: deque[tuple[int, int]] = deque(maxlen=_UNREAD)
        newest: dict[str, dict[str, int]] = {}
        generation: Callable[[Any], int] = itemgetter("generation")
        generations = map(generation, iter(partial(newest.get, "stop"), 0))
        moments = zip(iter(clock, None), generations, strict=False)
        self.callbacks: tuple[Callable[[str, dict[str, int]], object], ...] = (
            partial(getattr, _OnStart(self._starts.append, iter(clock, None))),
            partial(setitem, newest),
            partial(getattr, _OnStop(self._stops.append, moments)),
        )

    def install(self) -> None:
        """Begin to count."""
        gc.callbacks.extend(callback for callback in self.callbacks if callback not in gc.callbacks)

    def uninstall(self) -> None:
        """Stop counting."""
        for callback in self.callbacks:
            if callback in gc.callbacks:
                gc.callbacks.remove(callback)

    def update(self) -> None:
        """Count the collections that have ended since the last call; on one thread at a time."""
        while self._stops:
            end, generation = self._stops.popleft()
            start = 0
            while self._starts and self._starts[0] <= end:
                start = self._starts.popleft()
            if start:
                self.ns[generation] += end - start
                self.calls[generation] += 1
                self.recent.append(Pause(generation, start, end))
