"""Pauses of Python's garbage collector: whatever thread runs it, training waits."""

import gc
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

GENERATIONS: Final = 3
_RECENT: Final = 2048


class Pause(NamedTuple):
    """One collection; nanoseconds of the monotonic clock."""

    generation: int
    start_ns: int
    end_ns: int


class GcPauses:
    """Counts collections and what they took, by generation. Fixed memory.

    Attributes:
        calls: Collections since :meth:`install`, by generation.
        ns: Nanoseconds that they took.
        recent: The newest of them, in the order of time, for the one reader that takes them out.
    """

    __slots__ = ("_began", "_callback", "_clock", "calls", "ns", "recent")

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.calls = [0] * GENERATIONS
        self.ns = [0] * GENERATIONS
        self.recent: deque[Pause] = deque(maxlen=_RECENT)
        self._clock = clock
        self._began = 0
        # One object: a bound method is another one each time it is asked for.
        self._callback = self._note

    def install(self) -> None:
        """Begin to count."""
        if self._callback not in gc.callbacks:
            gc.callbacks.append(self._callback)

    def uninstall(self) -> None:
        """Stop counting."""
        if self._callback in gc.callbacks:
            gc.callbacks.remove(self._callback)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        # What is raised here cannot reach training: Python writes it to stderr and goes on.
        if phase == "start":
            self._began = self._clock()
        elif self._began:
            generation = info["generation"]
            now = self._clock()
            self.ns[generation] += now - self._began
            self.calls[generation] += 1
            self.recent.append(Pause(generation, self._began, now))
            self._began = 0
