"""Passes over loaders: the iterators that a loop draws from, epochs, and waits for first batches.

A loop that is left early, by ``break`` or by an exception, does not exhaust its loader. Python drops the
iterator then. What happens between that and the next loop belongs to no step.
"""

import sys
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

from torchperfd.events import EventBuffer, codes
from torchperfd.model.totals import PhaseTotals
from torchperfd.steps.phases import DATA, TRAIN, PhaseColumns, StepBatch

_MAX_KNOWN_ITERATORS: Final = 8


class Iterators:
    """Knows the iterators that the followed thread draws from.

    Nothing is called when an iterator is dropped: an exception that a signal handler raises there would be
    lost. They are looked through when a loop begins.
    """

    def __init__(self, buffer: EventBuffer) -> None:
        self._buffer = buffer
        self._known: dict[int, weakref.ref[Any]] = {}

    def begin(self, iterator: Any) -> None:
        """A loop is about to draw from an iterator, which may be one that was drawn from before."""
        buffer, known = self._buffer, self._known
        if not buffer.here():
            return
        own = id(iterator)
        for key, reference in list(known.items()):
            alive = reference()
            if alive is None or alive is iterator:
                del known[key]
                buffer.mark(codes.LEFT, key)
            elif _has_name(alive):
                buffer.mark(codes.LEFT, key | codes.LEFT_NAMED)
        buffer.mark(codes.PASS)
        try:
            known[own] = weakref.ref(iterator)
        except TypeError:
            return  # a list's, for example: when it is dropped stays unknown
        if len(known) > _MAX_KNOWN_ITERATORS:
            del known[next(iter(known))]


def _has_name(iterator: Any) -> bool:
    """Return whether a module on the call stack holds it by a name, as no ``for`` loop does.

    The local variables of functions are not asked for: up to Python 3.12 that keeps them alive.
    """
    frame, seen = sys._getframe(1), set()
    while frame is not None:
        names = frame.f_globals
        if id(names) not in seen:
            seen.add(id(names))
            if any(value is iterator for value in list(names.values())):
                return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


# Iterators in use at a time; a loop that is left early never reports its end.
_MAX_PASSES: Final = 8


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
            if len(self._open) >= _MAX_PASSES:
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
        self.find_begun(trained)
        self._unknown.discard(iterator)
        began, trained_before, validated_before = self._open.pop(iterator, (now, trained, validated))
        if trained > trained_before:
            self.train.count(now - began)
            # A loop around the one whose passes are epochs makes none of its own.
            if began >= self._epoch_began:
                self._end_epoch(began)
                self._epoch_began = began
        elif validated > validated_before:
            self.validate.count(now - began)
        else:
            return
        self._last_ended = max(self._last_ended, now)

    def finish(self) -> None:
        self._end_epoch(self._last_ended)
        self._epoch_began = 0
        self._open.clear()
        self._unknown.clear()

    def _end_epoch(self, now: int) -> None:
        if self._epoch_began:
            self.epoch.count(now - self._epoch_began)


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
            ns = _column_sum(columns, position - first, until - first)
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
        self.totals.count(max(0, round(ns - steps * self._other_ns / self._other_steps)))


def _column_sum(columns: PhaseColumns | None, first: int, end: int) -> int:
    if columns is None:
        return 0
    # A long batch is summed already.
    return columns.total_ns if end - first == len(columns.ns) else sum(columns.ns[first:end])
