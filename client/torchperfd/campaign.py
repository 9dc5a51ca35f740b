"""A campaign: steps in blocks, every other of which writes all that hooks write twice.

What another program, a capture or the script itself does to the pace is in neighbouring blocks alike, but for
the moments when it begins and ends. So blocks are compared with their neighbours only, and the median of
these differences counts.
"""

import itertools
import statistics
from collections.abc import Sequence
from struct import iter_unpack
from typing import Final

from torchperfd.tape import events as on_tape

_MOST_STEPS_KEPT: Final = 4096
"""Of one block."""

_ERROR_OF_MEDIAN: Final = 1.4826 * 1.2533
"""The standard error of a median of n normal values: so many median absolute deviations by the root of n."""


class Campaign:
    """Reads what was taken off the tape, and knows from it which steps were doubled."""

    def __init__(self) -> None:
        self._blocks: list[tuple[bool, list[int]]] = []  # whether doubled, nanoseconds of each step
        self._optimizer = 0
        self._began = 0
        self._shadows = 0

    def read(self, events: "bytes | memoryview[int]") -> None:
        """Learn how long steps take from events, in the order of time."""
        for now, word in iter_unpack(on_tape.EVENT_FORMAT, events):
            code = word & on_tape.CODE_MASK
            if code == on_tape.SHADOW:
                self._shadows += 1
            elif code == on_tape.OPTIMIZER:
                self._optimizer_step(word >> on_tape.ARGUMENT_SHIFT, now)

    def _optimizer_step(self, optimizer: int, now: int) -> None:
        """An optimizer begins to step, at ``now`` nanoseconds: so long after its last time is a step."""
        self._optimizer = self._optimizer or optimizer
        if optimizer != self._optimizer:
            return
        doubled, self._shadows = self._shadows > 0, 0
        spent, self._began = now - self._began, now
        if not self._blocks or doubled is not self._blocks[-1][0]:
            # The first of a block may be doubled in part: it tells nothing.
            self._blocks.append((doubled, []))
        elif len(self._blocks[-1][1]) < _MOST_STEPS_KEPT:
            self._blocks[-1][1].append(spent)

    def differences(self) -> list[float]:
        """Return by which part the median step of each doubled block is longer than that of a neighbour."""
        medians = [(doubled, statistics.median(steps)) for doubled, steps in self._blocks if steps]
        return [
            (later - earlier) / earlier if doubled else (earlier - later) / later
            for (was, earlier), (doubled, later) in itertools.pairwise(medians)
            if was is not doubled
        ]


def median_and_error(differences: Sequence[float]) -> tuple[float, float]:
    """Return the median of some differences, at least one, and its standard error.

    Each block is in two of them, so that half of them count as independent.
    """
    median = statistics.median(differences)
    deviation = statistics.median(abs(difference - median) for difference in differences)
    return median, float(_ERROR_OF_MEDIAN * deviation / (len(differences) / 2) ** 0.5)
