"""Drawn batches: which of the batches that a loop has drawn it also used. Pure.

A batch is used when something goes backward, or where a validation step ends. What was drawn and not
used by then was drawn ahead, or is skipped: its samples do not count before it is used. The newest
batch of an iterator is used first. In a loop that draws ahead that gives every step the samples that
it drew, and in one that skips batches it leaves the skipped ones out.
"""

from collections.abc import Container, Iterator
from itertools import chain
from typing import Final

_MAX_AHEAD: Final = 32
_MAX_ITERATORS: Final = 8

Batch = tuple[int, int]
"""The iterator that it was drawn from, and its samples."""


class DrawnBatches:
    """The batches of one loop that are not used yet.

    Attributes:
        current: The iterator that was asked for a batch last.
        iterators: Those that the open step has drawn from, each once, oldest first.
        sources: Those that the newest training step that drew has drawn from.
        trained: Iterators whose batches were trained on, each with whether it goes on.
    """

    def __init__(self) -> None:
        self.current = 0
        self.iterators: list[int] = []
        self.sources: tuple[int, ...] = ()
        self.trained: dict[int, bool] = {}
        self._unused: list[Batch] = []
        self._ahead: list[Batch] = []
        # Batches and iterators of a step that has begun, while the loop may be evaluating.
        self._aside: tuple[list[Batch], list[int]] = ([], [])
        # By iterator: 1 after one draw, 2 after more.
        self._draws: dict[int, int] = {}
        self._ended: set[int] = set()

    def begin(self, iterator: int) -> None:
        """An iterator is asked for a batch: what is left of others that have ended was never used."""
        for other in self._ended - {iterator}:
            self._ahead = [batch for batch in self._ahead if batch[0] != other]
        self._ended &= {iterator}
        if not self.trained.get(iterator, True):
            del self.trained[iterator]  # it begins anew, or another lives where it did
        self.current = iterator

    def add(self, samples: int) -> None:
        iterator = self.current
        self._unused.append((iterator, samples))
        if iterator not in self.iterators:
            self.iterators.append(iterator)
        self._draws[iterator] = min(2, self._draws.pop(iterator, 0) + 1)
        if len(self._draws) > _MAX_ITERATORS:
            del self._draws[next(iter(self._draws))]

    def count(self, samples: int) -> None:
        """Set the number of samples of the newest batch, unknown at its draw."""
        if self._unused:
            self._unused[-1] = self._unused[-1][0], samples

    def drew_ahead(self) -> bool:
        """Return whether the open step has drawn more from an iterator than it has used."""
        return len(self._unused) > 1 and len({origin for origin, _ in self._unused}) < len(self._unused)

    def use(self) -> tuple[bool, int]:
        """Use the newest batch of each iterator of the step; else, of those that earlier steps drew.

        Returns:
            Whether there was any; how many samples that adds to those that the step drew itself.
        """
        if self._unused:
            _take_newest(self._unused)
            return True, 0
        # Only the end of its iterator has a loop train on without drawing; else it uses a batch again.
        taken = _take_newest(self._ahead) if self.current in self._ended else []
        return bool(taken), sum(samples for _, samples in taken)

    def use_for_validation(self) -> int:
        """Do the same for a validation step: a batch that was drawn ahead for training is not its.

        Returns:
            How many samples that adds to those that the step drew itself.
        """
        if self._unused:
            if not _take_newest(self._unused, without=self.trained):
                _take_newest(self._unused)  # it evaluates what it trains on
            return 0
        taken = _take_newest(self._ahead, without=self.trained) if self.current in self._ended else []
        return sum(samples for _, samples in taken)

    def drew_beside_training(self, iterator: int, *, draws_ahead: bool) -> bool:
        """Return whether the open step has drawn what is not trained on.

        Its iterators never trained, and others did.

        Args:
            iterator: The one that is drawn from now, or that was left.
            draws_ahead: The loop may draw more than one batch for a backward.
        """
        if not self.iterators or not self.sources or any(each in self.trained for each in self.iterators):
            return False
        if iterator in self.iterators:
            return not draws_ahead or any(self.trained.values())
        # The iterator that trains goes on, by itself.
        return self.trained.get(iterator, False) and len(self.sources) == 1

    def set_aside(self) -> None:
        """The step that has begun may go on after an evaluation."""
        self._aside = self._unused, self.iterators
        self._unused, self.iterators = [], []

    def take_back(self) -> None:
        unused, iterators = self._aside
        self._unused = unused + self._unused
        self.iterators = iterators + [each for each in self.iterators if each not in iterators]
        self._aside = [], []

    def forget_aside(self) -> None:
        """It does not go on; its batches may yet be used."""
        unused, _ = self._aside
        self._ahead = (self._ahead + unused)[-_MAX_AHEAD:]
        self._aside = [], []

    def is_aside(self, iterator: int) -> bool:
        """Return whether the step that has begun drew from an iterator."""
        return iterator in self._aside[1]

    def end_step(self, *, trained: bool) -> int:
        """The step has ended; return how many of the samples that it drew were not used in it."""
        left, self._unused = self._unused, []
        self._ahead = (self._ahead + left)[-_MAX_AHEAD:]
        if trained and self.iterators:
            self.sources = tuple(self.iterators)
            for iterator in self.iterators:
                self.trained.setdefault(iterator, True)
            while len(self.trained) > _MAX_ITERATORS:
                del self.trained[next(iter(self.trained))]
        self.iterators = []
        return sum(samples for _, samples in left)

    def exhausted(self, iterator: int) -> None:
        """An iterator has no more batches; what it has given may still be used."""
        self._ended.add(iterator)
        if iterator in self.trained:
            self.trained[iterator] = False

    def leave(self, iterator: int) -> int:
        """An iterator is gone; return how many samples of it the open step drew and has not used."""
        left = sum(samples for origin, samples in self._unused if origin == iterator)
        self._unused = [batch for batch in self._unused if batch[0] != iterator]
        self._ahead = [batch for batch in self._ahead if batch[0] != iterator]
        self._draws.pop(iterator, None)
        if iterator in self.trained:
            self.trained[iterator] = False
        self._ended.discard(iterator)
        return left

    def drew_once(self, iterator: int) -> bool:
        return self._draws.get(iterator) == 1

    def state(self) -> tuple[object, ...]:
        """Return all of this, with iterators as numbers in the order of their appearance."""
        numbers: dict[int, int] = {}

        def numbered(iterators: "Iterator[int] | list[int] | tuple[int, ...]") -> tuple[int, ...]:
            return tuple(numbers.setdefault(each, len(numbers)) for each in iterators)

        return (
            *(numbered([self.current]), numbered(self.iterators), numbered(self.sources)),
            *(numbered([*self.trained]), tuple(self.trained.values())),
            *(numbered(self._aside[1]), numbered(origin for origin, _ in self._aside[0])),
            tuple(samples for _, samples in self._aside[0]),
            numbered(origin for origin, _ in chain(self._unused, self._ahead)),
            tuple(samples for _, samples in chain(self._unused, self._ahead)),
            len(self._unused),
            tuple(sorted((numbers[each], draws) for each, draws in self._draws.items() if each in numbers)),
            numbered(sorted(self._ended)),
        )


def _take_newest(batches: list[Batch], without: Container[int] = ()) -> list[Batch]:
    """Take the newest batch of each iterator, but for some, out of a list."""
    seen: set[int] = set()
    taken: list[Batch] = []
    for number in range(len(batches) - 1, -1, -1):
        if batches[number][0] not in seen and batches[number][0] not in without:
            seen.add(batches[number][0])
            taken.append(batches.pop(number))
    return taken
