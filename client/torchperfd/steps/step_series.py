"""Training steps over time: arrivals at collectives, sums over blocks, step times, device times. Pure.

A step's time on the device is measured for some steps only. Each of them stands for a number of others.
"""

from array import array
from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from torchperfd.steps.phases import (
    AFTER_EVALUATION,
    COLLECTIVE_WAIT,
    OTHER,
    TRAIN,
    StepBatch,
    slot_after_evaluation,
)

_MAX_ARRIVAL_STEPS: Final = 4096
_ARRIVAL_COLUMNS: Final = 3
ARRIVAL_BYTES: Final = 8 * _ARRIVAL_COLUMNS
"""Bytes per step."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Training steps that had a collective, as columns of one length.

    Attributes:
        step: The steps' indices.
        first_ns: When the rank entered the step's first collective, Unix time.
        last_ns: When it entered the last one.
    """

    step: "array[int]"
    first_ns: "array[int]"
    last_ns: "array[int]"


class ArrivalRecorder:
    """Records arrivals, step by step, in bounded memory.

    The recorder writes, the flusher drains. Steps written during a drain come after the drained ones.
    """

    __slots__ = ("_finished", "_first", "_held_first", "_held_last", "_last")

    def __init__(self) -> None:
        self._finished = array("q")  # step after step, so that one is there as a whole or not at all
        self._first = self._last = 0
        self._held_first = self._held_last = 0

    @property
    def pending(self) -> bool:
        """Whether the open step, or what is held of it, has come to one."""
        return bool(self._first or self._held_first)

    def arrive(self, unix_ns: int) -> None:
        """The rank enters a collective."""
        self._first = self._first or unix_ns
        self._last = unix_ns

    def close(self, step: int) -> None:
        """The open step is training step number ``step``, and over."""
        self._finish(step, self._first, self._last)
        self.forget()

    def forget(self) -> None:
        """The open step is no training step."""
        self._first = self._last = 0

    def hold(self) -> None:
        """The step may end here."""
        self._held_first, self._held_last = self._first, self._last
        self.forget()

    def rejoin(self) -> None:
        """It did not end where it was held."""
        self._first = self._held_first or self._first
        self._last = self._last or self._held_last
        self._held_first = self._held_last = 0

    def release(self, step: int) -> None:
        """It did, and was training step number ``step``."""
        self._finish(step, self._held_first, self._held_last)
        self.discard()

    def discard(self) -> None:
        """What is held belongs to no step."""
        self._held_first = self._held_last = 0

    def take_in(self, steps: memoryview) -> None:
        """Write steps down that were read elsewhere: of each int64 number, first and last arrival."""
        room = _ARRIVAL_COLUMNS * _MAX_ARRIVAL_STEPS - len(self._finished)
        self._finished.frombytes(steps[: 8 * room])

    def drain(self) -> Arrivals:
        """Take what has been written down of finished steps, oldest first."""
        finished = self._finished
        taken = finished[: len(finished)]
        del finished[: len(taken)]
        return Arrivals(*(taken[column::_ARRIVAL_COLUMNS] for column in range(_ARRIVAL_COLUMNS)))

    def _finish(self, step: int, first: int, last: int) -> None:
        # Without a drain, the oldest steps are kept.
        if first and len(self._finished) < _ARRIVAL_COLUMNS * _MAX_ARRIVAL_STEPS:
            self._finished.extend((step, first, last))


MAX_BLOCKS: Final = 256


@dataclass(frozen=True, slots=True)
class BlockSums:
    """Consecutive blocks of equally many training steps.

    Attributes:
        steps: How many steps each block has.
        step_ns: Time of each block's steps, nanoseconds, oldest first.
        phase_ns: By phase slot, the same for the phase; only phases that occurred.
    """

    steps: int
    step_ns: tuple[int, ...]
    phase_ns: dict[int, tuple[int, ...]]


class StepBlocks:
    """Adds training steps up in at most 256 blocks of equally many steps.

    A block has one step at first. When 256 blocks are full, neighbours are merged and blocks become twice as
    long, so a run of any length has 128 to 256 of them. The first training step is left out, as it is from
    every mean, and so are the steps of a block that has only begun.
    """

    def __init__(self) -> None:
        self._steps_per_block = 1
        self._count = 0
        self._begun_steps = 0
        self._begun_ns = 0
        self._begun_phases: dict[int, int] = {}
        self._step_ns = array("q")
        self._phase_ns: dict[int, array[int]] = {}

    def add(self, batch: StepBatch) -> None:
        """Add a batch's steps, if they are training steps and not the first one."""
        if batch.kind[0] != TRAIN or batch.index[0] == 0:
            return
        position = 0
        while position < batch.count:
            taken = min(batch.count - position, self._steps_per_block - self._begun_steps)
            self._take(batch, position, position + taken)
            position += taken
            if self._begun_steps == self._steps_per_block:
                self._close_block()

    def sums(self) -> BlockSums:
        """Return the full blocks."""
        return BlockSums(
            self._steps_per_block,
            tuple(self._step_ns),
            {slot: tuple(column) for slot, column in self._phase_ns.items()},
        )

    def _take(self, batch: StepBatch, first: int, end: int) -> None:
        # A whole batch is summed already. That is the case of long runs, whose blocks are long.
        is_whole = end - first == batch.count
        self._begun_steps += end - first
        self._begun_ns += batch.total_ns if is_whole else sum(batch.duration[first:end])
        for slot, columns in batch.phases.items():
            ns = columns.total_ns if is_whole else sum(columns.ns[first:end])
            self._begun_phases[slot] = self._begun_phases.get(slot, 0) + ns

    def _close_block(self) -> None:
        for slot in self._begun_phases.keys() - self._phase_ns.keys():
            self._phase_ns[slot] = array("q", bytes(8 * self._count))
        self._step_ns.append(self._begun_ns)
        for slot, column in self._phase_ns.items():
            column.append(self._begun_phases.get(slot, 0))
        self._count += 1
        self._begun_steps, self._begun_ns, self._begun_phases = 0, 0, {}
        if self._count == MAX_BLOCKS:
            self._step_ns = _merged_column(self._step_ns)
            self._phase_ns = {slot: _merged_column(column) for slot, column in self._phase_ns.items()}
            self._count //= 2
            self._steps_per_block *= 2


def _merged_column(column: "array[int]") -> "array[int]":
    return array("q", map(sum, zip(column[::2], column[1::2], strict=True)))


_REMEMBERED_STEPS: Final = 64
_RARE_FACTOR: Final = 3
"""Steps so many times as long as the median had something else in them: a checkpoint, a compilation."""


class Pace:
    """The latest training steps."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=_REMEMBERED_STEPS)
        self._phases: dict[int, deque[int]] = {}

    def add(self, drained: Iterable[StepBatch]) -> None:
        """Add drained steps, whatever their kinds."""
        for batch in drained:
            if batch.kind[0] != TRAIN:
                continue
            newest = batch.duration[-_REMEMBERED_STEPS:]
            for slot in batch.phases.keys() - self._phases.keys():
                self._phases[slot] = deque([0] * len(self._recent), maxlen=_REMEMBERED_STEPS)
            for slot, column in self._phases.items():
                columns = batch.phases.get(slot)
                column.extend(columns.ns[-_REMEMBERED_STEPS:] if columns else [0] * len(newest))
            self._recent.extend(newest)

    @property
    def step_ns(self) -> float:
        """Mean of these steps, without rare long ones; 0 before the first."""
        return usual_ns(self._recent) if self._recent else 0.0

    def phase_ns(self) -> dict[int, float]:
        """Return the mean of each phase, by slot, over the same steps as :attr:`step_ns`."""
        if not self._recent:
            return {}
        kept = usual(self._recent)
        return {
            slot: sum(ns for ns, keep in zip(column, kept, strict=True) if keep) / sum(kept)
            for slot, column in self._phases.items()
        }


def usual_ns(durations: Collection[int]) -> float:
    """Return the mean of some durations, at least one, without rare long ones."""
    kept = [ns for ns, keep in zip(durations, usual(durations), strict=True) if keep]
    return sum(kept) / len(kept)


def median(values: Collection[float]) -> float:
    """Return the median of at least one value.

    As ``statistics.median``, whose module would add 15 ms to each attach, for its fractions and decimals.
    """
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def usual(durations: Collection[int]) -> list[bool]:
    """Return which of some durations, at least one, are no rare long ones."""
    longest = _RARE_FACTOR * median(durations)
    return [ns <= longest for ns in durations]


NO_KIND: Final = 0
"""Of a step that is to be forgotten."""


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """What one phase has taken on the device, in steps of one kind.

    Where not every step was timed, these are the timed ones' times multiplied by the number of steps that
    each of them stands for.

    Attributes:
        kind: Kind of the steps, as passed to :meth:`EndedSteps.add`.
        phase: Slot of the phase.
        ns: Exclusive nanoseconds on the device.
        calls: Calls of the phase that had time there.
    """

    kind: int
    phase: int
    ns: int
    calls: int


class StepTimes:
    """The times of a step, or of what was set aside of one.

    Attributes:
        kind: Kind of the step; -1 while it is not known.
        is_whole: Whether no interval is missing.
        weight: How many steps it stands for.
        ns: Nanoseconds by phase, of the intervals that were read.
        calls: Calls by phase.
        running: Phases that had an interval in a call which has not ended.
        pending: Intervals that are yet to be read.
        own_ns: Nanoseconds of those that were given out, without waits for other ranks.
        into: The times that these were added to, if they were.
    """

    __slots__ = ("calls", "into", "is_whole", "kind", "ns", "own_ns", "pending", "running", "weight")

    def __init__(self) -> None:
        self.kind = -1
        self.is_whole = True
        self.weight = 1.0
        self.ns: dict[int, int] = {}
        self.calls: dict[int, int] = {}
        self.running: set[int] = set()
        self.pending = 0
        self.own_ns = 0
        self.into: StepTimes | None = None

    def count(self, phase: int) -> None:
        """A call of the phase has ended."""
        self.calls[phase] = self.calls.get(phase, 0) + 1

    def absorb(self, later: "StepTimes") -> None:
        """Add what came later; it belongs to the same step."""
        for phase, ns in later.ns.items():
            self.ns[phase] = self.ns.get(phase, 0) + ns
        for phase, calls in later.calls.items():
            self.calls[phase] = self.calls.get(phase, 0) + calls
        self.running |= later.running
        self.is_whole &= later.is_whole
        self.pending += later.pending
        later.into = self


class EndedSteps:
    """Steps that have ended: those that are whole stand for all of their kind since the ones before.

    Attributes:
        had_whole: Whether a whole step has ended since this was set to False.
        work_steps: Whole training steps that were read.
        work_ns: What they took without waits for other ranks.
        work_squares: The sum of the squares of that.
    """

    def __init__(self) -> None:
        self.had_whole = False
        self.work_steps = self.work_ns = 0
        self.work_squares = 0.0
        # By kind: the steps since the newest that have a weight, and those of them that are whole.
        self._steps: Counter[int] = Counter()
        self._unweighted: list[StepTimes] = []
        # Those with a weight of which times were not given out, or are yet to be read.
        self._changed: list[StepTimes] = []
        # By kind and phase: nanoseconds and calls less than one.
        self._remainders: dict[tuple[int, int], tuple[float, float]] = {}

    def add(self, step: StepTimes, kind: int) -> None:
        """A step has ended; ``NO_KIND`` when it is to be forgotten."""
        step.kind = kind
        for phase in step.running:
            step.count(phase)
        if kind == NO_KIND:
            return
        self._steps[kind] += 1
        if step.is_whole:
            self.had_whole = True
            self._unweighted.append(step)

    def pass_over(self, kind: int, count: int) -> None:
        """Steps without any times have ended."""
        self._steps[kind] += count

    def weigh(self) -> None:
        """Have the whole steps since the last time stand for all steps since those before them."""
        whole = Counter(step.kind for step in self._unweighted)
        for step in self._unweighted:
            step.weight = self._steps[step.kind] / whole[step.kind]
        for kind in whole:
            del self._steps[kind]
        self._changed += self._unweighted
        self._unweighted = []

    def give_out(self) -> list[DeviceTime]:
        """Return what has been read since the last time of steps with a weight."""
        due = self._remainders
        for step in self._changed:
            for phase in step.ns.keys() | step.calls.keys():
                slot = phase if phase != AFTER_EVALUATION else slot_after_evaluation(step.kind)
                ns, calls = due.get((step.kind, slot), (0.0, 0.0))
                ns += step.ns.get(phase, 0) * step.weight
                if slot == phase or slot != OTHER:  # what is no phase of its own has one call a step
                    calls += step.calls.get(phase, 0) * step.weight
                due[step.kind, slot] = ns, calls
            step.own_ns += sum(step.ns.values()) - step.ns.get(COLLECTIVE_WAIT, 0)
            if not step.pending and step.is_whole and step.kind == TRAIN:
                self.work_steps += 1
                self.work_ns += step.own_ns
                self.work_squares += float(step.own_ns) ** 2
            step.ns.clear()
            step.calls.clear()
        self._changed = [step for step in self._changed if step.pending]
        given = []
        for key in sorted(due):
            ns, calls = due[key]
            time = DeviceTime(*key, _units(ns), _units(calls))
            due[key] = ns - time.ns, calls - time.calls
            if time.ns or time.calls:
                given.append(time)
        return given


def _units(value: float) -> int:
    """Return the whole units of a sum of fractions, which rounding may have left just below one."""
    return int(value + 1e-3)
