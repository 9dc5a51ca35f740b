"""Which of the garbage collector's pauses fell within training: from its first step to its newest one."""

from collections import deque
from dataclasses import dataclass
from typing import Final

from torchperfd.hooks.pauses import GENERATIONS, GcPauses
from torchperfd.timed_line import TimedLine

_MAX_WAITING: Final = 4096
_MAX_LINES: Final = 64
_REPORTED_LINES: Final = 8
_LONGEST_NAME: Final = 1000


@dataclass(slots=True)
class _Waiting:
    """Pauses of one generation in a row that may still turn out to be outside training."""

    generation: int
    start_ns: int
    end_ns: int
    calls: int
    ns: int
    caller: tuple[str, int] | None = None


class FitPauses:
    """Counts the collections between the first step's start and the newest step's end. Fixed memory.

    A collection while torch is imported, or after the last step, costs training nothing.

    Args:
        pauses: The process's collections, whenever they were.

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
        self._seen_calls = [0] * GENERATIONS
        self._seen_ns = [0] * GENERATIONS
        self._waiting: deque[_Waiting] = deque()

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
        self._take(counting=began_ns > 0)
        waiting = self._waiting
        if began_ns:
            while waiting and waiting[0].end_ns <= ended_ns:
                pause = waiting.popleft()
                if pause.start_ns >= began_ns:
                    self.calls[pause.generation] += pause.calls
                    self.ns[pause.generation] += pause.ns
                    if pause.caller is not None:
                        self._count_call(pause.caller, pause.calls, pause.ns)
        if len(waiting) > _MAX_WAITING:
            self._shorten(merging=began_ns > 0)

    def _take(self, *, counting: bool) -> None:
        """Move the newest pauses to those that wait."""
        self._pauses.update()
        calls, ns, recent = [*self._pauses.calls], [*self._pauses.ns], self._pauses.recent
        while recent:
            pause = recent.popleft()
            took = pause.end_ns - pause.start_ns
            self._seen_calls[pause.generation] += 1
            self._seen_ns[pause.generation] += took
            self._waiting.append(
                _Waiting(pause.generation, pause.start_ns, pause.end_ns, 1, took, pause.caller)
            )
        for generation in range(GENERATIONS):
            # There were more than are kept one by one. Those that are lost are older than all that are left.
            lost = max(0, calls[generation] - self._seen_calls[generation])
            lost_ns = max(0, ns[generation] - self._seen_ns[generation]) if lost else 0
            self._seen_calls[generation] += lost
            self._seen_ns[generation] += lost_ns
            if counting:
                self.calls[generation] += lost
                self.ns[generation] += lost_ns

    @property
    def longest_calls(self) -> tuple[TimedLine, ...]:
        """The lines that have called for collections within training, the one with most time first."""
        longest = sorted(self.by_caller.items(), key=lambda item: -item[1][1])
        return tuple(
            TimedLine(file[-_LONGEST_NAME:], line, "collect", calls, ns)
            for (file, line), (calls, ns) in longest[:_REPORTED_LINES]
        )

    def _count_call(self, caller: tuple[str, int], calls: int, ns: int) -> None:
        if caller in self.by_caller or len(self.by_caller) < _MAX_LINES:
            before = self.by_caller.get(caller, (0, 0))
            self.by_caller[caller] = before[0] + calls, before[1] + ns

    def _shorten(self, *, merging: bool) -> None:
        """Halve what waits: before training it is dropped; later, one record per generation replaces them."""
        oldest = [self._waiting.popleft() for _ in range(len(self._waiting) // 2)]
        merged: dict[int, _Waiting] = {}
        for pause in oldest if merging else ():
            into = merged.setdefault(
                pause.generation, _Waiting(pause.generation, pause.start_ns, pause.end_ns, 0, 0)
            )
            into.end_ns = pause.end_ns
            into.calls += pause.calls
            into.ns += pause.ns
        self._waiting.extendleft(sorted(merged.values(), key=lambda pause: -pause.end_ns))
