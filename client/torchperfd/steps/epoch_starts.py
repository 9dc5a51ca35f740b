"""Waits for the first batches of epochs, beyond the usual wait. Pure."""

from collections.abc import Sequence

from torchperfd.steps.phases import DATA
from torchperfd.steps.step_batch import TRAIN, PhaseColumns, StepBatch
from torchperfd.steps.totals import PhaseTotals


class EpochStarts:
    """Adds up how long the first steps of training passes wait for data, compared with all other steps.

    As many steps of a pass are its first ones as the loader has workers: each of these makes one batch before
    it makes another. The first pass of all is left out: it imports and initialises what later ones find.

    Attributes:
        totals: The passes so far, and their waits beyond the usual one.
    """

    def __init__(self) -> None:
        self.totals = PhaseTotals()
        self._begins: list[int] = []
        self._is_first = True
        # Of the pass that has begun last: where it began, and the waits of its first steps so far.
        self._begin = 0
        self._steps = self._ns = 0
        # Of all other steps.
        self._other_steps = self._other_ns = 0

    def add(self, batches: Sequence[StepBatch], begun: Sequence[int], workers: int) -> None:
        """Add finished steps.

        Args:
            batches: Oldest first.
            begun: Numbers of the training steps with which passes have begun, none of an earlier call's.
            workers: Worker processes of the loader; 0 without.
        """
        self._begins = sorted({*self._begins, *begun})
        firsts = max(1, workers)
        for batch in batches:
            if batch.kind[0] == TRAIN:
                self._add(batch, firsts)

    def _add(self, batch: StepBatch, firsts: int) -> None:
        columns = batch.phases.get(DATA)
        first, end = batch.index[0], batch.index[0] + batch.count
        position = first
        while position < end:
            if self._begins and self._begins[0] <= position:
                self._close()
                self._begin = self._begins.pop(0)
            until = end
            if self._begins:
                until = min(until, self._begins[0])
            is_start = position < self._begin + firsts
            if is_start:
                until = min(until, self._begin + firsts)
            ns = _sum(columns, position - first, until - first)
            if is_start:
                self._steps += until - position
                self._ns += ns
            else:
                self._other_steps += until - position
                self._other_ns += ns
            position = until
            if not is_start and self._steps:
                self._close()

    def _close(self) -> None:
        steps, ns, self._steps, self._ns = self._steps, self._ns, 0, 0
        if not steps:
            return
        if self._is_first or not self._other_steps:
            self._is_first = False
            return
        extra = max(0, round(ns - steps * self._other_ns / self._other_steps))
        self.totals.calls += 1
        self.totals.ns += extra
        self.totals.squares += float(extra) * extra


def _sum(columns: PhaseColumns | None, first: int, end: int) -> int:
    if columns is None:
        return 0
    # A long batch is summed already.
    return columns.total_ns if end - first == len(columns.ns) else sum(columns.ns[first:end])
