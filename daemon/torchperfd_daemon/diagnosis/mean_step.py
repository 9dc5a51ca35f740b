"""The verdict on the mean steps of a run's ranks, for a run of which no other one is published. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from torchperfd.model.formatting import duration
from torchperfd_daemon.diagnosis.claims import limit_claim
from torchperfd_daemon.diagnosis.detect.straggler import RankWork
from torchperfd_daemon.diagnosis.evidence import RankEvidence, could_have_found
from torchperfd_daemon.diagnosis.remedies import UNMEASURED, LoaderCounsel
from torchperfd_daemon.diagnosis.step_model import Float64
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict, capture_command
from torchperfd_daemon.diagnosis.verdicts import rank_causes

MIN_STEPS: Final = 20
"""With fewer steps, no run is called healthy by its mean step..."""
MIN_LONG_STEPS: Final = 8
"""...or with fewer than this, if they have taken ten seconds."""
_LONG_S: Final = 10.0
_NO_STEPS: Final[Float64] = np.zeros(0)
# What a run does in its first seconds says little about these: windows of steps decide on others.
_KNOWN_EARLY: Final = frozenset({"data", "loss", "other"})


def diagnose(
    run: str,
    ranks: Sequence[RankEvidence],
    counsel: LoaderCounsel = UNMEASURED,
    works: Mapping[int, RankWork] | None = None,
    *,
    has_ended: bool = False,
    newest: Float64 = _NO_STEPS,
) -> Verdict:
    """Return the verdict on a run from its ranks' mean training steps.

    The causes are those of :func:`~.verdicts.rank_causes`. While the run goes on, only those count that show
    in data, loss and ``other``; with fewer than :data:`MIN_STEPS` steps only a wait for data. Without any
    the cause is unknown as long as it could still be found; then :func:`~.claims.limit_claim` decides whether
    the job is healthy.

    Args:
        ranks: All ranks of the job that are known here; those without a step say nothing.
        counsel: What the run is advised on its loaders.
        works: Single steps of each rank, by rank.
        has_ended: Whether the run makes no more steps, in which a cause could still be found.
        newest: The newest steps of the slowest rank, in seconds; shape (steps,).
    """
    seen = [rank for rank in ranks if rank.steps and rank.step_seconds > 0]
    if not seen:
        return Verdict(Cause.UNKNOWN, run, "", None, "", "no training step was seen", 0.0, "torchperfd ps")
    unseen = max(rank.world_size for rank in ranks) - len({rank.rank for rank in seen})
    slowest = max(seen, key=lambda rank: rank.step_seconds)
    if not slowest.phase_seconds:
        words = f"a step takes {duration(slowest.step_seconds)}, and its phases were not recorded"
        return _unknown(run, slowest, words)
    are_enough = all(map(_has_enough, seen))
    verdicts = rank_causes(run, seen, counsel, works)
    found = [each for each in verdicts if each.cause not in (Cause.NONE, Cause.UNKNOWN)]
    if not (has_ended and are_enough):
        found = [each for each in found if each.phase in (_KNOWN_EARLY if are_enough else ("data",))]
    if found:
        first, *others = (replace(each, step_seconds=slowest.step_seconds, account=None) for each in found)
        first = replace(first, others=tuple(others), account=verdicts[0].account)
        return limit_claim(first, seen, unseen)
    may_change = not has_ended and not could_have_found(slowest.steps, slowest.step_seconds)
    if may_change or not _has_enough(slowest):
        words = f"too early: {slowest.steps} {'step' if slowest.steps == 1 else 'steps'}"
        words += f" after the first; a verdict needs {MIN_STEPS}" if has_ended else " so far"
        return _unknown(run, slowest, words)
    verdict = verdicts[0] if verdicts[0].cause is Cause.UNKNOWN else _nothing(verdicts[0], slowest)
    return limit_claim(verdict, seen, unseen, newest=newest)


def _nothing(verdict: Verdict, slowest: RankEvidence) -> Verdict:
    """Return the verdict without a cause, with the longest phase of the slowest rank."""
    step = slowest.step_seconds
    shares = {name: seconds / step for name, seconds in slowest.phase_seconds.items()}
    phase = max(shares, key=lambda name: shares[name])
    words = f"{phase} is {shares[phase]:.0%} of a {duration(step)} step, data {shares.get('data', 0.0):.0%}"
    return replace(
        verdict,
        node=slowest.node,
        phase=phase,
        evidence=f"nothing stands out: {words}",
        next_command=capture_command(verdict.run),
    )


def _unknown(run: str, slowest: RankEvidence, words: str) -> Verdict:
    return Verdict(Cause.UNKNOWN, run, slowest.node, None, "", words, 0.0, capture_command(run))


def _has_enough(rank: RankEvidence) -> bool:
    """Return whether a mean step says more than how a run starts."""
    long_enough = rank.steps * rank.step_seconds >= _LONG_S
    return rank.steps >= (MIN_LONG_STEPS if long_enough else MIN_STEPS)
