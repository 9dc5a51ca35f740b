"""From a run's evidence to its causes, each with what it costs, the costliest first."""

import statistics
from collections.abc import Sequence
from typing import Final

from torchperfd.durations import duration
from torchperfd_daemon.diagnosis.attribution import (
    EXPLAINED,
    LEAST_SHARE,
    MOST_OF,
    CauseAttribution,
    Measure,
    device_work,
    next_command,
)
from torchperfd_daemon.diagnosis.detect.straggler import WAITING
from torchperfd_daemon.diagnosis.evidence import RankEvidence
from torchperfd_daemon.diagnosis.remedies import ReadWorkerCost, unmeasured
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict

# Mechanisms that measure their own time. Their order is that of blame where two claim the same time: who is
# throttled also waits for the processor, and so does who has more to do, such as collections.
_MEASURED: Final[tuple[tuple[Cause, str, str, Measure], ...]] = (
    (
        Cause.CGROUP_THROTTLING,
        "",
        "held back by the control group's CPU quota",
        lambda each: each.throttled_seconds,
    ),
    (Cause.GARBAGE_COLLECTION, "", "in Python's garbage collector", lambda each: each.collected_seconds),
    (Cause.RECOMPILATION, "", "compiling graphs again", lambda each: each.compiled_seconds),
    (Cause.CHECKPOINT, "checkpoint", "writing checkpoints", lambda each: each.checkpoint_seconds),
    (Cause.SLOW_IO, "data", "stalled for disk or network storage", lambda each: _stored(each)),
    (Cause.MEMORY_PRESSURE, "", "stalled for memory", lambda each: each.reclaim_seconds),
    (
        Cause.CPU_CONTENTION,
        "",
        "ready to run without a processor",
        lambda each: _unserved(each),
    ),
    (
        Cause.GPU_THROTTLING,
        "",
        "lost to a device clock lowered by power or heat",
        lambda each: device_work(each) * each.device_throttled * each.device_slowdown,
    ),
    (
        Cause.GPU_SHARED,
        "",
        "lost to other processes on the device",
        lambda each: device_work(each) * each.device_shared,
    ),
)


def rank_causes(run: str, ranks: Sequence[RankEvidence], cost: ReadWorkerCost = unmeasured) -> list[Verdict]:
    """Return the causes of a run's lost time, the costliest first.

    A cause costs what it takes beyond the healthy share: beyond the same rank's own past where the run has
    become slower, else beyond the others' median where it is one rank's. A rank is named unless the median of
    the others has half of it as well, or a cause needs a larger share. Where ranks wait for each other, one
    rank's loss is the run's only as far as the rank is late, and what none of the mechanisms claims of a
    rank's lateness is the rank's own.

    Mechanisms that measure their own time come first, and what they claim is taken from the phases. What all
    ranks have lost ever since they started counts from :data:`~.attribution.EVER_SINCE` on. Time in
    collectives does not: how long an exchange has to take is not known. If less than :data:`EXPLAINED` of a
    slowdown has a cause, the answer begins with ``UNKNOWN``, which costs the rest. Where nothing is lost it
    is ``NONE``.

    Args:
        run: Its name.
        ranks: What is known of its ranks.
        cost: What a loader's worker costs on this machine.
    """
    seen = [rank for rank in ranks if rank.step_seconds > 0]
    if not seen:
        return [Verdict(Cause.UNKNOWN, run, "", None, "", "no training step was seen", 0.0, "torchperfd ps")]
    attribution = CauseAttribution(run, seen, cost)
    for cause, phase, words, measure in _MEASURED:
        attribution.attribute(cause, phase, words, measure)
    attribution.attribute(
        Cause.INPUT_BOUND, "data", "waiting for data", lambda each: attribution.left(each, "data")
    )
    attribution.attribute_growth()
    attribution.attribute_lateness()
    attribution.attribute_exchange()
    attribution.attribute(
        Cause.HOST_BOUND, "", "with the device idle while the host works", attribution.host_seconds
    )
    told = sorted(attribution.told, key=lambda verdict: -verdict.cost_seconds_per_step)
    unknown = _unknown(run, seen, attribution.step_seconds, told)
    if unknown is not None:
        told.insert(0, unknown)
    if not told:
        words = f"nothing takes {LEAST_SHARE:.0%} of a {duration(attribution.step_seconds)} step without need"
        if attribution.usual:
            usual = "; ".join(attribution.usual)
            words = f"nothing stands out of a {duration(attribution.step_seconds)} step: {usual}"
        told = [Verdict(Cause.NONE, run, "", None, "", words, 0.0, next_command(Cause.NONE, run))]
    return told


def _unserved(rank: RankEvidence) -> float:
    """Return the wait for a processor, beyond the past's where that is of the threads that exchange.

    Of them several wait one after the other and beside the step's own work: in every run, a part of it. Who
    has more to do than in the past has to wait more often, and that much is no lack of processors.
    """
    queued, past = rank.queued_seconds - rank.throttled_seconds, rank.before
    if past is None:
        return queued
    does, did = rank.own_seconds - rank.queued_seconds, past.own_seconds - past.queued_seconds
    more = max(1.0, does / did) if did > 0 else 1.0
    grown = rank.exchange_queued_seconds - more * past.exchange_queued_seconds
    return queued - (more - 1) * past.queued_seconds + max(0.0, grown)


def _stored(rank: RankEvidence) -> float:
    """Return the wait for data that is storage's.

    Where most of it is, all of it is: what a loader does besides, such as copying, belongs to the same reads.
    """
    waited = rank.phase_seconds.get("data", 0.0)
    return waited if rank.disk_seconds > EXPLAINED * waited else rank.disk_seconds


def _unknown(run: str, seen: Sequence[RankEvidence], step: float, told: Sequence[Verdict]) -> Verdict | None:
    """Return what a slowdown has no cause for, if that is most of it, and the phase that has grown most."""
    slowed = [
        (rank.step_seconds - rank.before.step_seconds, rank, rank.before) for rank in seen if rank.before
    ]
    if not slowed:
        return None
    slower, rank, before = max(slowed, key=lambda each: each[0])
    # What was there before explains nothing of it.
    unexplained = slower - sum(each.cost_seconds_per_step for each in told if each.has_grown)
    if slower < LEAST_SHARE * step or unexplained <= (1 - EXPLAINED) * slower:
        return None
    if any(each.cause is Cause.CPU_CONTENTION for each in told):
        # What other threads of the ranks wait for a processor is measured by nobody.
        return None
    knock_on = _knock_on(slowed, slower, told)
    unexplained -= knock_on
    own = {name: seconds for name, seconds in rank.phase_seconds.items() if name not in WAITING}
    phase = max(own, key=lambda name: own[name] - before.phase_seconds.get(name, 0.0), default="")
    words = (
        f"steps take {duration(slower)} more than before, {duration(unexplained)} of it without a known cause"
    )
    words += f", and {duration(knock_on)} in exchanges that have grown with it" if knock_on else ""
    words += f"; {phase} has grown most" if phase else ""
    command = next_command(Cause.UNKNOWN, run)
    return Verdict(Cause.UNKNOWN, run, "", None, phase, words, unexplained, command, has_grown=True)


def _knock_on(
    slowed: Sequence[tuple[float, RankEvidence, RankEvidence]], slower: float, told: Sequence[Verdict]
) -> float:
    """Return how much of a slowdown is in exchanges, where most of it is in the ranks' own work; else 0.

    Ranks that all work longer also meet less evenly by chance: that is no part of what they do more. Less
    than :data:`LEAST_SHARE` of the slowdown does not count.

    Args:
        slowed: By how much each rank's steps have grown, the rank, and its past.
        slower: By how much the run's have.
        told: What has a cause, of the exchange as well.
    """
    own = statistics.median(rank.own_seconds - past.own_seconds for _, rank, past in slowed)
    exchange = sum(each.cost_seconds_per_step for each in told if each.cause is Cause.COLLECTIVE)
    beyond = slower - own - exchange
    return beyond if own >= MOST_OF * slower and beyond >= LEAST_SHARE * slower else 0.0
