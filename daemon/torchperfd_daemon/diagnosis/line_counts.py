"""Counts samples of what a process does, and finds the stage and the line that take longest. Pure."""

import math
from collections import Counter
from dataclasses import replace
from typing import Final

from torchperfd.slow_line import SlowLine

LEAST_SAMPLES: Final = 8
"""With fewer samples nothing is reported."""
ENOUGH_SAMPLES: Final = 20
"""With as many, a line that stands out by chance once in a thousand times is certain."""
LEAST_LINE_SHARE: Final = 0.25
"""A line stands out if at least this part of the samples is at it."""
_DEVIATIONS: Final = 3.0

_Line = tuple[str, int, str, str]
"""File, number, function, and what the line calls."""
_NO_LINE: Final[_Line] = ("", 0, "", "")


class LineCounts:
    """The samples so far.

    Args:
        of_step: They are of the host's work in a step, not of loading.
    """

    def __init__(self, *, of_step: bool = False) -> None:
        self._of_step = of_step
        self._counts: Counter[tuple[str, _Line]] = Counter()
        self._in_workers = 0

    @property
    def samples(self) -> int:
        """How many there are."""
        return self._counts.total()

    @property
    def is_certain(self) -> bool:
        """Whether more samples would not name another line."""
        if self.samples < ENOUGH_SAMPLES:
            return False
        counts = [count for _, count in self._counts.most_common(2)] + [0]
        return counts[0] - counts[1] >= _DEVIATIONS * math.sqrt(counts[0] + counts[1])

    def add(self, stage: str, line: _Line | None, *, in_worker: bool) -> None:
        """Add a sample: what a process did, and where; None for a place that is not known."""
        self._counts[stage, line or _NO_LINE] += 1
        self._in_workers += in_worker

    def result(self) -> SlowLine | None:
        """Return the stage that takes longest, and its line if one stands out; None with too few samples."""
        total = self.samples
        if total < LEAST_SAMPLES:
            return None
        stages: Counter[str] = Counter()
        for (stage, _), count in self._counts.items():
            stages[stage] += count
        stage, in_stage = stages.most_common(1)[0]
        lines = Counter({line: count for (name, line), count in self._counts.items() if name == stage})
        # The same line may be seen in several calls.
        places: Counter[_Line] = Counter()
        for (file, number, function, _), count in lines.items():
            places[file, number, function, ""] += count
        (place, count) = places.most_common(1)[0]
        found = SlowLine(
            stage,
            in_stage / total,
            samples=total,
            in_workers=2 * self._in_workers > total,
            of_step=self._of_step,
        )
        if place == _NO_LINE or count < LEAST_LINE_SHARE * total:
            return found
        call = max((line for line in lines if line[:3] == place[:3]), key=lambda line: lines[line])[3]
        file, number, function, _ = place
        return replace(found, file=file, line=number, function=function, call=call, share=count / total)
