"""Drawn batches: which of the batches that a loop has drawn it also used. Pure.

A batch is used when something goes backward, or where a validation step ends. What was drawn and not
used by then was drawn ahead, or is skipped: its samples do not count before it is used. The newest
batch of an iterator is used first. In a loop that draws ahead that gives every step the samples that
it drew, and in one that skips batches it leaves the skipped ones out.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Final

_MOST_AHEAD: Final = 32
_MOST_ITERATORS: Final = 8

Batch = tuple[int, int]
"""The iterator that it was drawn from, and its samples."""


class DrawnBatches:
    """The batches of one loop that are not used yet.

    Attributes:
        current: The iterator that was asked for a batch last.
        iterators: Those that the open step has drawn from, each once, oldest first.
        sources: Those that the newest training step that drew has drawn from.
    """

    def __init__(self) -> None:
        self.current = 0
        self.iterators: list[int] = []
        self.sources: tuple[int, ...] = ()
        self._unused: list[Batch] = []
        self._ahead: list[Batch] = []
        # By iterator: 1 after one draw, 2 after more.
        self._draws: dict[int, int] = {}
        self._ended: set[int] = set()

    def begin(self, iterator: int) -> None:
        """An iterator is asked for a batch: what is left of others that have ended was never used."""
        for other in self._ended - {iterator}:
            self._ahead = [batch for batch in self._ahead if batch[0] != other]
        self._ended &= {iterator}
        self.current = iterator

    def add(self, samples: int) -> None:
        """The batch is here."""
        iterator = self.current
        self._unused.append((iterator, samples))
        if iterator not in self.iterators:
            self.iterators.append(iterator)
        self._draws[iterator] = min(2, self._draws.pop(iterator, 0) + 1)
        if len(self._draws) > _MOST_ITERATORS:
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

    def end_step(self, *, trained: bool) -> int:
        """The step has ended; return how many of the samples that it drew were not used in it."""
        left, self._unused = self._unused, []
        self._ahead = (self._ahead + left)[-_MOST_AHEAD:]
        if trained and self.iterators:
            self.sources = tuple(self.iterators)
        self.iterators = []
        return sum(samples for _, samples in left)

    def exhausted(self, iterator: int) -> None:
        """An iterator has no more batches; what it has given may still be used."""
        self._ended.add(iterator)

    def leave(self, iterator: int) -> int:
        """An iterator is gone; return how many samples of it the open step drew and has not used."""
        left = sum(samples for origin, samples in self._unused if origin == iterator)
        self._unused = [batch for batch in self._unused if batch[0] != iterator]
        self._ahead = [batch for batch in self._ahead if batch[0] != iterator]
        self._draws.pop(iterator, None)
        self._ended.discard(iterator)
        return left

    def drew_once(self, iterator: int) -> bool:
        """Return whether only one batch was drawn from it."""
        return self._draws.get(iterator) == 1

    def state(self) -> tuple[object, ...]:
        """Return all of this, with iterators as numbers in the order of their appearance."""
        numbers: dict[int, int] = {}

        def numbered(iterators: "Iterator[int] | list[int] | tuple[int, ...]") -> tuple[int, ...]:
            return tuple(numbers.setdefault(each, len(numbers)) for each in iterators)

        return (
            *(numbered([self.current]), numbered(self.iterators), numbered(self.sources)),
            numbered(origin for origin, _ in chain(self._unused, self._ahead)),
            tuple(samples for _, samples in chain(self._unused, self._ahead)),
            len(self._unused),
            tuple(sorted((numbers[each], draws) for each, draws in self._draws.items() if each in numbers)),
            numbered(sorted(self._ended)),
        )


def _take_newest(batches: list[Batch]) -> list[Batch]:
    """Take the newest batch of each iterator out of a list."""
    seen: set[int] = set()
    taken: list[Batch] = []
    for number in range(len(batches) - 1, -1, -1):
        if batches[number][0] not in seen:
            seen.add(batches[number][0])
            taken.append(batches.pop(number))
    return taken
