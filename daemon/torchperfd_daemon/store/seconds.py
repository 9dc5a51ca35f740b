"""The last ten minutes of one rank, second by second, in fixed memory."""

from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from torchperfd_daemon.store.model import StepColumns

HISTORY_SECONDS: Final = 600

_MAX_PHASES: Final = 12
_REST: Final = "other"
_WAIT: Final = "collective_wait"
_WHOLE: Final = 65535
_MAX_STEPS: Final = 65535
_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class SecondColumns:
    """Seconds in which steps ended, the oldest first: one array per column, all of one length.

    Attributes:
        unix_seconds: Whole seconds, ascending; a second without a step is left out.
        steps: How many training steps ended in it.
        step_seconds: Their mean.
        longest_seconds: The longest of them.
        phase_seconds: Each phase's mean per step.
    """

    unix_seconds: "npt.NDArray[np.int64]"
    steps: "npt.NDArray[np.int64]"
    step_seconds: "npt.NDArray[np.float64]"
    longest_seconds: "npt.NDArray[np.float64]"
    phase_seconds: "dict[str, npt.NDArray[np.float64]]"


class SecondHistory:
    """Means of the steps that ended in each of the newest seconds.

    A phase is kept as a share of the step in 16 bits, which is exact to 0.001 % of the step. Phases beyond
    the twelfth are added to ``other``.
    """

    def __init__(self, capacity: int = HISTORY_SECONDS) -> None:
        self._capacity = capacity
        self.newest = -1
        """The newest second in which a step ended, in Unix time; -1 without any."""
        self._steps = array("H", bytes(2 * capacity))
        self._mean = array("f", bytes(4 * capacity))
        self._longest = array("f", bytes(4 * capacity))
        self._shares: dict[str, array[int]] = {}

    @property
    def nbytes(self) -> int:
        """The bytes of its columns."""
        columns: list[array[int] | array[float]] = [self._steps, self._mean, self._longest]
        columns += self._shares.values()
        return sum(len(column) * column.itemsize for column in columns)

    def append(self, steps: StepColumns) -> None:
        """Add steps to the seconds in which they ended."""
        ends, durations = steps.end_unix_ns, steps.duration_ns
        columns = [(name if self._is_kept(name) else _REST, column) for name, column in steps.phases.items()]
        if any(name == _REST for name, _ in columns):
            self._is_kept(_REST)
        first = 0
        # Plain sums: a batch has few steps, and numpy's calls cost more than these.
        while first < len(ends):
            second = ends[first] // _NS
            after = max(first + 1, bisect_left(ends, (second + 1) * _NS, first))
            spent: dict[str, float] = {}
            for name, column in columns:
                spent[name] = spent.get(name, 0.0) + sum(column[first:after]) / _NS
            took = durations[first:after]
            self._add(second, after - first, sum(took) / _NS, max(took) / _NS, spent)
            first = after

    def since(
        self,
        second: int = -1,
        newest: int = HISTORY_SECONDS,
        until: int | None = None,
        phases: Collection[str] | None = None,
    ) -> SecondColumns:
        """Return copies of the seconds after one.

        Args:
            newest: At most the last so many, counted from the newest second on.
            until: The last one to return; by default the newest.
            phases: Those to return; by default all.
        """
        until = self.newest if until is None else min(until, self.newest)
        first = max(second + 1, self.newest - min(newest, self._capacity) + 1, 0)
        wanted = np.arange(first, until + 1, dtype=np.int64)
        slots = wanted % self._capacity
        counts = np.frombuffer(self._steps, np.uint16)[slots].astype(np.int64)
        there = counts > 0
        wanted, slots, counts = wanted[there], slots[there], counts[there]
        mean = np.frombuffer(self._mean, np.float32)[slots].astype(np.float64)
        return SecondColumns(
            wanted,
            counts,
            mean,
            np.frombuffer(self._longest, np.float32)[slots].astype(np.float64),
            {
                name: np.frombuffer(column, np.uint16)[slots] / _WHOLE * mean
                for name, column in self._shares.items()
                if phases is None or name in phases
            },
        )

    def _is_kept(self, name: str) -> bool:
        """Return whether a phase has a column, after giving it one if there is room."""
        # One place is reserved for the rest, and one for the wait, without which own work is not known.
        reserved = len({_REST, _WAIT} - self._shares.keys() - {name})
        if name not in self._shares and len(self._shares) + reserved < _MAX_PHASES:
            self._shares[name] = array("H", bytes(2 * self._capacity))
        return name in self._shares

    def _add(self, second: int, steps: int, total: float, longest: float, phases: dict[str, float]) -> None:
        if second <= self.newest - self._capacity:
            if second > self.newest - 2 * self._capacity:
                return
            # The clock was set back by far: what it showed before is of no use.
            self._clear()
        for passed in self._skipped(second):
            self._steps[passed] = 0
        self.newest = max(self.newest, second)
        slot = second % self._capacity
        before = self._steps[slot]
        count = before + steps
        mean = (self._mean[slot] * before + total) / count
        earlier = self._mean[slot] * before
        for name, column in self._shares.items():
            spent = phases.get(name, 0.0) + (column[slot] / _WHOLE * earlier if before else 0.0)
            column[slot] = min(_WHOLE, max(0, round(spent / (mean * count) * _WHOLE))) if mean > 0 else 0
        self._longest[slot] = max(longest, self._longest[slot] if before else 0.0)
        self._mean[slot] = mean
        self._steps[slot] = min(count, _MAX_STEPS)

    def _skipped(self, second: int) -> Iterator[int]:
        """Yield the slots that a new second takes over, or passes by."""
        if second > self.newest:
            first = max(self.newest + 1, second - self._capacity + 1)
            for passed in range(first, second + 1):
                yield passed % self._capacity

    def _clear(self) -> None:
        self.newest = -1
        for slot in range(self._capacity):
            self._steps[slot] = 0
