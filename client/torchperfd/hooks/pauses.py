"""Pauses of Python's garbage collector: whatever thread runs it, training waits."""

import functools
import gc
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import itemgetter, setitem
from types import CodeType
from typing import Any, Final, NamedTuple

from torchperfd.frame_line import line_at

GENERATIONS: Final = 3
_RECENT: Final = 2048
_LONGEST_CALL_NS: Final = 50_000_000
_UNREAD: Final = 16_384
"""A thousand collections per second, over the longest time between two flushes."""


class Pause(NamedTuple):
    """One collection; nanoseconds of the monotonic clock."""

    generation: int
    start_ns: int
    end_ns: int
    caller: tuple[str, int] | None = None
    """File and line of the call of ``gc.collect()`` that made it; None for one that Python began itself."""


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

    ``gc.collect`` is replaced by a function that notes its caller. The callbacks cannot: a collection may
    begin while Python builds a frame, and the interpreter crashes if frames are asked for then.

    Attributes:
        calls: Collections since :meth:`install`, by generation, as of the last :meth:`update`.
        ns: Nanoseconds that they took.
        callbacks: The entries for ``gc.callbacks``, in their order.
        recent: The newest of them, in the order of time, for the one reader that takes them out.
    """

    __slots__ = ("_asked", "_collect", "_original", "_starts", "_stops", "callbacks", "calls", "ns", "recent")

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.calls = [0] * GENERATIONS
        self.ns = [0] * GENERATIONS
        self.recent: deque[Pause] = deque(maxlen=_RECENT)
        self._starts: deque[int] = deque(maxlen=_UNREAD)
        self._asked: deque[tuple[int, CodeType, int]] = deque(maxlen=_RECENT)
        self._collect, self._original = _noting(gc.collect, self._asked, clock), gc.collect
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
        if gc.collect is self._original:
            gc.collect = self._collect

    def uninstall(self) -> None:
        """Stop counting."""
        if gc.collect is self._collect:
            gc.collect = self._original
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
                caller = self._caller(start) if generation == GENERATIONS - 1 else None
                self.recent.append(Pause(generation, start, end, caller))

    def _caller(self, start: int) -> tuple[str, int] | None:
        """Return file and line that called for a full collection; None where Python began it itself."""
        newest = None
        while self._asked and self._asked[0][0] <= start:
            newest = self._asked.popleft()
        # A call within a collection begins none.
        if newest is None or start - newest[0] > _LONGEST_CALL_NS:
            return None
        _, code, offset = newest
        return code.co_filename, line_at(code, offset)


def _noting(
    collect: Callable[..., int], asked: "deque[tuple[int, CodeType, int]]", clock: Callable[[], int]
) -> Callable[..., int]:
    """Return ``gc.collect`` with a note of each caller, as code and offset: a frame keeps tensors alive."""
    frame_at = sys._getframe

    @functools.wraps(collect)
    def noting_collect(*args: Any, **kwargs: Any) -> int:
        frame = frame_at(1)
        asked.append((clock(), frame.f_code, frame.f_lasti))
        return collect(*args, **kwargs)

    return noting_collect
