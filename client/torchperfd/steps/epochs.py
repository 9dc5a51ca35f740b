"""Passes over loaders: how long whole loops took, and the epochs that they make up."""

from collections import OrderedDict
from typing import Final

from torchperfd.steps.totals import PhaseTotals

# Iterators in use at a time; a loop that is left early never reports its end.
_MOST_AT_ONCE: Final = 8


class EpochTracker:
    """Follows every iterator from its first draw until it is exhausted.

    An epoch lasts from the beginning of a pass that trains to the beginning of the next; the
    last one ends with its last pass.

    Attributes:
        epoch: The epochs that have ended.
        train: The passes with training steps.
        validate: The passes with validation steps only.
        starts: The first draws of the passes with training steps, without the first of these passes.
        is_starting: Whether the first batch of a pass is yet to come.
    """

    def __init__(self) -> None:
        self.epoch = PhaseTotals()
        self.train = PhaseTotals()
        self.validate = PhaseTotals()
        self.starts = PhaseTotals()
        self.is_starting = False
        # By iterator: when the pass began, and the steps there had been until then.
        self._open: OrderedDict[int, tuple[int, int, int]] = OrderedDict()
        # By iterator: what the first draw took, until it is known whether the pass trains.
        self._starts: dict[int, int] = {}
        self._has_trained = False
        self._epoch_began = 0
        self._last_ended = 0

    def draw(self, iterator: int, now: int, trained: int, validated: int) -> None:
        """An iterator is drawn from; so many training and validation steps have ended so far."""
        if iterator not in self._open:
            if len(self._open) >= _MOST_AT_ONCE:
                self._starts.pop(self._open.popitem(last=False)[0], None)
            self._open[iterator] = (now, trained, validated)
            self.is_starting = True

    def drawn(self, now: int) -> None:
        """The first batch of the pass that was opened last is here."""
        self.is_starting = False
        if self._open:
            iterator = next(reversed(self._open))
            self._starts[iterator] = now - self._open[iterator][0]

    def count_starts(self, trained: int) -> None:
        """Count the starts of passes in which training steps have ended; so many have in all."""
        for iterator in list(self._starts):
            if trained > self._open[iterator][1]:
                self._count_start(iterator)

    def left(self, iterator: int, trained: int) -> None:
        """An iterator is gone before it had no more batches; another may get its id."""
        self.count_starts(trained)
        self._open.pop(iterator, None)
        self._starts.pop(iterator, None)

    def exhausted(self, iterator: int, now: int, trained: int, validated: int) -> None:
        """An iterator has no more batches."""
        began, trained_before, validated_before = self._open.get(iterator, (now, trained, validated))
        self.is_starting = False
        if trained > trained_before:
            self._count_start(iterator)
            _add(self.train, now - began)
            # A loop around the one whose passes are epochs makes none of its own.
            if began >= self._epoch_began:
                self._end_epoch(began)
                self._epoch_began = began
        elif validated > validated_before:
            _add(self.validate, now - began)
        self._open.pop(iterator, None)
        self._starts.pop(iterator, None)
        if trained > trained_before or validated > validated_before:
            self._last_ended = max(self._last_ended, now)

    def finish(self) -> None:
        """The training is over, and with it the last epoch."""
        self._end_epoch(self._last_ended)
        self._epoch_began = 0
        self._open.clear()
        self._starts.clear()

    def _count_start(self, iterator: int) -> None:
        start = self._starts.pop(iterator, 0)
        # The first one imports and initialises what later ones find.
        if start and self._has_trained:
            _add(self.starts, start)
        self._has_trained = True

    def _end_epoch(self, now: int) -> None:
        if self._epoch_began:
            _add(self.epoch, now - self._epoch_began)


def _add(totals: PhaseTotals, ns: int) -> None:
    totals.calls += 1
    totals.ns += ns
    totals.squares += float(ns) * ns
