"""Each rank's own measurements: every step's time, and the injected part of it."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

NEWEST_SECONDS: Final = 10.0
"""Of a fault that grows, the steps of this long before its end count; a verdict has as long a window."""
SETTLED: Final = 20
"""Steps at the start, after an onset and after an end, that no average is taken of: things get warm."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank.

    Attributes:
        began_ns: Unix time.
        duration_ns: Wall time.
        injected_ns: The part of it that the fault has taken, as far as it can be timed.
    """

    step: int
    began_ns: int
    duration_ns: int
    injected_ns: int


class Journal:
    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._began = self._began_unix = 0

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def begin(self) -> None:
        self._began_unix, self._began = time.time_ns(), time.perf_counter_ns()

    def end(self, step: int, injected_ns: int) -> int:
        """It has ended; return how long it took."""
        lasted = time.perf_counter_ns() - self._began
        self._file.write(b"%d %d %d %d\n" % (step, self._began_unix, lasted, injected_ns))
        return lasted


def read(path: Path) -> list[Step]:
    """Return a rank's steps so far; a line that is being written is left out."""
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    return [Step(*map(int, line.split())) for line in whole.splitlines()]


def onset_unix(ranks: Mapping[int, Sequence[Step]], onset: int) -> float | None:
    """Return when the first rank began the step of the onset, or ended the one before it; None: not yet."""
    begins = [step.began_ns for steps in ranks.values() for step in steps if step.step == onset]
    ends = [
        step.began_ns + step.duration_ns
        for steps in ranks.values()
        for step in steps
        if step.step == onset - 1
    ]
    times = begins or ends
    return min(times) / 1e9 if times else None


def first_after(ranks: Mapping[int, Sequence[Step]], unix: float) -> int | None:
    """Return the first step that any rank began after a moment, in seconds; None: none yet."""
    return min(
        (step.step for steps in ranks.values() for step in steps if step.began_ns >= unix * 1e9), default=None
    )


def last_step(ranks: Mapping[int, Sequence[Step]]) -> int:
    """Return the last step that all ranks have ended; -1: there is none."""
    return min((max((step.step for step in steps), default=-1) for steps in ranks.values()), default=-1)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a fault did to a job; seconds per step.

    Attributes:
        before: The step before the onset; 0 where the fault was there from the start.
        after: The step after it, with the fault.
        injected: What the fault added to the slowest rank, as far as it timed itself.
        grown: By how much the mean step became longer.
        healed: The step after the fault's end; None where the fault was not ended.
    """

    before: float
    after: float
    injected: float
    grown: float
    healed: float | None = None

    @property
    def without(self) -> float:
        """The step without the fault at the time of the fault: midway between those before and after it."""
        if self.healed is None:
            return self.before
        return (self.before + self.healed) / 2 if self.before else self.healed

    @property
    def drift(self) -> float:
        """By how much steps without the fault differ before and after it, as a part of them."""
        known = self.healed is not None and self.before
        return abs((self.healed or 0.0) - self.before) / self.without if known else 0.0

    @property
    def change(self) -> float:
        """By how much steps became longer."""
        return self.after - self.without


def measure(
    ranks: Mapping[int, Sequence[Step]],
    onset: int,
    period: int,
    end_unix: float | None = None,
    *,
    grows: bool = False,
) -> Measured:
    """Return a job's own measurement of its fault, which ended at ``end_unix``, in seconds; None: not ended.

    A time is the median over the means of any ``period`` consecutive steps: what a neighbour on the machine
    does to single steps does not count, and what comes once in a period does. A step's is that on the median
    rank; the injected one is, step by step, the most that any rank had. By how much the mean step has grown
    is the median rank's, too: of a fault that strikes now here and now there the mean has all; without the
    fault it is midway between those before and after it. Counted are steps that all ranks have ended: the one
    that is late has not written its newest.
    """
    end = last_step(ranks) + 1
    healed = end if end_unix is None else min(end, first_after(ranks, end_unix) or end)
    befores, afters, heals, grown = [], [], [], []
    most: dict[int, int] = {}
    for steps in ranks.values():
        later = [step for step in steps if onset + SETTLED <= step.step < healed]
        if grows and later:
            first_ns = later[-1].began_ns - NEWEST_SECONDS * 1e9
            later = [step for step in later if step.began_ns >= first_ns]
        before_ns = [step.duration_ns for step in steps if SETTLED <= step.step < onset]
        after_ns = [step.duration_ns for step in later]
        healed_ns = [step.duration_ns for step in steps if healed + SETTLED <= step.step < end]
        befores.append(_usual(before_ns, period))
        afters.append(_usual(after_ns, period))
        heals.append(_usual(healed_ns, period))
        if after_ns and (before_ns or healed_ns):
            well = [statistics.fmean(each) for each in (before_ns, healed_ns) if each]
            grown.append((statistics.fmean(after_ns) - statistics.fmean(well)) / 1e9)
        for step in later:
            most[step.step] = max(most.get(step.step, 0), step.injected_ns)
    return Measured(
        before=statistics.median(befores) if befores else 0.0,
        after=statistics.median(afters) if afters else 0.0,
        injected=_usual([most[step] for step in sorted(most)], period),
        grown=statistics.median(grown) if grown else 0.0,
        healed=statistics.median(heals) or None if heals else None,
    )


def _usual(spent_ns: Sequence[int], period: int) -> float:
    means = [
        statistics.fmean(spent_ns[first : first + period]) for first in range(len(spent_ns) - period + 1)
    ]
    return statistics.median(means) / 1e9 if means else 0.0
