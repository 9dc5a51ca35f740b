"""Finds the rank that the others wait for: in a run that goes on by comparison, in a stalled one by stacks.

The cost of staggered garbage collections is found by the same comparison.
"""

import re
import shlex
import statistics
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Final

import numpy as np

from torchperfd_daemon.diagnosis.cause_table import MIN_CAUSE_SHARE, MOST_OF
from torchperfd_daemon.diagnosis.detect.robust_statistics import median_of
from torchperfd_daemon.diagnosis.detect.straggler import (
    MIN_ELSEWHERE_SECONDS,
    MIN_SAMPLES,
    MIN_SHARE,
    MIN_STEPS,
    WAITING,
    RankWork,
    Stall,
    Straggler,
    find_stragglers,
    slowest_and_peers,
)
from torchperfd_daemon.diagnosis.edits import Pauses, without_pauses
from torchperfd_daemon.diagnosis.evidence import RankEvidence, do_devices_wait, wait_for_each_other
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.observer.rank_watch import RankWatch
from torchperfd_daemon.stacks.activity import Kind, activity
from torchperfd_daemon.stacks.merge import Merged, merge
from torchperfd_daemon.stacks.model import Outcome, RankStacks
from torchperfd_daemon.stacks.report import sentence

_SAVING: Final = ("torch/serialization.py", "safetensors/torch.py")
_SAVERS: Final = "torch/distributed/checkpoint/"
# Functions with these names do not train, even if no phase was measured in them.
_ASIDE: Final = re.compile(r"_*(save|eval|valid|test|export|checkpoint)", re.IGNORECASE)
_NO_STEP: Final = re.compile(r"^no step for \d+ s")
_STEP_AHEAD: Final = "is ahead of the others"


def find_culprit(run: str, ranks: Sequence[RankStacks], stall: Stall, run_ranks: int) -> Verdict | None:
    """Return the verdict on a stall; None while the stacks do not show a hang.

    A run hangs if ranks wait in a collective, in backward or for data, or if a rank is stopped or gone. The
    culprit is the rank that does not wait where most of the others do. If two ranks wait in different places,
    it is the one that is a step ahead, since it has skipped a collective. During the first ten minutes there
    is no verdict if no rank waits, or if the rank that the others wait for saves or validates: the script may
    do this on purpose. If all ranks of this node wait for each other and the run has ranks elsewhere, the
    verdict is left to the daemon of the culprit's node.

    Args:
        ranks: The stacks of the ranks on this node.
        stall: The stall during which the stacks were read.
        run_ranks: The number of ranks of the run on all nodes.
    """
    merged = merge(ranks)
    patient = stall.waited_seconds < MIN_ELSEWHERE_SECONDS
    gone = [rank for rank in merged.without_stacks if rank.outcome in (Outcome.STOPPED, Outcome.GONE)]
    waits = [group for group in merged.groups if _waits(group.activity.kind, run_ranks)]
    if not ranks or merged.goes_on or (patient and not gone and not waits):
        return None
    culprits = _culprits(ranks, merged, gone)
    if patient and any(_is_aside(rank) for rank in culprits):
        return None
    if not culprits and run_ranks > len(ranks):
        return None
    words = f"no step for {stall.waited_seconds:.0f} s: {sentence(merged)}"
    first = culprits[0] if culprits else None
    if first is not None and first.rank not in merged.odd and len(ranks) > 1:
        words += f"; rank {first.rank} {_STEP_AHEAD}"
    command = f"torchperfd stacks --run {shlex.quote(run)}"
    node, number, phase = (first.node, first.rank, first.phase) if first else (ranks[0].node, None, "")
    return Verdict(
        Cause.HANG, run, node, number, phase, words, 0.0, command, stalled_seconds=stall.waited_seconds
    )


def lasting(hang: Verdict, seconds: float) -> Verdict:
    """Return the verdict on a hang, updated to its present length in seconds."""
    words = _NO_STEP.sub(f"no step for {seconds:.0f} s", hang.evidence)
    return replace(hang, evidence=words, stalled_seconds=seconds)


def _waits(kind: Kind, run_ranks: int) -> bool:
    return kind in (Kind.COLLECTIVE, Kind.DATA) or (kind is Kind.BACKWARD and run_ranks > 1)


def _culprits(ranks: Sequence[RankStacks], merged: Merged, gone: Sequence[RankStacks]) -> list[RankStacks]:
    """Return the culprits, the likeliest first; empty if all ranks are alike."""
    if len(ranks) == 1:
        return list(ranks)
    if gone:
        # A rank that has finished explains a hang less than one that has died.
        return sorted(gone, key=lambda rank: (rank.reason == "it has finished", rank.rank))
    odd = [rank for rank in ranks if rank.rank in merged.odd]
    if odd:
        # A rank that waits itself is less likely to be the cause than one that works.
        return sorted(odd, key=lambda rank: (_is_waiting(rank), rank.rank))
    steps = {rank.step for rank in ranks if rank.step is not None}
    ahead = [rank for rank in ranks if rank.step is not None and rank.step == max(steps)]
    return ahead if len(steps) > 1 and 2 * len(ahead) <= len(ranks) else []


def _is_waiting(rank: RankStacks) -> bool:
    training = rank.training
    return (
        training is not None
        and bool(training.frames)
        and activity(training.frames).kind in (Kind.COLLECTIVE, Kind.BACKWARD)
    )


def _is_aside(rank: RankStacks) -> bool:
    """Return whether a rank saves or validates, by the names of its files and functions."""
    training = rank.training
    return training is not None and any(
        frame.file.endswith(_SAVING) or _SAVERS in frame.file or _ASIDE.match(frame.function)
        for frame in training.frames
    )


_TIMED: Final = (
    attrgetter("throttled_seconds"),
    attrgetter("collected_seconds"),
    attrgetter("compiled_seconds"),
)
"""Losses within a rank's own work that are measured directly."""

Seen = Sequence[tuple[RankWatch, RankEvidence]]


@dataclass(frozen=True, slots=True)
class Lateness:
    """The stragglers of a run.

    Attributes:
        seconds: Per rank, its own work per step above the peers' median.
        phases: Per rank, the phase that contains most of that.
        peer_seconds: The peers' median own work per step.
        ever_since: Those of the ranks that were as late before the run became slower.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    phases: dict[int, str] = field(default_factory=dict)
    peer_seconds: float = 0.0
    ever_since: frozenset[int] = frozenset()


def find_lateness(ranks: Seen, known: AbstractSet[int], period: int) -> Lateness:
    """Return the ranks that are late beyond chance; none if ranks do not wait for each other.

    Pipeline stages do different work: each rank is compared with those of its own stage.

    Args:
        known: The ranks that were late at the previous sample.
        period: The number of steps from one long step to the next; 1 without a period.
    """
    if not wait_for_each_other([each for _, each in ranks]):
        return Lateness()
    stages: dict[int | None, list[tuple[RankWatch, RankEvidence]]] = {}
    for watch, each in ranks:
        stages.setdefault(each.stage, []).append((watch, each))
    found = [_in_stage(stage, known, period) for stage in stages.values() if len(stage) > 1]
    return Lateness(
        {rank: late for each in found for rank, late in each.seconds.items()},
        {rank: phase for each in found for rank, phase in each.phases.items()},
        statistics.median(each.peer_seconds for each in found) if found else 0.0,
        frozenset(rank for each in found for rank in each.ever_since),
    )


def _in_stage(ranks: Seen, known: AbstractSet[int], period: int) -> Lateness:
    evidence = [each for _, each in ranks]
    losses = _losses(evidence)
    on_device = do_devices_wait(evidence)
    usual = _usual_lateness(evidence, on_device=on_device)
    late = _late(ranks, usual, known, losses, period, on_device=on_device) if usual else Lateness()
    if late.seconds:
        return late
    # A rank that was always slow is late as well, but does not cause the slowdown.
    late = _late(ranks, {}, known, losses, period, on_device=on_device)
    return replace(late, ever_since=frozenset(late.seconds if usual else ()))


def _losses(ranks: Collection[RankEvidence]) -> dict[int, float]:
    """Return the ranks that lose more to one of :data:`_TIMED` than most ranks do, with the seconds per step.

    Such losses occur in some steps only, or partly while the rank waits anyway. The lateness that remains
    varies, so that it would long be indistinguishable from chance without this hint.
    """
    found: dict[int, float] = {}
    for lost in _TIMED:
        usual = statistics.median_low(map(lost, ranks))
        for each in ranks:
            if (more := lost(each) - usual) >= MIN_SHARE * each.step_seconds:
                found[each.rank] = max(more, found.get(each.rank, 0.0))
    return found


def _late(
    ranks: Seen,
    usual: Mapping[int, Mapping[str, float]],
    known: AbstractSet[int],
    losses: Mapping[int, float],
    period: int,
    *,
    on_device: bool,
) -> Lateness:
    """Return the ranks that are late beyond chance, after subtracting their usual lateness.

    A rank that is late by most of what it was measured to lose is late because of that, however rare the long
    steps are.

    Args:
        known: The ranks that were late at the previous sample.
        losses: Of each rank that loses time of a measured kind, the seconds per step.
        on_device: Compare times on the devices: samples, each of many steps, in place of single steps.
    """
    own = np.array([each.own_seconds - sum(usual.get(each.rank, {}).values()) for _, each in ranks])
    order = np.argsort(-own)
    middle = median_of(own[order[1:]])
    least = MIN_SHARE * middle
    if own[order[0]] - middle < least:
        return Lateness(peer_seconds=middle)
    chosen = [ranks[index] for index in slowest_and_peers(order.tolist())]
    work = RankWatch.device_work if on_device else RankWatch.work
    suspects = known | losses.keys()
    works = [work(watch, usual.get(evidence.rank, {})) for watch, evidence in chosen]
    stragglers = _stragglers(works, len(ranks), suspects, 1 if on_device else period)
    late = {each.rank: float(seconds) - middle for (_, each), seconds in zip(ranks, own, strict=True)}
    phases = {rank: "" for rank, lost in losses.items() if MOST_OF * lost <= late[rank]}
    phases |= {each.rank: each.phase for each in stragglers}
    seconds = {rank: late[rank] for rank in phases if late[rank] >= least}
    return Lateness(seconds, {rank: phases[rank] for rank in seconds}, middle)


def _stragglers(works: list[RankWork], among: int, suspects: Collection[int], period: int) -> list[Straggler]:
    """Return the ranks that are late beyond chance in the whole window, or else in its newest part.

    If only every n-th step is slow, or steps vary much, the onset is detected late or not at all, and the
    window contains steps from before it. Until most of its steps are slow, they differ from each other by
    more than the rank does from its peers.
    """
    found = find_stragglers(works, among, suspects, period)
    if found:
        return found
    # Two tests share the permitted chance of a false positive.
    return find_stragglers([_newest(each) for each in works], 2 * among, suspects, period)


def _newest(work: RankWork) -> RankWork:
    """Return the steps in the newest half of a window's time; if these are slow, they are the fewer ones.

    Of means of many steps, return as many as are needed to compare ranks.
    """
    steps = MIN_SAMPLES if work.are_means else MIN_STEPS
    if work.phase_seconds and not work.are_means:
        spent = np.cumsum(np.sum([*work.phase_seconds.values()], axis=0)[::-1])
        steps = max(steps, int(np.count_nonzero(spent <= spent[-1:] / 2)) + 1)
    return replace(work, phase_seconds={name: column[-steps:] for name, column in work.phase_seconds.items()})


def _usual_lateness(ranks: Sequence[RankEvidence], *, on_device: bool) -> dict[int, dict[str, float]]:
    """Return by how much each phase of each rank was longer than the ranks' median before a slowdown.

    Differences that existed before did not make the run slower. Empty while there is no past.
    """
    before = {
        each.rank: each.before.device_phase_seconds if on_device else each.before.phase_seconds
        for each in ranks
        if each.before
    }
    if len(before) < len(ranks):
        return {}
    names = {name for phases in before.values() for name in phases} - WAITING
    middle = {name: statistics.median(each.get(name, 0.0) for each in before.values()) for name in names}
    return {
        rank: {name: phases.get(name, 0.0) - middle[name] for name in names}
        for rank, phases in before.items()
    }


_ALIKE: Final = 0.5
"""Ranks collect alike if most of them collect for this part of the longest time of any."""
_BEYOND: Final = 1.5
"""Ranks collect at different steps if they lose this multiple of the longest time of any."""


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
    if not alike or sum(collected) < MIN_CAUSE_SHARE * step_seconds:
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
