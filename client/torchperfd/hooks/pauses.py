"""Pauses of Python's garbage collector: whichever thread runs it, training waits.

Those between the first training step and the newest one are counted apart.
"""

import functools
import gc
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter, setitem
from types import CodeType
from typing import Any, Final

from torchperfd.hooks.thread_frames import line_at
from torchperfd.model.source_lines import TimedLine

GENERATIONS: Final = 3
_MAX_CALLS: Final = 2048
_MAX_CALL_NS: Final = 50_000_000
_MAX_UNREAD: Final = 16_384
"""A thousand collections per second, over the longest time between two flushes."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Collections of one generation, in general a single one; nanoseconds of the monotonic clock.

    Attributes:
        ns: What they took.
        caller: File and line of the call of ``gc.collect()`` that made it; None for one that Python began.
    """

    generation: int
    start_ns: int
    end_ns: int
    ns: int
    calls: int = 1
    caller: tuple[str, int] | None = None


class _OnStart(map):  # type: ignore[type-arg]
    """Goes one on when the attribute of this name is read, without running any Python code."""

    start = property(next)


class _OnStop(map):  # type: ignore[type-arg]
    """The same with the other name."""

    stop = property(next)


class GcPauses:
    """Notes collections and what they took. Fixed memory.

    What a callback of the collector raises is lost: Python prints it and goes on. A signal handler of the
    script runs between any two instructions of Python code, so there is none in these callbacks. They are
    built-in functions put together. The collector calls each with a phase and a dict. Then
    ``setitem(newest, phase, dict)`` keeps the dict, and ``getattr(iterator, phase, dict)`` appends the time
    to what :meth:`take` reads.

    ``gc.collect`` is replaced by a function that notes its caller. The callbacks cannot: a collection may
    begin while Python builds a frame, and the interpreter crashes if frames are asked for then.

    Attributes:
        callbacks: The entries for ``gc.callbacks``, in their order.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._starts: deque[int] = deque(maxlen=_MAX_UNREAD)
        self._asked: deque[tuple[int, CodeType, int]] = deque(maxlen=_MAX_CALLS)
        self._collect, self._original = _noting_collect(gc.collect, self._asked, clock), gc.collect
        self._stops: deque[tuple[int, int]] = deque(maxlen=_MAX_UNREAD)
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
        gc.callbacks.extend(callback for callback in self.callbacks if callback not in gc.callbacks)
        if gc.collect is self._original:
            gc.collect = self._collect

    def uninstall(self) -> None:
        if gc.collect is self._collect:
            gc.collect = self._original
        for callback in self.callbacks:
            if callback in gc.callbacks:
                gc.callbacks.remove(callback)

    def take(self) -> list[Pause]:
        """Return the collections that have ended since the last call, oldest first; by one thread."""
        taken = []
        while self._stops:
            end, generation = self._stops.popleft()
            start = 0
            while self._starts and self._starts[0] <= end:
                start = self._starts.popleft()
            if start:
                caller = self._caller(start) if generation == GENERATIONS - 1 else None
                taken.append(Pause(generation, start, end, end - start, caller=caller))
        return taken

    def _caller(self, start: int) -> tuple[str, int] | None:
        """Return file and line that called for a full collection; None where Python began it itself."""
        newest = None
        while self._asked and self._asked[0][0] <= start:
            newest = self._asked.popleft()
        # A call within a collection begins none.
        if newest is None or start - newest[0] > _MAX_CALL_NS:
            return None
        _, code, offset = newest
        return code.co_filename, line_at(code, offset)


def _noting_collect(
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


_MAX_WAITING: Final = 4096
_MAX_LINES: Final = 64
_REPORTED_LINES: Final = 8
_MAX_NAME: Final = 1000


class FitPauses:
    """Counts the collections between the first step's start and the newest step's end. Fixed memory.

    A collection while torch is imported, or after the last step, costs training nothing.

    Attributes:
        calls: Collections within training, by generation.
        ns: Nanoseconds that they took.
        by_caller: Those within training that the script has called for: number and nanoseconds by file and
            line.
    """

    def __init__(self, pauses: GcPauses) -> None:
        self.calls = [0] * GENERATIONS
        self.ns = [0] * GENERATIONS
        self.by_caller: dict[tuple[str, int], tuple[int, int]] = {}
        self._pauses = pauses
        self._waiting: deque[Pause] = deque()

    @property
    def waiting_count(self) -> int:
        """The number of pauses that may still turn out to be outside training."""
        return len(self._waiting)

    def settle(self, began_ns: int, ended_ns: int) -> None:
        """Count the pauses that are known by now to lie within training.

        Args:
            began_ns: When the first step began, on the clock of the pauses; 0 while there is none.
            ended_ns: When the newest step ended.
        """
        waiting = self._waiting
        waiting.extend(self._pauses.take())
        if began_ns:
            while waiting and waiting[0].end_ns <= ended_ns:
                pause = waiting.popleft()
                if pause.start_ns >= began_ns:
                    self.calls[pause.generation] += pause.calls
                    self.ns[pause.generation] += pause.ns
                    if pause.caller is not None:
                        self._count_call(pause.caller, pause.calls, pause.ns)
        while len(waiting) > _MAX_WAITING:
            self._shorten(merging=began_ns > 0)

    @property
    def longest_calls(self) -> tuple[TimedLine, ...]:
        """The lines that have called for collections within training, the one with most time first."""
        longest = sorted(self.by_caller.items(), key=lambda item: -item[1][1])
        return tuple(
            TimedLine(file[-_MAX_NAME:], line, "collect", calls, ns)
            for (file, line), (calls, ns) in longest[:_REPORTED_LINES]
        )

    def _count_call(self, caller: tuple[str, int], calls: int, ns: int) -> None:
        if caller in self.by_caller or len(self.by_caller) < _MAX_LINES:
            before = self.by_caller.get(caller, (0, 0))
            self.by_caller[caller] = before[0] + calls, before[1] + ns

    def _shorten(self, *, merging: bool) -> None:
        """Halve what waits: before training it is dropped; later, one record per generation replaces them."""
        oldest = [self._waiting.popleft() for _ in range(len(self._waiting) // 2)]
        merged: dict[int, Pause] = {}
        for pause in oldest if merging else ():
            into = merged.get(pause.generation, replace(pause, ns=0, calls=0, caller=None))
            calls, ns = into.calls + pause.calls, into.ns + pause.ns
            merged[pause.generation] = replace(into, end_ns=pause.end_ns, calls=calls, ns=ns)
        self._waiting.extendleft(sorted(merged.values(), key=lambda pause: -pause.end_ns))
