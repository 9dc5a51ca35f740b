"""Limits a verdict if this daemon does not see all ranks of the job."""

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Final

from torchperfd.durations import duration
from torchperfd_daemon.diagnosis.evidence import RankEvidence
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict

_LEAST_SHARE: Final = 0.05
"""A wait in collectives below this share of the step is not a sign of a slow rank elsewhere."""


def limit_to_seen(verdict: Verdict, ranks: Sequence[RankEvidence], unseen: int) -> Verdict:
    """Return a verdict that claims nothing about ranks that were not seen.

    A run is not healthy just because the ranks here are: if all of them wait in collectives, they may wait
    for a rank elsewhere, and the cause is unknown.

    Args:
        verdict: The verdict on the ranks that were seen.
        unseen: The number of the job's other ranks.
    """
    if verdict.cause is not Cause.NONE or unseen <= 0 or not ranks:
        return verdict
    shortest = min(ranks, key=attrgetter("wait_seconds"))
    verb = "is" if unseen == 1 else "are"
    words = f"{unseen} of the job's {len(ranks) + unseen} ranks {verb} not seen by this daemon"
    if shortest.wait_seconds < _LEAST_SHARE * shortest.step_seconds:
        return replace(verdict, evidence=f"{verdict.evidence}; {words}")
    waited = f"all ranks here wait in collectives for {duration(shortest.wait_seconds)} of each"
    return replace(
        verdict,
        cause=Cause.UNKNOWN,
        evidence=f"{waited} {duration(shortest.step_seconds)} step, and {words}",
        next_command="torchperfd diagnose --fleet",
    )
