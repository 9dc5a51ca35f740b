"""When the flusher flushes. Pure."""

from dataclasses import dataclass
from typing import Final

REPORT_S: Final = 1.0
SHORT_STEPS_S: Final = 4.0
"""Beside short steps: each flush delays one of them by about its own length."""
SHORT_STEP_S: Final = 0.005
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
    """

    unix_seconds: float
    steps: int = 0
    step_seconds: float = 0.0
    is_live: bool = False


def flush_interval(state: FlushState) -> float:
    """Return the seconds from flush to flush."""
    is_short = 0 < state.step_seconds < SHORT_STEP_S and state.steps >= _FIRST_STEPS
    return SHORT_STEPS_S if is_short and not state.is_live else REPORT_S


def next_flush(state: FlushState) -> float:
    """Return the seconds until the next flush, above 0 and at most the interval.

    Flushes are aligned to the wall clock, so that all ranks pay the cost at the same moment instead of
    delaying each other.
    """
    interval = flush_interval(state)
    return interval - state.unix_seconds % interval
