"""Publishes a verdict only after several samples agree, and withdraws it only after several without it.

The figures of a verdict are held until they change beyond their own error. The cost of a steady loop differs
from window to window: a verdict that followed each window would show another figure each second.
"""

import re
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from torchperfd_daemon.diagnosis.evidence import MIN_FINDINGS, WINDOW_SAMPLES
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict

_ERRORS: Final = 5.0
"""Figures change if they differ by more than so many standard deviations of a window's."""
_MIN_CHANGE: Final = 0.01
"""Smaller changes than this part of the step are none."""
_REMEMBERED: Final = 12 * WINDOW_SAMPLES
_TO_DEVIATION: Final = 1.4826 / 2**0.5
"""A median of absolute differences between two windows, times this, is the standard deviation of one."""
_NUMBER: Final = re.compile(r"[\d.,]+")


class HeldFigures:
    """The verdict on one cause, with figures that are held.

    Its cost, its step and what its fix saves are those of one window. They are replaced by those of the
    newest window if these differ by more than windows of this run do, and once when the first whole window is
    there, or when the evidence says something else. Evidence and figures are always of the same window.

    Attributes:
        verdict: As it is published.
        newest: That of the newest window in which the cause was found.
    """

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = self.newest = verdict
        self._figures: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)
        self._found = 0

    def update(self, newest: Verdict) -> None:
        """Add the verdict of a window; windows overlap."""
        self._found += 1
        self.newest = newest
        self._figures.append(_figures(newest))
        is_whole = self._found == WINDOW_SAMPLES
        says_else = _words(newest) != _words(self.verdict)
        if is_whole or says_else or self._has_changed(newest) or not newest.step_seconds:
            self.verdict = newest

    def _has_changed(self, newest: Verdict) -> bool:
        """Return whether a figure differs from the held one by more than windows differ by chance."""
        rows = [*self._figures]
        for column, (now, held) in enumerate(zip(_figures(newest), _figures(self.verdict), strict=True)):
            # Windows that do not overlap, so that their difference has the error of both.
            pairs = zip(rows, rows[WINDOW_SAMPLES:], strict=False)
            apart = [abs(later[column] - earlier[column]) for earlier, later in pairs]
            deviation = _TO_DEVIATION * statistics.median(apart) if apart else 0.0
            if abs(now - held) > max(_MIN_CHANGE * (held if column else 1.0), _ERRORS * deviation):
                return True
        return False


def _figures(verdict: Verdict) -> tuple[float, float]:
    """Return the cost as a part of the step, and the step in seconds."""
    return verdict.share, verdict.step_seconds


def _words(verdict: Verdict) -> tuple[object, ...]:
    """Return what a verdict says besides its figures."""
    line = verdict.line.words if verdict.line else ""
    return (
        _NUMBER.sub("", verdict.evidence),
        verdict.fix,
        verdict.phase,
        verdict.node,
        verdict.onset_step,
        verdict.has_grown,
        verdict.next_command,
        verdict.unseen_ranks,
        _NUMBER.sub("", line),
    )


MIN_FINDINGS_WITH_ONSET: Final = 2
"""A verdict with an onset is published sooner, since onset detection has confirmed that it lasts."""
_REPLACES_ABOVE: Final = 1.25
"""Another verdict replaces the first one only if its share of the step is this many times as large."""


@dataclass(slots=True)
class _Candidate:
    figures: HeldFigures
    found: int = 0
    missed: int = 0
    published: bool = False

    @property
    def verdict(self) -> Verdict:
        return self.figures.verdict


class VerdictDebouncer:
    """The published verdicts on one run. Two verdicts are the same if their cause and rank are."""

    def __init__(self) -> None:
        self._candidates: dict[tuple[Cause, int | None], _Candidate] = {}
        self.verdicts: tuple[Verdict, ...] = ()
        """The published verdicts, the one with the largest share of its own step first. All have the account
        and the note of the newest sample."""

    @property
    def first(self) -> Verdict | None:
        """The first published verdict; None without any."""
        return self.verdicts[0] if self.verdicts else None

    def update(self, found: Sequence[Verdict]) -> bool:
        """Add the verdicts found at one sample; return whether the first published verdict has changed."""
        for candidate in self._candidates.values():
            candidate.missed += 1
        for verdict in found:
            key = verdict.cause, verdict.rank
            candidate = self._candidates.setdefault(key, _Candidate(HeldFigures(verdict)))
            candidate.figures.update(verdict)
            candidate.found = candidate.found + 1 if candidate.missed == 1 or not candidate.found else 1
            candidate.missed = 0
            candidate.published = candidate.published or candidate.found >= (
                MIN_FINDINGS if verdict.onset_step is None else MIN_FINDINGS_WITH_ONSET
            )
        self._candidates = {
            key: candidate
            for key, candidate in self._candidates.items()
            if candidate.missed < (MIN_FINDINGS if candidate.published else 1)
        }
        before = self.first
        published = _one_of_each_cause([each for each in self._candidates.values() if each.published])
        troubles = [verdict for verdict in published if verdict.cause is not Cause.NONE]
        # A switch is the owner's to change, and the state of the machine is not.
        has_switch = any(each.cause is Cause.DEBUG_SWITCH for each in troubles)
        ordered = sorted(
            troubles or published,
            key=lambda each: (
                has_switch and each.cause is Cause.CPU_CONTENTION,
                -self._weight(each, before),
            ),
        )
        # These are of the run, whichever cause is first, and of the newest sample.
        account = next((each.account for each in found if each.account is not None), None)
        note = next((each.note for each in found if each.note), "")
        self.verdicts = tuple(replace(each, account=account, note=note) for each in ordered)
        first = self.first
        if first is None or before is None:
            return first is not before
        return not _same(first, before)

    def newest(self, verdict: Verdict) -> Verdict:
        """Return a published verdict with the figures of the newest window in which it was found."""
        candidate = self._candidates.get((verdict.cause, verdict.rank))
        if candidate is None:
            return verdict
        return replace(candidate.figures.newest, account=verdict.account, note=verdict.note)

    def _weight(self, verdict: Verdict, first: Verdict | None) -> float:
        is_first = first is not None and _same(verdict, first)
        return verdict.share * (_REPLACES_ABOVE if is_first else 1.0)


def _one_of_each_cause(candidates: Sequence[_Candidate]) -> list[Verdict]:
    """Return one verdict on each cause: that on all ranks, else the one that was found last.

    Near a limit, successive samples find the same loss on all ranks and on one of them.
    """
    best: dict[Cause, _Candidate] = {}
    for each in candidates:
        other = best.setdefault(each.verdict.cause, each)
        if (each.verdict.rank is not None, each.missed) < (other.verdict.rank is not None, other.missed):
            best[each.verdict.cause] = each
    return [each.verdict for each in best.values()]


def _same(one: Verdict, other: Verdict) -> bool:
    return (one.cause, one.rank) == (other.cause, other.rank)
