"""The newest steps of a rank, its last ten minutes by the second, and a histogram of its steps; bounded."""

from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from torchperfd_daemon.store.model import HISTORY_STEPS, ArrivalColumns, StepColumns, ended_within

HISTOGRAM_BOUNDS_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
_MAX_PHASES: Final = 28


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a rank arrived at a step's first and last collective: Unix nanoseconds, by its node's clock."""

    first_unix_ns: int
    last_unix_ns: int


def _filled(count: int, value: int = 0) -> "array[int]":
    """Return an array that holds a value ``count`` times, without the spare capacity that bytes would add."""
    return array("q", (value,)) * count


class ArrivalHistory:
    """The arrivals of one rank at the collectives of its newest steps."""

    def __init__(self, capacity: int = HISTORY_STEPS) -> None:
        self._capacity = capacity
        # Step, first, last; created with the first arrival, since many ranks have none.
        self._rings: tuple[array[int], array[int], array[int]] | None = None
        self.newest = -1
        """Index of the newest step; -1 without any."""

    def append(self, columns: ArrivalColumns) -> None:
        """Add steps; each overwrites the step that is ``capacity`` steps older."""
        if not columns.step:
            return
        if self._rings is None:
            self._rings = (
                _filled(self._capacity, -1),
                _filled(self._capacity, -1),
                _filled(self._capacity, -1),
            )
        given = (columns.step, columns.first_unix_ns, columns.last_unix_ns)
        newest = columns.step[-self._capacity :]
        if newest.tolist() == [*range(newest[0], newest[0] + self._capacity)]:
            # This many consecutive steps overwrite everything.
            wrap = -newest[0] % self._capacity
            for ring, column in zip(self._rings, given, strict=True):
                latest = column[-self._capacity :]
                ring[:] = latest[wrap:] + latest[:wrap]
        else:
            for row in zip(*given, strict=True):
                for ring, value in zip(self._rings, row, strict=True):
                    ring[row[0] % self._capacity] = value
        self.newest = max(self.newest, columns.step[-1])

    def at(self, step: int) -> Arrival | None:
        """Return when the rank arrived at the collectives of a step; None if unknown."""
        if self._rings is None or step < 0:
            return None
        kept, first, last = (ring[step % self._capacity] for ring in self._rings)
        return Arrival(first, last) if kept == step else None


class History:
    """The newest steps of one rank, in ring buffers of equal length."""

    def __init__(self, capacity: int = HISTORY_STEPS) -> None:
        self._capacity = capacity
        self._seen = 0
        self.next_step = 0
        """Number of the newest step plus one; 0 if the client does not send it."""
        self._end = _filled(capacity)
        self._duration = _filled(capacity)
        self._phases: dict[str, array[int]] = {}

    def append(self, steps: StepColumns) -> None:
        """Add steps, and drop the oldest."""
        for name in steps.phases:
            if name not in self._phases and len(self._phases) < _MAX_PHASES:
                self._phases[name] = _filled(self._capacity)
        count = len(steps.duration_ns)
        skipped = max(0, count - self._capacity)
        first = (self._seen + skipped) % self._capacity
        # Write up to the end of the ring, then continue at its beginning.
        wrap = min(count, skipped + self._capacity - first)
        for ring, column in (
            (self._end, steps.end_unix_ns),
            (self._duration, steps.duration_ns),
            *((ring, steps.phases.get(name)) for name, ring in self._phases.items()),
        ):
            values = column if column is not None else _filled(count)
            ring[first : first + wrap - skipped] = values[skipped:wrap]
            if count > wrap:
                ring[: count - wrap] = values[wrap:]
        self._seen += count
        self.next_step = steps.next_step

    def __len__(self) -> int:
        return min(self._seen, self._capacity)

    @property
    def nbytes(self) -> int:
        """The bytes of its rings."""
        rings = (self._end, self._duration, *self._phases.values())
        return sum(len(ring) * ring.itemsize for ring in rings)

    @property
    def seen(self) -> int:
        """The number of steps so far, including dropped ones."""
        return self._seen

    def newest(self, count: int = HISTORY_STEPS) -> StepColumns:
        """Return copies of up to ``count`` newest steps, oldest first."""
        return StepColumns(
            self._newest(self._end, count),
            self._newest(self._duration, count),
            {name: self._newest(ring, count) for name, ring in self._phases.items()},
        )

    def ended_within(self, seconds: float) -> int:
        """Return how many of the steps held ended in the last so many seconds before the newest one."""
        return ended_within(self._newest(self._end, len(self)), seconds)

    def newest_durations(self, count: int = HISTORY_STEPS) -> "array[int]":
        """Return a copy of the durations of up to ``count`` newest steps in nanoseconds, oldest first."""
        return self._newest(self._duration, count)

    def mean_step_seconds(self, count: int = HISTORY_STEPS) -> float:
        """Return the mean duration of the newest steps held; 0 without any."""
        return self._mean_seconds(self._duration, count)

    def mean_phase_seconds(self, count: int = HISTORY_STEPS) -> dict[str, float]:
        """Return each phase's mean exclusive time per step, of the newest steps held."""
        return {name: self._mean_seconds(ring, count) for name, ring in self._phases.items()}

    def _newest(self, ring: "array[int]", count: int) -> "array[int]":
        count = min(count, len(self))
        first = (self._seen - count) % self._capacity
        return (ring[first:] + ring[:first])[:count]

    def _mean_seconds(self, ring: "array[int]", count: int) -> float:
        count = min(count, len(self))
        if not count:
            return 0.0
        oldest = (self._seen - len(self)) % self._capacity
        left_out = sum(ring[(oldest + index) % self._capacity] for index in range(len(self) - count))
        # Slots that were never written hold zero, so the sum is right for a partly filled ring too.
        return (sum(ring) - left_out) / count / 1e9


class Histogram:
    """Counts of durations by upper bound, in seconds."""

    def __init__(self) -> None:
        self.counts = [0] * (len(HISTOGRAM_BOUNDS_S) + 1)
        self.sum_seconds = 0.0

    def observe_ns(self, durations: "array[int]") -> None:
        """Add durations."""
        for ns in durations:
            self.counts[bisect_left(HISTOGRAM_BOUNDS_S, ns / 1e9)] += 1
        self.sum_seconds += sum(durations) / 1e9


HISTORY_SECONDS: Final = 600

_MAX_SECOND_PHASES: Final = 12
_REST_PHASE: Final = "other"
_WAIT_PHASE: Final = "collective_wait"
_WHOLE_SHARE: Final = 65535
_MAX_SECOND_STEPS: Final = 65535
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
        columns = [
            (name if name in self._shares or self._is_kept(name) else _REST_PHASE, column)
            for name, column in steps.phases.items()
        ]
        if any(name == _REST_PHASE for name, _ in columns):
            self._is_kept(_REST_PHASE)
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
                name: np.frombuffer(column, np.uint16)[slots] / _WHOLE_SHARE * mean
                for name, column in self._shares.items()
                if phases is None or name in phases
            },
        )

    def _is_kept(self, name: str) -> bool:
        """Return whether a phase has a column, after giving it one if there is room."""
        # One place is reserved for the rest, and one for the wait, without which own work is not known.
        reserved = len({_REST_PHASE, _WAIT_PHASE} - self._shares.keys() - {name})
        if name not in self._shares and len(self._shares) + reserved < _MAX_SECOND_PHASES:
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
        earlier = self._mean[slot] * before
        whole = earlier + total
        mean = whole / count
        for name, column in self._shares.items():
            spent = phases.get(name, 0.0) * _WHOLE_SHARE + column[slot] * earlier
            column[slot] = min(_WHOLE_SHARE, round(spent / whole)) if whole > 0 else 0
        self._longest[slot] = max(longest, self._longest[slot] if before else 0.0)
        self._mean[slot] = mean
        self._steps[slot] = min(count, _MAX_SECOND_STEPS)

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
