"""Holds the figures of a verdict until they change beyond their own error. Pure.

The cost of a steady loop differs from window to window. A verdict that followed each window would show
another figure each second, and each reader of it another one.
"""

import re
import statistics
from collections import deque
from typing import Final

from torchperfd_daemon.diagnosis import Verdict
from torchperfd_daemon.diagnosis.windows import WINDOW_SAMPLES

_ERRORS: Final = 5.0
"""Figures change if they differ by more than so many standard deviations of a window's."""
_LEAST: Final = 0.01
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
    """

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        self._figures: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)
        self._found = 0

    def update(self, newest: Verdict) -> None:
        """Add the verdict of a window; windows overlap."""
        self._found += 1
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
            if abs(now - held) > max(_LEAST * (held if column else 1.0), _ERRORS * deviation):
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
