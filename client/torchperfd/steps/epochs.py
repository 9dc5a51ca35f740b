"""Passes over loaders: how long whole loops took, and the epochs that they make up."""

from collections import OrderedDict
from typing import Final

from torchperfd.steps.totals import PhaseTotals

# Iterators in use at a time; a loop that is left early never reports its end.
_MAX_AT_ONCE: Final = 8


class EpochTracker:
    """Follows every iterator from its first draw until it is exhausted.

    An epoch lasts from the beginning of a pass that trains to the beginning of the next; the
    last one ends with its last pass.

    Attributes:
        epoch: The epochs that have ended.
        train: The passes with training steps.
        validate: The passes with validation steps only.
        begun: Numbers of the training steps with which passes have begun, for the one reader that takes
            them out.
    """

    def __init__(self) -> None:
        self.epoch = PhaseTotals()
        self.train = PhaseTotals()
        self.validate = PhaseTotals()
        self.begun: list[int] = []
        # By iterator: when the pass began, and the steps there had been until then.
        self._open: OrderedDict[int, tuple[int, int, int]] = OrderedDict()
        # Those of which it is not known yet whether they train.
        self._unknown: set[int] = set()
        self._epoch_began = 0
        self._last_ended = 0

    def draw(self, iterator: int, now: int, trained: int, validated: int) -> None:
        """An iterator is drawn from; so many training and validation steps have ended so far."""
        if iterator not in self._open:
            if len(self._open) >= _MAX_AT_ONCE:
                self._unknown.discard(self._open.popitem(last=False)[0])
            self._open[iterator] = (now, trained, validated)
            self._unknown.add(iterator)

    def find_begun(self, trained: int) -> None:
        """Find the passes in which training steps have ended; so many have in all."""
        for iterator in list(self._unknown):
            _, before, _ = self._open.get(iterator, (0, trained, 0))
            if trained > before:
                self._unknown.discard(iterator)
                self.begun.append(before)

    def left(self, iterator: int, trained: int) -> None:
        """An iterator is gone before it had no more batches; another may get its id."""
        self.find_begun(trained)
        self._open.pop(iterator, None)
        self._unknown.discard(iterator)

    def exhausted(self, iterator: int, now: int, trained: int, validated: int) -> None:
        """An iterator has no more batches."""
        self.find_begun(trained)
        self._unknown.discard(iterator)
        began, trained_before, validated_before = self._open.pop(iterator, (now, trained, validated))
        if trained > trained_before:
            _add(self.train, now - began)
            # A loop around the one whose passes are epochs makes none of its own.
            if began >= self._epoch_began:
                self._end_epoch(began)
                self._epoch_began = began
        elif validated > validated_before:
            _add(self.validate, now - began)
        else:
            return
        self._last_ended = max(self._last_ended, now)

    def finish(self) -> None:
        """The training is over, and with it the last epoch."""
        self._end_epoch(self._last_ended)
        self._epoch_began = 0
        self._open.clear()
        self._unknown.clear()

    def _end_epoch(self, now: int) -> None:
        if self._epoch_began:
            _add(self.epoch, now - self._epoch_began)


def _add(totals: PhaseTotals, ns: int) -> None:
    totals.calls += 1
    totals.ns += ns
    totals.squares += float(ns) * ns
