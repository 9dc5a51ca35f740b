"""Counts samples of what a process does, and finds the stage and the line that take longest. Pure."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from torchperfd.slow_line import SlowLine, place_words

MIN_SAMPLES: Final = 8
"""With fewer samples nothing is reported."""
ENOUGH_SAMPLES: Final = 20
"""With as many, a line that stands out by chance once in a thousand times is certain."""
MIN_LINE_SHARE: Final = 0.25
"""A line stands out if at least this part of the samples is at it."""
MOST_OF: Final = 0.75
"""A line whose calls take this part of the samples is named if no line within these calls does."""
_DEVIATIONS: Final = 3.0

_Line = tuple[str, int, str, str]
"""File, number, function, and what the line calls."""
_Place = tuple[str, int, str]
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
        self._around: Counter[_Line] = Counter()
        self._elsewhere: set[_Place] = set()
        self._entries: Counter[tuple[_Place, _Place | None]] = Counter()

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

    def add(
        self,
        stage: str,
        line: _Line | None,
        *,
        in_worker: bool,
        callers: Sequence[_Line] = (),
        entry: _Place | None = None,
    ) -> None:
        """Add a sample: what a process did, and where.

        Args:
            line: None for a place that is not known.
            callers: The lines of the script that have led to it, the innermost first.
            entry: The line at which the stage enters the script, if it is another one.
        """
        self._counts[stage, line or _NO_LINE] += 1
        self._in_workers += in_worker
        if line is not None:
            self._entries[_place(line), entry] += 1
            # Each place once, however often a function calls itself, and the innermost first.
            once = {_place(each): each for each in (*reversed(callers), line)}
            self._around.update(reversed(once.values()))

    def add_elsewhere(self, lines: Sequence[_Line]) -> None:
        """Add a sample of another part of the step. Its lines call all parts, so none of them is named."""
        self._elsewhere.update(map(_place, lines))

    def result(self) -> SlowLine | None:
        """Return the stage that takes longest, and its line if one stands out; None with too few samples."""
        total = self.samples
        if total < MIN_SAMPLES:
            return None
        stages: Counter[str] = Counter()
        for (stage, _), count in self._counts.items():
            stages[stage] += count
        stage, in_stage = stages.most_common(1)[0]
        lines = Counter({line: count for (name, line), count in self._counts.items() if name == stage})
        place, count = _by_place(lines).most_common(1)[0]
        if count < MOST_OF * total:
            around = {each: n for each, n in self._around.items() if _place(each) not in self._elsewhere}
            shared = {each: n for each, n in _by_place(around).items() if n >= MOST_OF * total}
            if shared:
                # The further in, the fewer samples share a line.
                place, lines = min(shared, key=lambda each: shared[each]), Counter(around)
                count = shared[place]
        found = SlowLine(
            stage,
            in_stage / total,
            samples=total,
            in_workers=2 * self._in_workers > total,
            of_step=self._of_step,
        )
        if place == _place(_NO_LINE) or count < MIN_LINE_SHARE * total:
            return found
        call = max((line for line in lines if _place(line) == place), key=lambda line: lines[line])[3]
        file, number, function = place
        caller = self._entry_of(place)
        return replace(
            found, file=file, line=number, function=function, call=call, share=count / total, caller=caller
        )

    def _entry_of(self, place: _Place) -> str:
        """Return the line that has led to a place in most of its samples, in words; empty without one."""
        entries = {entry: count for (inner, entry), count in self._entries.items() if inner == place}
        most = max(entries, key=lambda entry: entries[entry], default=None)
        return place_words(*most) if most and 2 * entries[most] > sum(entries.values()) else ""


def _place(line: _Line) -> _Place:
    return line[:3]


def _by_place(lines: Mapping[_Line, int]) -> Counter[_Place]:
    """Return the samples of each place: the same line may be seen in several calls."""
    places: Counter[_Place] = Counter()
    for line, count in lines.items():
        places[_place(line)] += count
    return places
