"""Step blocks: sums of consecutive training steps, by phase, in fixed memory. Pure."""

from array import array
from dataclasses import dataclass
from typing import Final

from torchperfd.steps.step_batch import TRAIN, StepBatch

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
            self._step_ns = _merged(self._step_ns)
            self._phase_ns = {slot: _merged(column) for slot, column in self._phase_ns.items()}
            self._count //= 2
            self._steps_per_block *= 2


def _merged(column: "array[int]") -> "array[int]":
    return array("q", map(sum, zip(column[::2], column[1::2], strict=True)))
