"""Training steps over time: arrivals at collectives, sums over blocks of steps, the recent step time."""

from array import array
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from torchperfd.steps.phases import (
    TRAIN,
    StepBatch,
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
