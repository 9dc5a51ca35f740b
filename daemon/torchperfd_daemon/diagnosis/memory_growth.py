"""Finds the rank whose memory will be full soon. Pure."""

from collections.abc import Sequence
from typing import Final

from torchperfd_daemon.diagnosis.evidence import RankEvidence

FULL_SOON_S: Final = 3600.0
"""Growing memory is reported if it will be full within this time."""
FORESIGHT: Final = 150.0
"""Growth is extrapolated to at most this multiple of the time over which it was observed."""


def full_first(growing: Sequence[RankEvidence]) -> tuple[RankEvidence, float] | None:
    """Return the rank whose memory is full first, and in how many seconds; None if that is not soon."""
    times = [(each, each.full_in_seconds) for each in growing if each.full_in_seconds is not None]
    rank, seconds = min(times, key=lambda each: each[1], default=(None, 0.0))
    if rank is None or seconds > min(FULL_SOON_S, FORESIGHT * rank.grows_for_seconds):
        return None
    return rank, seconds
