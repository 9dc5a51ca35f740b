"""When the flusher flushes. Pure."""

from dataclasses import dataclass
from typing import Final

REPORT_S: Final = 1.0
SHORT_STEPS_S: Final = 4.0
"""Beside short steps: each flush delays one of them by about its own length."""
SHORT_STEP_S: Final = 0.005
WATCHED_S: Final = 0.5
"""While a live page shows the run: a step is to be on the screen within a second."""
_FIRST_STEPS: Final = 10_000
"""Flushes stay frequent for so many steps: users wait for the first ones to show up."""


@dataclass(frozen=True, slots=True)
class FlushState:
    """What the time until the next flush depends on.

    Attributes:
        unix_seconds: The wall clock.
        steps: Training steps so far.
        step_seconds: Their recent mean; 0 before the first.
        is_live: Whether the training thread reads its events itself, as during a capture.
        is_watched: Whether a live page shows the run.
    """

    unix_seconds: float
    steps: int = 0
    step_seconds: float = 0.0
    is_live: bool = False
    is_watched: bool = False


@dataclass(frozen=True, slots=True)
class NextFlush:
    """When to flush next.

    Attributes:
        seconds: Until then, above 0 and at most the interval.
        is_extra: Whether it lies between two regular flushes, for a live page only.
    """

    seconds: float
    is_extra: bool = False


def flush_interval(state: FlushState) -> float:
    """Return the seconds from one regular flush to the next."""
    is_short = 0 < state.step_seconds < SHORT_STEP_S and state.steps >= _FIRST_STEPS
    return SHORT_STEPS_S if is_short and not state.is_live else REPORT_S


def next_flush(state: FlushState) -> NextFlush:
    """Return when to flush next.

    Flushes are aligned to the wall clock, so that all ranks pay the cost at the same moment instead of
    delaying each other.
    """
    regular = _until_multiple_of(flush_interval(state), state.unix_seconds)
    extra = _until_multiple_of(WATCHED_S, state.unix_seconds)
    if state.is_watched and extra < regular:
        return NextFlush(extra, is_extra=True)
    return NextFlush(regular)


def _until_multiple_of(interval: float, unix_seconds: float) -> float:
    return interval - unix_seconds % interval
