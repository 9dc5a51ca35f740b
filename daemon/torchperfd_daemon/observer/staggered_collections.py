"""Finds what garbage collections cost ranks that wait for each other and collect at different steps.

A collection delays all ranks, so that a step takes as long as if every rank had collected in it. Each rank's
own collections may be a small part of its steps, and those of all ranks a large one.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from torchperfd_daemon.diagnosis import RankEvidence
from torchperfd_daemon.diagnosis.cause_table import MIN_SHARE
from torchperfd_daemon.diagnosis.edits import Pauses, without_pauses
from torchperfd_daemon.observer.rank_watch import RankWatch

_ALIKE: Final = 0.5
"""Ranks collect alike if most of them collect for this part of the longest time of any."""
_BEYOND: Final = 1.5
"""Ranks collect at different steps if they lose this multiple of the longest time of any."""

Seen = Sequence[tuple[RankWatch, RankEvidence]]


def with_staggered(ranks: Seen) -> list[RankEvidence]:
    """Return the evidence, in which each rank's collections cost what those of all ranks cost together.

    Unchanged if ranks do not wait for each other, if some collect much more than others, or if they collect
    at the same steps.

    The cost is what the newest steps lose without all ranks' pauses
    (:func:`~torchperfd_daemon.diagnosis.edits.without_pauses`). How often and how long ranks collect is
    taken from all samples of this regime, or from the whole run if some rank has not collected in them: short
    collections of the start say nothing about long ones of now.
    """
    evidence = [each for _, each in ranks]
    # Without a device, diagnosis replays single steps, each with the pauses of its own rank.
    by_means = any(each.on_device or each.device_busy is not None for each in evidence)
    if len(ranks) < 2 or not by_means or not any(each.wait_seconds for each in evidence):
        return evidence
    pauses = _pauses([watch for watch, _ in ranks])
    collected = [sum(each.per_step * each.seconds for each in rank) for rank in pauses]
    longest, step_seconds = max(collected), statistics.median(each.step_seconds for each in evidence)
    alike = statistics.median(collected) >= _ALIKE * longest
    if not alike or sum(collected) < MIN_SHARE * step_seconds:
        return evidence
    steps = np.sum([*ranks[0][0].work({}).phase_seconds.values()], axis=0)
    lost = float(np.mean(steps - without_pauses(steps, _of_all(pauses))))
    if lost < _BEYOND * longest:
        return evidence
    return [
        replace(
            each,
            collected_seconds=lost,
            collects_apart=True,
            before=each.before
            and replace(each.before, collected_seconds=lost * _ratio(each.before, evidence)),
        )
        for each in evidence
    ]


def _pauses(watches: Sequence[RankWatch]) -> list[list[Pauses]]:
    """Return each rank's collections by generation."""
    lately = [watch.collections_in_regime() for watch in watches]
    if all(any(each.per_step for each in rank) for rank in lately):
        return lately
    return [
        [
            Pauses.of(each.calls, each.ns, max(1, watch.rank.totals.train.steps))
            for each in watch.rank.totals.gc
        ]
        for watch in watches
    ]


def _of_all(pauses: Sequence[Sequence[Pauses]]) -> list[Pauses]:
    """Return the collections of all ranks by generation: rare ones add up, frequent ones run side by side."""
    added = []
    for generation in zip(*pauses, strict=False):
        count = max(
            max(each.per_step for each in generation), min(1.0, sum(each.per_step for each in generation))
        )
        added.append(Pauses(count, max(each.seconds for each in generation)))
    return added


def _ratio(before: RankEvidence, now: Sequence[RankEvidence]) -> float:
    """Return a rank's collections in the past as a multiple of what ranks collect now."""
    present = statistics.fmean(each.collected_seconds for each in now)
    return min(1.0, before.collected_seconds / present) if present > 0 else 1.0
